"""Payloads that are gone with their producer: masked, counted, named, and every rank divides by the same."""

from __future__ import annotations

import logging
from dataclasses import replace

import anyio
import pytest
import torch
from helpers import kill
from kept import Kept

import stream_balancer as sb
from stream_balancer.testing import MemoryNetwork, make_rollouts
from stream_balancer.types import RankBatch, Rollout

pytestmark = pytest.mark.anyio


class Run:
    """Two ranks that fetch, and what their trainers saw."""

    def __init__(self, *, dp_size: int = 2, batch_size: int = 4, mini_batches: int = 1) -> None:
        self.evicted: list[tuple[str, str]] = []
        self.balancer = sb.StreamBalancer(
            sb.BalancerConfig(dp_size=dp_size, batch_size=batch_size, step_size=sb.StepSize(mini_batches=mini_batches)),
            on_evict=lambda rollout, reason: self.evicted.append((rollout.rollout_id, reason)),
        )
        self.transport = MemoryNetwork(dp_size=dp_size)
        self.kept = Kept(self.transport)
        self.seen: list[list[RankBatch]] = [[] for _ in range(dp_size)]

    def feed(self, rank: int, **options: int) -> sb.RankFeed:
        return sb.RankFeed(self.kept.port(self.transport, rank, **options))

    async def train(self, feed: sb.RankFeed, rank: int) -> None:
        async for batch in feed:
            self.seen[rank].append(batch)

    async def put(self, lengths: list[int], *, remote: bool = True) -> list[Rollout]:
        rollouts = list(make_rollouts(lengths))
        for rollout in rollouts:
            await self.balancer.put(self.kept.remote(rollout) if remote else rollout)
        self.balancer.end()
        return rollouts


def real_rollouts(batches: list[RankBatch]) -> list[Rollout]:
    return [r for batch in batches for r in batch.rollouts if not r.is_padding]


def denominators(batch: RankBatch) -> tuple[int, int, int]:
    return batch.global_num_rollouts, batch.global_num_tokens, batch.global_num_loss_tokens


async def test_what_is_gone_is_masked_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    async with run.balancer as balancer, anyio.create_task_group() as tasks:
        rollouts = await run.put([10, 20, 30, 40])
        run.kept.gone = {1}
        for rank in range(2):
            tasks.start_soon(run.train, run.feed(rank), rank)
        with caplog.at_level(logging.WARNING, "stream_balancer.dispatch"):
            await sb.serve(balancer, run.transport)
        statistics = balancer.statistics()
    trained = real_rollouts([*run.seen[0], *run.seen[1]])
    left = [rollout for rollout in rollouts if rollout is not rollouts[1]]
    assert {r.rollout_id for r in trained} == {r.rollout_id for r in left}
    for rollout in trained:
        original = next(one for one in left if one.rollout_id == rollout.rollout_id)
        assert torch.equal(rollout.tokens["input_ids"], original.tokens["input_ids"])
    assert {denominators(batch) for batches in run.seen for batch in batches} == {(3, 80, 77)}
    assert len({len(batches[0].micro_batches) for batches in run.seen}) == 1, "the plan stays"
    assert run.evicted == [(rollouts[1].rollout_id, "lost")]
    assert statistics.evicted["lost"] == 1
    assert statistics.acknowledged == 3
    (message,) = [record.message for record in caplog.records]
    assert repr(rollouts[1].rollout_id) in message
    assert "worker 3" in message
    assert "it does not have payload 1" in message


async def test_a_rollout_that_is_gone_shares_its_prompt_with_nobody() -> None:
    """There are zeros in its place; the others still share theirs."""
    run = Run(dp_size=1, batch_size=3)
    async with run.balancer as balancer, anyio.create_task_group() as tasks:
        for rollout in make_rollouts([5, 7, 9]):
            await balancer.put(run.kept.remote(replace(rollout, group_id="g", prefix=4)))
        balancer.end()
        run.kept.gone = {1}
        tasks.start_soon(run.train, run.feed(0), 0)
        await sb.serve(balancer, run.transport)
    (batch,) = run.seen[0]
    assert sorted((r.num_tokens, r.prefix) for r in batch.rollouts) == [(5, 4), (7, 0), (9, 4)]


