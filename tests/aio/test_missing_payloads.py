"""Payloads that are gone with their producer: masked, counted, named, and every rank divides by the same."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

import anyio
import pytest
import torch
from helpers import kill
from kept import Kept
from served import Served, real

import stream_balancer as sb
from stream_balancer.rollouts import RankBatch
from stream_balancer.testing import make_rollouts

pytestmark = pytest.mark.anyio
two_ranks = partial(Served, dp_size=2, batch_size=4)


def denominators(batch: RankBatch) -> tuple[int, int, int]:
    return batch.global_num_rollouts, batch.global_num_tokens, batch.global_num_loss_tokens


async def test_what_is_gone_is_masked_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    run, rollouts = two_ranks(), list(make_rollouts([10, 20, 30, 40]))
    run.kept.gone = {1}
    with caplog.at_level(logging.WARNING, "stream_balancer.dispatch"):
        await run.run(rollouts, remote=True)
    left = {one.rollout_id: one for one in rollouts if one is not rollouts[1]}
    trained = real(run.seen)
    assert {one.rollout_id for one in trained} == left.keys()
    for one in trained:
        assert torch.equal(one.tokens["input_ids"], left[one.rollout_id].tokens["input_ids"])
    assert {denominators(batch) for batch in run.seen} == {(3, 80, 77)}
    assert len({len(batch.micro_batches) for batch in run.seen}) == 1, "the plan stays"
    assert run.evicted == [(rollouts[1].rollout_id, "lost")]
    assert run.balancer.statistics().acknowledged == 3
    (message,) = [record.message for record in caplog.records]
    for said in (repr(rollouts[1].rollout_id), "worker 3", "it does not have payload 1"):
        assert said in message


async def test_an_execution_of_which_a_sample_is_gone_still_weighs_one() -> None:
    """The other samples weigh more, on whichever rank they are; one of which all is gone counts no more."""
    run, samples = two_ranks(), (("partly", [10, 20, 30]), ("gone", [40]))
    run.kept.gone = {1, 3}
    made = [(name, make_rollouts(lengths, prefix=name)) for name, lengths in samples]
    await run.run([replace(one, execution_id=name) for name, its in made for one in its], remote=True)
    assert [batch.global_num_executions for batch in run.seen] == [1, 1]
    micro_batches = [mb for batch in run.seen for mb in batch.micro_batches]
    weights = {
        (rollout.rollout_id, weight, tokens)
        for mb in micro_batches
        for rollout, weight, tokens in zip(
            mb.rollouts,
            mb.packed().execution_weights.tolist(),
            mb.packed().execution_loss_tokens.tolist(),
            strict=True,
        )
        if not rollout.is_padding
    }
    assert weights == {("partly0", 0.5, 38), ("partly2", 0.5, 38)}
    assert sum(mb.packed().execution_weights.sum() for mb in micro_batches) == 1


async def test_every_rank_waits_until_all_have_fetched() -> None:
    """Also one whose payloads all came along: else it would divide by more than the other."""
    run = two_ranks()
    run.kept.gone = {0}
    first, *others = make_rollouts([40, 10, 10, 10])
    await run.run([run.kept.remote(first), *others])
    assert {denominators(batch) for batch in run.seen} == {(3, 30, 27)}


async def test_a_step_is_final_once_and_for_all() -> None:
    """A rank that comes back gets the denominators that the others trained with, whatever it misses now."""
    run, rollouts = two_ranks(), list(make_rollouts([10, 20, 30, 40]))
    async with run.balancer, anyio.create_task_group() as tasks:
        await run.put(rollouts, remote=True)
        run.balancer.end()
        tasks.start_soon(partial(run.serve, rejoin_timeout_s=60.0))
        tasks.start_soon(run.train, 0)
        first = run.feed(1)
        batch = await anext(first)
        assert denominators(batch) == (4, 100, 96)
        kill(first)
        await anyio.sleep(1.0)
        mine = [r.rollout_id for r in batch.rollouts]
        run.kept.gone = {index for index, rollout in enumerate(rollouts) if rollout.rollout_id == mine[0]}
        await run.train(1, incarnation=1)
    assert {denominators(batch) for batch in run.seen} == {(4, 100, 96)}
    assert [r.rollout_id for r in real(run.of_rank(1))] == mine[1:]
    assert run.evicted == [(mine[0], "lost")]


async def test_a_step_that_is_given_up_holds_nobody_up() -> None:
    """The rank that was to answer does not come back for it; the others must not wait for ever."""
    run = two_ranks()
    async with run.balancer as balancer, anyio.create_task_group() as tasks:
        await run.put(make_rollouts([10, 20, 30, 40]), remote=True)
        balancer.end()
        tasks.start_soon(partial(run.serve, rejoin_timeout_s=60.0))
        feed = sb.RankFeed(Kept(run.network, lambda: kill(feed)).port(run.network, 1))
        tasks.start_soon(run.train, 0)
        await anyio.sleep(1.0)
        assert run.seen == [], "rank 1 has not answered"
        balancer.acknowledge(0)
        await run.train(1, incarnation=1)
        await feed.aclose()
    assert run.seen == [], "a checkpoint has it"


async def test_each_mini_batch_divides_by_what_is_left_of_it() -> None:
    run = two_ranks(batch_size=8, mini_batches=2)
    run.kept.gone = {0, 3, 7}
    await run.run(make_rollouts([10, 20, 30, 40, 50, 60, 70, 80]), remote=True)
    mini_batches = list(zip(*(batch.mini_batches for batch in run.seen), strict=True))
    assert len(mini_batches) == 2
    left = [real(list(parts)) for parts in mini_batches]
    assert sum(map(len, left)) == 5
    for parts, rollouts in zip(mini_batches, left, strict=True):
        tokens = sum(rollout.num_tokens for rollout in rollouts)
        assert {denominators(part) for part in parts} == {(len(rollouts), tokens, tokens - len(rollouts))}
        assert {part.global_num_executions for part in parts} == {len(rollouts)}


async def test_a_step_of_which_all_is_gone_is_left_out_and_is_no_lost_checkpoint(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run, rollouts = two_ranks(window=4), list(make_rollouts([10, 20, 30, 40, 50, 60, 70, 80]))
    run.kept.gone = {0, 1, 2, 3}

    async def put_later() -> None:
        # the first step is over by then
        await anyio.sleep(1.0)
        await run.put(rollouts[4:], remote=True)
        run.balancer.end()

    with caplog.at_level(logging.WARNING, "stream_balancer.dispatch"):
        async with run.balancer, anyio.create_task_group() as tasks:
            await run.put(rollouts[:4], remote=True)
            for rank in run.ranks:
                tasks.start_soon(run.train, rank)
            tasks.start_soon(run.serve)
            tasks.start_soon(put_later)
    assert {batch.step for batch in run.seen} == {1}
    assert sorted(run.evicted) == [(f"r{number}", "lost") for number in range(4)]
    assert [text for text in caplog.messages if "gone with their producer" not in text] == []
