"""Gradients of random combinations of features: each step's, over real ranks, is that of one process to 1e-6.

"journal": the controller is killed in the midst of a step, and another goes on at its address. "seats": each rank is
two processes, as tensor parallelism has it. "resize": more ranks, then fewer.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import torch.distributed as dist
from forked import free_port
from guard import GUARD_S
from processes import Child
from torch.distributed.device_mesh import DeviceMesh

import stream_balancer as sb
from stream_balancer.net import connection
from stream_balancer.net.movers.torch_dist import TorchDist
from stream_balancer.testing import make_rollout

RANKS, STEPS, BATCH = 4, 4, 24
KNOBS: dict[str, dict[str, Any]] = {
    "groups": {"groups": {"size": 4}},
    "cap": {"micro_batches": {"max_tokens": 80}, "sync": "step"},
    "lockstep": {"micro_batches": {"max_tokens": 80}, "sync": "micro_batch"},
    "mini_batches": {"mini_batches": 2},
}
SERVED: dict[str, dict[str, Any]] = {
    "replan": {"on_rank_loss": "replan"},
}
FEATURES = (
    "groups", "cap", "lockstep", "mini_batches", "replan", "direct", "torch_dist", "resize", "seats", "journal",
)  # fmt: skip
APART = (
    {"cap", "lockstep"}, {"mini_batches", "replan"},
    {"journal", "torch_dist"},
)  # fmt: skip
"""Combinations that are refused, that set one knob to two values, or that do not meet: who comes to another controller
goes by the socket."""


def together() -> list[Any]:
    """Three features each, in a random order in which every feature comes as soon and as often as the others, but for
    the first. All but ten are run by ``make soak``."""
    first = ("groups", "cap", "mini_batches")
    triples = [one for one in combinations(FEATURES, 3) if not any(apart <= set(one) for apart in APART)]
    random.Random(0).shuffle(triples)
    found, seen = list[Any](), Counter[str]()
    while triples:
        triples.remove(one := min(triples, key=lambda one: (one != first, sum(seen[feature] for feature in one))))
        seen.update(one)
        marks = [pytest.mark.soak] if len(found) >= 10 else []
        found.append(pytest.param(frozenset(one), id="+".join(one), marks=marks))
    return found


class Gradient:
    """Gradient of a small model, summed over what was added."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Embedding(64, 8), torch.nn.Linear(8, 8), torch.nn.Tanh())
        self.head = torch.nn.Linear(8, 64)
        self.ids: list[str] = []

    def add(self, micro_batch: sb.rollouts.MicroBatch) -> None:
        """A sum, which is divided once all is known."""
        packed = micro_batch.packed()
        ids = packed["input_ids"] % 64
        said = self.head(self.model(ids))
        loss = torch.nn.functional.cross_entropy(said, ids, reduction="none")
        (loss * packed["loss_mask"]).sum().backward()
        self.ids += [r.rollout_id for r in micro_batch.rollouts if not r.is_padding]

    def flat(self) -> torch.Tensor:
        parameters = [*self.model.parameters(), *self.head.parameters()]
        return torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters])


class World:
    """A process group of those that are left, made anew when they are others."""

    def __init__(self, port: int, rank: int, seat: int) -> None:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        self.store = dist.PrefixStore(f"seat {seat}", store)
        self._rank = rank
        self._ranks: tuple[int, ...] = ()

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        if ranks != self._ranks:
            if self._ranks:
                dist.destroy_process_group()
            store = dist.PrefixStore(str(ranks), self.store)
            dist.init_process_group("gloo", store=store, rank=ranks.index(self._rank), world_size=len(ranks))
            self._ranks = ranks
        dist.all_reduce(tensor)

    def save(self, state: dict[str, int]) -> None:
        """What the weights contain. Only a collective of all follows, so nobody saves an older one later."""
        self.store.set("weights", json.dumps(state))

    def saved(self) -> dict[str, int]:
        return dict(json.loads(self.store.get("weights")))


def pieces(step: Any, features: frozenset[str]) -> Iterable[tuple[Any, float | None]]:
    """What a gradient each is made of: (micro-batches, loss tokens of all ranks, where known by now)."""
    if "mini_batches" in features:
        return [(one.micro_batches, one.global_num_loss_tokens) for one in step.mini_batches]
    return [(step, None)]


def movers_of(features: frozenset[str]) -> list[str]:
    return [name for name, feature in (("torch_dist", "torch_dist"), ("shared_memory", "cap")) if feature in features]


def run_rank(
    address: str, port: int, features: frozenset[str], place: tuple[int, int, int], dies: bool, pipe: Any
) -> None:
    """The loop of a trainer, at a (rank, dp_size, seat)."""
    rank, dp_size, seat = place
    world = World(port, rank, seat)
    join: dict[str, Any] = {"rank": rank, "dp_size": dp_size}
    if "seats" in features:
        places = torch.arange(2 * dp_size).view(dp_size, 2)
        of_two: dict[str, Any] = {"mesh_dim_names": ("dp", "tp"), "_init_backend": False, "_rank": 2 * rank + seat}
        join = {"mesh": DeviceMesh("cpu", places, **of_two)}
    feed = sb.RankFeed(address, movers=movers_of(features), rejoin="journal" in features, **join)
    while True:
        try:
            for step in feed:
                if dies and step.step == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                train(step, features, world, pipe)
                world.save(feed.state_dict())
            return
        except sb.errors.RankLostError as error:
            if "resize" not in features or error.cause != "other ranks have trained without it":
                raise
            # it is new in the run, and loads the weights of the others
            feed.load_state_dict(world.saved())


