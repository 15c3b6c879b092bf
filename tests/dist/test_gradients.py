"""Gradients of random combinations of features: each step's, over real ranks, is that of one process to 1e-6."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import anyio
import pytest
import torch
import torch.distributed as dist
from guard import GUARD_S
from processes import Child

import stream_balancer as sb
from stream_balancer.net import connection
from stream_balancer.net.movers.torch_dist import TorchDist
from stream_balancer.testing import make_rollout

RANKS, STEPS, BATCH = 4, 4, 24
KNOBS: dict[str, dict[str, Any]] = {
    "groups": {"groups": {"size": 4, "keep": "same_batch"}},
    "prefixes": {"groups": {"size": 4, "share_prefixes": True}},
    "shared": {"context_parallel": {"sizes": (1, 2), "min_tokens": 40}},
    "cap": {"micro_batches": {"max_tokens": 80}},
    "lockstep": {"micro_batches": {"max_tokens": 80}, "sync": "micro_batch"},
    "mini_batches": {"step_size": {"mini_batches": 2}},
    "late": {"micro_batches": {"max_tokens": 80, "counts": "free"}},
    "tokens": {"step_size": {"tokens": 900, "window_tokens": 900}, "batch_size": None, "window": None},
}
SERVED: dict[str, dict[str, Any]] = {
    "late": {"move_late": True},
    "replan": {"on_rank_loss": "replan"},
    "open": {"open": True},
}
FEATURES = (
    "groups", "prefixes", "shared", "cap", "lockstep", "mini_batches", "late", "replan", "open", "direct", "tokens",
    "torch_dist",
)  # fmt: skip
APART = (
    {"late", "lockstep"}, {"prefixes", "groups"}, {"cap", "late"}, {"cap", "lockstep"}, {"prefixes", "lockstep"},
    *({"mini_batches", other} for other in ("late", "replan", "open", "tokens")), {"open", "tokens"},
)  # fmt: skip
"""Combinations that are refused, or that set one knob to two values."""


def together() -> list[Any]:
    """Three features each, in a random order in which every feature comes as soon and as often as the others, but for
    the first. All but ten are run by ``make soak``."""
    first = ("prefixes", "shared", "mini_batches")
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
    """Gradient of a small model, summed over what was added. ``tree``: each shared prefix is computed once."""

    def __init__(self, *, tree: bool = False) -> None:
        self._tree = tree
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Embedding(64, 8), torch.nn.Linear(8, 8), torch.nn.Tanh())
        self.head = torch.nn.Linear(8, 64)
        self.ids: list[str] = []

    def add(self, micro_batch: sb.types.MicroBatch) -> None:
        """A sum, which is divided once all is known."""
        packed = micro_batch.packed()
        ids = packed["input_ids"] % 64
        if self._tree and not micro_batch.cp_group:
            tree = micro_batch.tree()
            said = self.head(self.model(tree["input_ids"] % 64))[tree.index]
        else:
            said = self.head(self.model(ids))
        loss = torch.nn.functional.cross_entropy(said, ids, reduction="none")
        (loss * packed["loss_mask"]).sum().backward()
        self.ids += [r.rollout_id for r in micro_batch.rollouts if not r.is_padding]

    def flat(self) -> torch.Tensor:
        parameters = [*self.model.parameters(), *self.head.parameters()]
        return torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters])


class World:
    """A process group of those that are left, made anew when they are others."""

    def __init__(self, port: int, rank: int) -> None:
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
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


def pieces(step: Any, features: frozenset[str]) -> Iterable[tuple[Any, float | None]]:
    """What a gradient each is made of: (micro-batches, loss tokens of all ranks, where known by now)."""
    if "mini_batches" in features:
        return [(one.micro_batches, one.global_num_loss_tokens) for one in step.mini_batches]
    return [(step, None)]


def movers_of(features: frozenset[str]) -> list[str]:
    return [name for name, feature in (("torch_dist", "torch_dist"), ("shared_memory", "cap")) if feature in features]


def run_rank(address: str, port: int, rank: int, features: frozenset[str], dies: bool, pipe: Any) -> None:
    """The loop of a trainer."""
    world = World(port, rank)
    for step in sb.RankFeed(address, rank=rank, dp_size=RANKS, movers=movers_of(features)):
        if dies and step.step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        made = []
        for micro_batches, loss_tokens in pieces(step, features):
            gradient = Gradient(tree="prefixes" in features)
            for micro_batch in micro_batches:
                if "late" in features and rank == 0:
                    time.sleep(0.1)  # the others are idle meanwhile
                gradient.add(micro_batch)
            made.append((gradient, loss_tokens))
        if (end := step.finish()) is None:
            continue  # it is planned anew for the ranks that are left
        for part, (gradient, loss_tokens) in enumerate(made):
            total = gradient.flat() / (loss_tokens or end.loss_tokens)
            world.all_reduce(total, end.ranks)
            pipe.send((step.step, part, gradient.ids, total.tolist()))


def batched(rollouts: Sequence[sb.Rollout], size: int) -> Iterable[Sequence[sb.Rollout]]:
    return (rollouts[at : at + size] for at in range(0, len(rollouts), size))


def rollouts(features: frozenset[str]) -> list[sb.Rollout]:
    """Siblings begin with the same tokens. Every seventh token is masked."""
    made, grouped = [], bool(features & {"groups", "prefixes"})
    long = 140 if features & {"cap", "lockstep", "late"} else 400  # two ranks can hold it
    for number in range(STEPS * BATCH):
        group = number // 4 if grouped else number
        is_long = "shared" in features and number % BATCH == 0
        length = long if is_long else 8 + random.Random(number).randrange(60)
        ids = torch.cat([torch.arange(group, group + 6), torch.arange(number, number + length)]) % 64
        one = make_rollout(len(ids), f"r{number}", group_id=f"g{group}" if grouped else None)
        mask = (torch.arange(len(ids)) % 7 != 0).float()
        one = replace(one, tokens={"input_ids": ids, "loss_mask": mask})
        made.append(replace(one, prefix=6) if "prefixes" in features else one)
    return made


class Planned(sb.Observer):
    """Features that were seen in what the balancer took in and planned; which rank was to train what."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.rank_of: dict[str, set[int]] = {}
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
        self.seen.update("prefixes" for one in rollouts if one.prefix)

    def dispatched(self, batch: sb.Batch) -> None:
        for one in batch.ranks:
            self.seen.update("mini_batches" for _ in one.mini_batch_sizes)
            if batch.num_rollouts != BATCH:
                self.seen.add("tokens")
            self.seen.update("shared" for mb in one.micro_batches if mb.cp_group)
            if len(one.micro_batches) > 1:
                self.seen |= {"cap", "lockstep"}
            for rollout in one.rollouts:
                self.rank_of.setdefault(rollout.rollout_id, set()).add(one.rank)


