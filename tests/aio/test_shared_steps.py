"""Steps in which ranks share a rollout, or a prefix of one, from a put to the ranks and back: planned, delivered again,
with payloads elsewhere, and what trees hold of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import anyio
import pytest
import torch
from crew import Crew
from helpers import kill, settle
from scripted import same_rollout
from served import Served

import stream_balancer as sb
from stream_balancer.rollouts import MicroBatch, RankBatch, Rollout, SharedRollout
from stream_balancer.rollouts.shared import join_column
from stream_balancer.testing import MemoryNetwork, make_rollouts

pytestmark = pytest.mark.anyio
LENGTHS = [900, 12, 15, 11, 14, 16, 13, 10]
"""The first is far above the fair share of any number of ranks."""
SHARED: dict[str, Any] = {"sizes": (1, 2, 4), "min_tokens": 100}
KNOBS: dict[str, Any] = {"dp_size": 4, "batch_size": len(LENGTHS), "window": len(LENGTHS), "sync": "step"}


class Run(Served):
    def __init__(self) -> None:
        super().__init__(**KNOBS, context_parallel=SHARED)

    def check(self) -> None:
        """Every rollout was trained on once; of the shared ones all parts, which join to it."""
        parts: dict[str, dict[int, MicroBatch]] = {}
        alone = []
        for batch in self.seen:
            for mb in batch.micro_batches:
                for rollout in mb.rollouts:
                    if isinstance(rollout, SharedRollout) and not rollout.is_padding:
                        parts.setdefault(rollout.rollout_id, {})[batch.rank] = mb
                    elif not rollout.is_padding:
                        alone.append(rollout.rollout_id)
                        assert same_rollout(rollout, self.rollouts[rollout.rollout_id])
        assert sorted([*alone, *parts]) == sorted(self.rollouts)
        assert parts, "nothing was shared: the test says nothing"
        for name, members in parts.items():
            (group,) = {mb.cp_group for mb in members.values()}
            assert sorted(members) == list(group)
            for column, values in self.rollouts[name].tokens.items():
                if column == "loss_mask":  # nothing predicts the first token
                    values = torch.cat([values.new_zeros(1), values[1:]])
                layouts = [members[rank].packed() for rank in group]
                assert join_column([one[column] for one in layouts], len(values)).equal(values)
                following = join_column([one.next(column) for one in layouts], len(values))
                assert following.equal(torch.cat([values[1:], values.new_zeros(1)]))


async def test_a_part_that_is_gone_once_the_others_have_begun_is_an_error() -> None:
    """They would train on theirs beside zeros."""
    run = Run()
    async with run.balancer, anyio.create_task_group() as tasks:
        await run.put(make_rollouts(LENGTHS), remote=True)
        run.balancer.end()
        for rank in (0, 1, 3):
            tasks.start_soon(run.train, rank)
        tasks.start_soon(partial(run.serve, rejoin_timeout_s=60))
        feed = run.feed(2)
        first = await anext(feed)
        assert first.micro_batches[0].cp_group == (0, 1, 2, 3)
        kill(feed)
        await anyio.sleep(1)
        run.kept.gone = {0}
        again = await anext(run.feed(2, incarnation=1))
        name = next(iter(run.rollouts))
        with pytest.raises(
            sb.errors.RankLostError, match=rf"\['{name}'\] are gone with their producer, and the ranks that share"
        ):
            _ = again.micro_batches
        tasks.cancel_scope.cancel()


async def test_only_the_parts_of_a_payload_are_fetched() -> None:
    run = Run()
    await run.run(make_rollouts(LENGTHS), remote=True)
    run.check()
    rollouts = list(run.rollouts.values())
    row = sum(column[0].nbytes for column in rollouts[0].tokens.values())
    degree = next(len(mb.cp_group) for batch in run.seen for mb in batch.micro_batches if mb.cp_group)
    most = sum(one.nbytes for one in rollouts) + row * 4 * degree
    assert run.kept.num_bytes <= most, "more than the parts, their halos and a chunk's rest"


async def test_a_part_that_only_one_member_cannot_get_is_nobodys() -> None:
    run = Run()
    async with run.balancer, anyio.create_task_group() as tasks:
        await run.put(make_rollouts(LENGTHS), remote=True)
        run.balancer.end()
        for rank in (0, 2, 3):
            tasks.start_soon(run.train, rank)
        await settle()  # they have connected
        run.kept = run.kept.without(0)
        tasks.start_soon(run.train, 1)
        await run.serve()
    shared = [mb for batch in run.seen for mb in batch.micro_batches if mb.cp_group]
    assert shared
    assert all(not mb.packed()["loss_mask"].any() and not mb.packed()["input_ids"].any() for mb in shared)
    assert not any(mb.packed().rollout_weights.any() for mb in shared)
    left = len(LENGTHS) - 1, sum(LENGTHS[1:])
    assert {(one.global_num_rollouts, one.global_num_tokens) for one in run.seen} == {left}
    assert run.balancer.statistics().evicted["lost"] == 1


async def test_knobs_that_come_later_share_rollouts_that_a_lost_rank_takes_a_part_of() -> None:
    """serve() began without ``context_parallel``: those that share with the lost rank begin it again all the same."""
    balancer = sb.StreamBalancer(sb.BalancerConfig(**KNOBS))
    crew = Crew(MemoryNetwork(dp_size=4), {1: (0, "barrier")})
    async with balancer, anyio.create_task_group() as tasks:
        tasks.start_soon(partial(sb.serve, balancer, crew.network, on_rank_loss="replan"))
        for rank in range(4):
            tasks.start_soon(crew.train, rank)
        await anyio.sleep(1)
        balancer.reconfigure(context_parallel=SHARED)
        for rollout in make_rollouts(LENGTHS):
            await balancer.put(rollout)
        balancer.end()
    crew.check(balancer, len(LENGTHS))
    assert any(isinstance(one, SharedRollout) for one in crew.seen.values())
    assert {rank for rank, _ in crew.rewound} == {0, 2, 3}


COST = sb.cost.QuadraticCost(linear=50.0, quadratic=1.0)
SIBLINGS = 3


def some_rollouts(seed: int) -> Iterator[Rollout]:
    """Eight groups in any order; every fourth has no common prompt."""
    dice, tokens, made = random.Random(seed), torch.Generator().manual_seed(seed), []
    for group in range(8):
        prompt = torch.randint(1000, (dice.randint(2, 60),), generator=tokens)
        for number in range(SIBLINGS):
            own = torch.randint(1000, (min(int(dice.lognormvariate(3, 1)) + 1, 100),), generator=tokens)
            ids = torch.cat([prompt, own])
            name, prefix = f"{group}.{number}", 0 if group % 4 == 3 else len(prompt)
            made.append(Rollout(tokens={"input_ids": ids}, rollout_id=name, group_id=f"g{group}", prefix=prefix))
    yield from dice.sample(made, len(made))


def work(rank_batch: RankBatch) -> float:
    """Of its trees: each token once, at the price that it has at its place in the rollout."""
    total = 0.0
    for micro_batch in rank_batch.micro_batches:
        if all(rollout.is_padding for rollout in micro_batch.rollouts):
            continue
        for node in micro_batch.tree().nodes:
            before, until = COST([node.position, node.position + node.stop - node.start])
            total += until - (before if node.position else 0.0)
    return total


@pytest.mark.parametrize("cap", [None, 170])
async def test_loads_are_the_work_of_the_trees_that_ranks_get(cap: int | None) -> None:
    for seed in range(4):
        run = Served(
            dp_size=3, batch_size=12, groups=sb.Groups(size=SIBLINGS, share_prefixes=True), cost=COST,
            micro_batches=sb.MicroBatches(max_tokens=cap), max_skips=4,
        )  # fmt: skip
        await run.run(some_rollouts(seed))
        assert sum(batch.num_rollouts for batch in run.seen) >= 24
        assert any(one.tree().num_tokens < one.num_tokens for batch in run.seen for one in batch.micro_batches)
        for batch in run.seen:
            assert batch.load == pytest.approx(work(batch))
            for one in batch.micro_batches:
                assert cap is None or one.tree().num_tokens <= cap
                names = [rollout.group_id for rollout in one.rollouts if rollout.prefix]
                runs = [name for place, name in enumerate(names) if not place or names[place - 1] != name]
                assert len(runs) == len(set(names)), "siblings are not neighbours"