def train(step: sb.Step, features: frozenset[str], world: World, pipe: Any) -> None:
    made = []
    for micro_batches, loss_tokens in pieces(step, features):
        gradient = Gradient()
        for micro_batch in micro_batches:
            gradient.add(micro_batch)
        made.append((gradient, loss_tokens))
    if (end := step.finish()) is None:
        return  # it is planned anew for the ranks that are left
    for part, (gradient, loss_tokens) in enumerate(made):
        total = gradient.flat() / (loss_tokens or end.loss_tokens)
        world.all_reduce(total, end.ranks)
        pipe.send((step.step, part, gradient.ids, total.tolist()))


def batched(rollouts: Sequence[sb.Rollout], size: int) -> Iterable[Sequence[sb.Rollout]]:
    return (rollouts[at : at + size] for at in range(0, len(rollouts), size))


def rollouts(features: frozenset[str]) -> list[sb.Rollout]:
    """Siblings begin with the same tokens. Every seventh token is masked."""
    made, grouped = [], "groups" in features
    for number in range(STEPS * BATCH):
        group = number // 4 if grouped else number
        length = 8 + random.Random(number).randrange(60)
        ids = torch.cat([torch.arange(group, group + 6), torch.arange(number, number + length)]) % 64
        one = make_rollout(len(ids), f"r{number}", group_id=f"g{group}" if grouped else None)
        mask = (torch.arange(len(ids)) % 7 != 0).float()
        made.append(replace(one, tokens={"input_ids": ids, "loss_mask": mask}))
    return made


class Planned(sb.Observer):
    """Features that were seen in what the balancer took in and planned; which rank was to train what."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.rank_of: dict[str, set[int]] = {}
        self.sizes: set[int] = set()
        """Ranks that steps had."""
        self.pairs: list[TorchDist] = []

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Whatever the controller sends goes by a mover that is ready, however small it is."""
        begin, send = TorchDist.begin, TorchDist.send

        def begun(mover: TorchDist) -> None:
            self.pairs.append(mover)
            begin(mover)

        def sent(mover: TorchDist, *args: Any) -> bool:
            is_sent = send(mover, *args)
            self.seen.update(["torch_dist"] * is_sent)
            return is_sent

        patch.setattr(TorchDist, "begin", begun)
        patch.setattr(TorchDist, "send", sent)
        patch.setattr(connection, "MOVER_BYTES", 1)

    def accepted(self, rollouts: Sequence[sb.Rollout], now: float) -> None:
        self.seen.update("direct" for one in rollouts if one.tokens["input_ids"].is_meta)
        self.seen.update("groups" for one in rollouts if one.group_id)

    def dispatched(self, batch: sb.Batch) -> None:
        for one in batch.ranks:
            self.seen.update("mini_batches" for _ in one.mini_batch_sizes)
            if len(one.micro_batches) > 1:
                self.seen |= {"cap", "lockstep"}
            for rollout in one.rollouts:
                self.rank_of.setdefault(rollout.rollout_id, set()).add(one.rank)

    def acknowledged(self, batch: sb.Batch) -> None:
        self.sizes.add(len(batch.ranks))