async def drill(
    features: frozenset[str], patch: pytest.MonkeyPatch
) -> tuple[list[sb.Rollout], list[list[Any]], sb.Statistics, Planned]:
    knobs: dict[str, Any] = {"dp_size": RANKS, "batch_size": BATCH, "window": BATCH}
    options: dict[str, Any] = {}
    for feature in sorted(features):
        knobs |= KNOBS.get(feature, {})
        options |= SERVED.get(feature, {})
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    todo, planned = rollouts(features), Planned()
    planned.watch(patch)
    with anyio.fail_after(GUARD_S):
        async with (
            sb.StreamBalancer(sb.BalancerConfig(**knobs)) as balancer,
            sb.TorchTransport.listen(dp_size=RANKS, movers=movers_of(features)) as transport,
            anyio.create_task_group() as tasks,
        ):
            balancer.observers.append(planned)
            ranks = [
                Child(run_rank, transport.address, store.port, rank, features, "replan" in features and rank == 1)
                for rank in range(RANKS)
            ]
            tasks.start_soon(partial(sb.serve, **options), balancer, transport)
            async with sb.connect(transport.address, hand_over="direct" if "direct" in features else "balancer") as by:
                while "torch_dist" in features and sum(pair.ready for pair in planned.pairs) < RANKS:
                    await anyio.sleep(0.01)
                # half a step at a time: else long rollouts wait for each other
                for some in batched(todo, BATCH // 2):
                    async with anyio.create_task_group() as puts:
                        for one in some:
                            puts.start_soon(by.put, one)
                    if "open" in features and not planned.seen & {"open"}:  # half a step is there
                        while all(state.step is None for state in balancer.rank_states()):
                            await anyio.sleep(0.01)
                        planned.seen.add("open")
                await by.end()
                balancer.end()
                said = [await anyio.to_thread.run_sync(rank.told) for rank in ranks]
        return todo, said, balancer.statistics(), planned


@pytest.mark.parametrize("features", together())
def test_gradients_of_features_together(features: frozenset[str], monkeypatch: pytest.MonkeyPatch) -> None:
    todo, said, statistics, planned = anyio.run(drill, features, monkeypatch)
    assert (statistics.acknowledged, statistics.in_flight, statistics.waiting) == (len(todo), 0, 0)
    assert sum(bool(words) for words in said) == RANKS
    if any(
        rank not in planned.rank_of[name] for rank, words in enumerate(said) for *_, ids, _ in words for name in ids
    ):
        planned.seen |= {"late", "replan"}
    assert features <= planned.seen
    steps: dict[tuple[int, int], list[tuple[list[str], list[float]]]] = {}
    for words in said:
        for step, part, ids, total in words:
            steps.setdefault((step, part), []).append((ids, total))
    by_id = {one.rollout_id: one for one in todo}
    trained: list[str] = []
    for heard in steps.values():
        ids = [name for names, _ in heard for name in names]
        assert len(ids) == len(set(ids)) or "shared" in features
        trained += set(ids)
        reference = Gradient()
        reference.add(sb.types.MicroBatch.of([by_id[name] for name in sorted(set(ids))]))
        whole = reference.flat() / sum(by_id[name].num_loss_tokens for name in set(ids))
        for _, total in heard:
            torch.testing.assert_close(torch.tensor(total), whole, atol=1e-6, rtol=0.0)
    assert sorted(trained) == sorted(by_id)