async def test_an_execution_of_which_a_sample_is_gone_still_weighs_one() -> None:
    """The other samples weigh more, on whichever rank they are; one of which all is gone counts no more."""
    run = Run()
    async with run.balancer as balancer, anyio.create_task_group() as tasks:
        for name, lengths in (("partly", [10, 20, 30]), ("gone", [40])):
            for rollout in make_rollouts(lengths, prefix=name):
                await balancer.put(run.kept.remote(replace(rollout, execution_id=name)))
        balancer.end()
        run.kept.gone = {1, 3}
        for rank in range(2):
            tasks.start_soon(run.train, run.feed(rank), rank)
        await sb.serve(balancer, run.transport)
    batches = [batch for batches in run.seen for batch in batches]
    assert [batch.global_num_executions for batch in batches] == [1, 1]
    weights = {
        (rollout.rollout_id, weight, tokens)
        for batch in batches
        for mb in batch.micro_batches
        for rollout, weight, tokens in zip(
            mb.rollouts,
            mb.packed().execution_weights.tolist(),
            mb.packed().execution_loss_tokens.tolist(),
            strict=True,
        )
        if not rollout.is_padding
    }
    assert weights == {("partly0", 0.5, 38), ("partly2", 0.5, 38)}
    assert sum(mb.packed().execution_weights.sum() for batch in batches for mb in batch.micro_batches) == 1


async def test_every_rank_waits_until_all_have_fetched() -> None:
    """Also one whose payloads all came along: else it would divide by more than the other."""
    run = Run()
    async with run.balancer as balancer, anyio.create_task_group() as tasks:
        rollouts = list(make_rollouts([40, 10, 10, 10]))
        for index, rollout in enumerate(rollouts):
            await balancer.put(run.kept.remote(rollout) if index == 0 else rollout)
        balancer.end()
        run.kept.gone = {0}
        for rank in range(2):
            tasks.start_soon(run.train, run.feed(rank), rank)
        await sb.serve(balancer, run.transport)
    assert {denominators(batch) for batches in run.seen for batch in batches} == {(3, 30, 27)}


async def test_a_step_is_final_once_and_for_all() -> None:
    """A rank that comes back gets the denominators that the others trained with, whatever it misses now."""
    run = Run()
    async with run.balancer as balancer, anyio.create_task_group() as tasks:
        rollouts = await run.put([10, 20, 30, 40])
        tasks.start_soon(lambda: sb.serve(balancer, run.transport, rejoin_timeout_s=60.0))
        tasks.start_soon(run.train, run.feed(0), 0)
        first = run.feed(1)
        batch = await anext(first)
        assert denominators(batch) == (4, 100, 96)
        kill(first)
        await anyio.sleep(1.0)
        mine = [r.rollout_id for r in batch.rollouts]
        run.kept.gone = {index for index, rollout in enumerate(rollouts) if rollout.rollout_id == mine[0]}
        await run.train(run.feed(1, incarnation=1), 1)
    assert {denominators(batch) for batches in run.seen for batch in batches} == {(4, 100, 96)}
    assert [r.rollout_id for r in real_rollouts(run.seen[1])] == mine[1:]
    assert run.evicted == [(mine[0], "lost")]


async def test_a_step_that_is_given_up_holds_nobody_up() -> None:
    """The rank that was to answer does not come back for it; the others must not wait for ever."""
    run = Run()
    async with run.balancer as balancer, anyio.create_task_group() as tasks:
        await run.put([10, 20, 30, 40])
        tasks.start_soon(lambda: sb.serve(balancer, run.transport, rejoin_timeout_s=60.0))
        slow = Kept(run.transport, lambda: kill(feed)).port(run.transport, 1)
        feed = sb.RankFeed(slow)
        tasks.start_soon(run.train, run.feed(0), 0)
        await anyio.sleep(1.0)
        assert run.seen[0] == [], "rank 1 has not answered"
        balancer.acknowledge(0)
        await run.train(run.feed(1, incarnation=1), 1)
        await feed.aclose()
    assert run.seen == [[], []], "a checkpoint has it"


async def test_each_mini_batch_divides_by_what_is_left_of_it() -> None:
    run = Run(batch_size=8, mini_batches=2)
    async with run.balancer as balancer, anyio.create_task_group() as tasks:
        await run.put([10, 20, 30, 40, 50, 60, 70, 80])
        run.kept.gone = {0, 3, 7}
        for rank in range(2):
            tasks.start_soon(run.train, run.feed(rank), rank)
        await sb.serve(balancer, run.transport)
    mini_batches = list(zip(*(batches[0].mini_batches for batches in run.seen), strict=True))
    assert len(mini_batches) == 2
    left = [real_rollouts(list(parts)) for parts in mini_batches]
    assert sum(map(len, left)) == 5
    for parts, rollouts in zip(mini_batches, left, strict=True):
        tokens = sum(rollout.num_tokens for rollout in rollouts)
        assert {denominators(part) for part in parts} == {(len(rollouts), tokens, tokens - len(rollouts))}
        assert {part.global_num_executions for part in parts} == {len(rollouts)}