@asynccontextmanager
async def controller(features: frozenset[str], port: int, folder: Path) -> AsyncIterator[sb.StreamBalancer]:
    """Serves at this port until all is acknowledged."""
    knobs: dict[str, Any] = {"dp_size": RANKS, "batch_size": BATCH, "window": BATCH}
    options: dict[str, Any] = {}
    for feature in sorted(features):
        knobs |= KNOBS.get(feature, {})
        options |= SERVED.get(feature, {})
    journal = folder / "journal" if "journal" in features else None
    async with (
        sb.StreamBalancer(sb.BalancerConfig(**knobs), journal=journal) as balancer,
        sb.TorchTransport.listen(dp_size=RANKS, port=port, movers=movers_of(features)) as transport,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(partial(sb.serve, **options), balancer, transport)
        yield balancer


def run_first_controller(features: frozenset[str], port: int, folder: Path, _: Any) -> None:
    async def until_killed() -> None:
        async with controller(features, port, folder) as balancer:
            await begun(balancer)
            os.kill(os.getpid(), signal.SIGKILL)

    anyio.run(until_killed)


async def begun(balancer: sb.StreamBalancer) -> None:
    """A rank has a step."""
    while all(state.step is None for state in balancer.rank_states()):
        await anyio.sleep(0.01)


class Drill:
    """Processes of a run, and who puts."""

    def __init__(self, features: frozenset[str], folder: Path) -> None:
        self.features, self.folder = features, folder
        self.port, self.store = free_port(), dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.todo, self.planned = rollouts(features), Planned()
        self.seats = range(2 if "seats" in features else 1)
        self.ranks: dict[tuple[int, int], Child] = {}
        """By rank and seat."""

    def start(self, rank: int, dp_size: int) -> None:
        dies = "replan" in self.features and rank == 1
        for seat in self.seats:
            place = (rank, dp_size, seat)
            self.ranks[rank, seat] = Child(run_rank, self.address, self.store.port, self.features, place, dies)

    async def run(self) -> tuple[dict[tuple[int, int], list[Any]], sb.Statistics]:
        """-> What the ranks said."""
        features, rejoin = self.features, "journal" in self.features
        hand_over: Any = "direct" if "direct" in features else "balancer"
        for rank in range(RANKS):
            self.start(rank, RANKS)
        with anyio.fail_after(GUARD_S):
            if rejoin:
                first = Child(run_first_controller, features, self.port, self.folder)
            async with (
                sb.connect(self.address, hand_over=hand_over, rejoin=rejoin) as by,
                anyio.create_task_group() as tasks,
            ):
                halves = list(batched(self.todo, BATCH // 2))
                if rejoin:
                    # Of some nobody hears from the controller that took them.
                    tasks.start_soon(self._put_step, by, halves[:2])
                    await anyio.to_thread.run_sync(first.process.join)
                    self.planned.seen.add("journal")
                async with controller(features, self.port, self.folder) as balancer:
                    balancer.observers.append(self.planned)
                    while "torch_dist" in features and sum(pair.ready for pair in self.planned.pairs) < RANKS:
                        await anyio.sleep(0.01)
                    for number in range(2 if rejoin else 0, len(halves), 2):
                        await self._resize(balancer, number // 2)
                        await self._put_step(by, halves[number : number + 2])
                    await by.end()
                    balancer.end()
                    said = {at: await anyio.to_thread.run_sync(rank.told) for at, rank in self.ranks.items()}
        return said, balancer.statistics()

    async def _put_step(self, by: Any, halves: Any) -> None:
        """Half a step at a time: else long rollouts wait for each other."""
        for some in halves:
            async with anyio.create_task_group() as puts:
                for one in some:
                    puts.start_soon(self._put, by, one)

    async def _put(self, by: Any, one: sb.Rollout) -> None:
        with suppress(*[sb.errors.DuplicateRolloutError] if "journal" in self.features else []):
            await by.put(one)

    async def _resize(self, balancer: sb.StreamBalancer, step: int) -> None:
        """One rank more, and then two fewer; one fewer where one is lost."""
        change = {STEPS - 1: -1} if "replan" in self.features else {1: 1, STEPS - 1: -2}
        if "resize" not in self.features or step not in change:
            return
        # Who is to join says that it is one of so many: all have joined once a step is over.
        while not self.planned.sizes or not all(state.connected for state in balancer.rank_states()):
            await anyio.sleep(0.01)
        while change[step] == -2 and RANKS + 1 not in self.planned.sizes:
            await anyio.sleep(0.01)
        # the rank that dies is given up first: else this number would be the one that its loss leaves
        while "replan" in self.features and balancer.config.dp_size == RANKS:
            await anyio.sleep(0.01)
        dp_size = balancer.config.dp_size + change[step]
        balancer.reconfigure(dp_size=dp_size)
        if change[step] == 1:
            self.start(RANKS, dp_size)


@pytest.mark.parametrize("features", together())
def test_gradients_of_features_together(
    features: frozenset[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drill = Drill(features, tmp_path)
    planned, todo = drill.planned, drill.todo
    planned.watch(monkeypatch)
    said, statistics = anyio.run(drill.run)
    assert (statistics.in_flight, statistics.waiting) == (0, 0)
    assert statistics.acknowledged == len(todo) or "journal" in features
    assert all(said.values())
    if any(
        rank not in planned.rank_of.get(name, {rank})
        for (rank, _), words in said.items() for *_, ids, _ in words for name in ids
    ):  # fmt: skip
        planned.seen.add("replan")
    if planned.sizes >= ({RANKS - 2} if "replan" in features else {RANKS + 1, RANKS - 1}):
        planned.seen.add("resize")
    if {seat for _, seat in said} == {0, 1}:
        planned.seen.add("seats")
    by_id = {one.rollout_id: one for one in todo}
    for seat in drill.seats:
        steps: dict[tuple[int, int], list[tuple[list[str], list[float]]]] = {}
        for (_, its), words in said.items():
            for step, part, ids, total in words if its == seat else []:
                steps.setdefault((step, part), []).append((ids, total))
        trained: list[str] = []
        for heard in steps.values():
            ids = [name for names, _ in heard for name in names]
            assert len(ids) == len(set(ids))
            trained += ids
            reference = Gradient()
            reference.add(sb.rollouts.MicroBatch.of([by_id[name] for name in sorted(ids)]))
            whole = reference.flat() / sum(by_id[name].num_loss_tokens for name in ids)
            for _, total in heard:
                torch.testing.assert_close(torch.tensor(total), whole, atol=1e-6, rtol=0.0)
        assert sorted(trained) == sorted(by_id)
    assert features <= planned.seen
