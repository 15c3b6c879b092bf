"""accept=: what is not worth training on is turned down at the door, and disturbs nobody."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio
import helpers
import pytest
import torch
from anyio.lowlevel import checkpoint
from helpers import fill, settle, waiting
from invariants import verify

import stream_balancer as sb
from stream_balancer.testing import make_rollout, make_rollouts

config = partial(helpers.config, window=4, capacity=4)


def rewarded(rollout_id: str, reward: float, group: str | None = None) -> sb.Rollout:
    return sb.Rollout(
        tokens={"input_ids": [1, 2, 3]}, scalars={"reward": reward}, rollout_id=rollout_id, group_id=group
    )


def has_signal(rollouts: Sequence[sb.Rollout]) -> bool:
    """As users write it: a tensor of one bool."""
    return torch.tensor([r.scalars["reward"] for r in rollouts]).std() > 0  # type: ignore[return-value]


async def test_what_is_turned_down_is_counted_and_told_and_what_is_bad_is_not_judged() -> None:
    gone: list[tuple[str, str]] = []
    asked: list[str] = []

    def accept(rollouts: Sequence[sb.Rollout]) -> bool:
        asked.append(rollouts[0].rollout_id)
        return rollouts[0].num_tokens > 2

    async with sb.StreamBalancer(
        config(micro_batches=sb.MicroBatches(max_tokens=10)),
        accept=accept,
        on_evict=lambda r, why: gone.append((r.rollout_id, why)),
    ) as balancer:
        await balancer.put(make_rollout(3, "long"))
        await balancer.put(make_rollout(2, "short"))  # returns as usual
        balancer.put_nowait(make_rollout(1, "shorter"))
        stats = balancer.statistics()
        assert waiting(balancer) == ["long"]
        assert gone == [("short", "filtered"), ("shorter", "filtered")]
        assert (stats.accepted, stats.evicted["filtered"]) == (3, 2)
        with pytest.raises(sb.errors.DuplicateRolloutError, match="is done"):
            await balancer.put(make_rollout(2, "short"))
        with pytest.raises(sb.errors.RolloutError, match="11 tokens"):
            await balancer.put(make_rollout(11, "bad"))
        assert "bad" not in asked


@pytest.mark.parametrize("groups", ["same_batch", "same_rank"])
async def test_siblings_that_come_one_by_one_are_judged_when_the_last_is_there(groups: str) -> None:
    asked: list[int] = []

    async def accept(rollouts: Sequence[sb.Rollout]) -> bool:
        asked.append(len(rollouts))
        await anyio.sleep(1.0)
        return has_signal(rollouts)

    knobs = config(groups=sb.Groups(size=3, keep=groups), batch_size=6, window=12, capacity=24)
    async with sb.StreamBalancer(knobs, accept=accept) as balancer, anyio.create_task_group() as tasks:
        for name, rewards in (("a", (0.0, 0.0, 0.0)), ("b", (0.0, 1.0, 0.0))):
            for n, reward in enumerate(rewards):
                tasks.start_soon(balancer.put, rewarded(f"{name}{n}", reward, name))
        await anyio.sleep(0.5)
        assert len(waiting(balancer)) == 4  # two of each; the verdict on the third is out
        await anyio.sleep(1.0)
        assert sorted(waiting(balancer)) == ["b0", "b1", "b2"]
        assert asked == [3, 3]
        stats = balancer.statistics()
        assert (stats.accepted, stats.evicted["filtered"], stats.waiting) == (6, 3, 3)
        verify(balancer.parts.core)
        assert balancer.parts.core.buffer.groups.num_awaited == 0  # the group that was turned down keeps no place


async def test_a_group_that_changed_meanwhile_is_asked_about_again() -> None:
    """Two of four siblings leave by their deadline while the verdict on all four is out."""
    asked: list[int] = []

    async def accept(rollouts: Sequence[sb.Rollout]) -> bool:
        asked.append(len(rollouts))
        await anyio.sleep(10.0)
        return False

    knobs = config(
        groups=sb.Groups(size=4, keep="same_batch"),
        deadline_s=5.0,
        min_batch_size=2,
        batch_size=8,
        window=16,
        capacity=32,
    )
    async with sb.StreamBalancer(knobs, accept=accept) as balancer, anyio.create_task_group() as tasks:
        for n in range(3):
            await balancer.put(rewarded(f"a{n}", 0.0, "a"))
        tasks.start_soon(balancer.put, rewarded("a3", 0.0, "a"))
        batch = await anext(balancer.batches())
        assert sorted(r.rollout_id for r in batch.rollouts if not r.is_padding) == ["a0", "a1", "a2"]
        await anyio.sleep(100.0)
        assert asked == [4, 1]
        assert waiting(balancer) == []
        assert balancer.statistics().evicted["filtered"] == 1


async def test_verdicts_do_not_change_the_order_of_those_that_wait_for_room() -> None:
    async def accept(rollouts: Sequence[sb.Rollout]) -> bool:
        return rollouts[0].rollout_id != "r3"

    async with sb.StreamBalancer(config(), accept=accept) as balancer, anyio.create_task_group() as tasks:
        await fill(balancer, [3] * 4, prefix="full")
        for rollout in make_rollouts([3] * 6):
            tasks.start_soon(balancer.put, rollout)
            await settle()
        assert balancer.statistics().blocked_puts == 5
        await anext(balancer.batches())
        await settle()
        assert waiting(balancer) == ["r0", "r1", "r2", "r4"]
        tasks.cancel_scope.cancel()


def fail(rollouts: Sequence[sb.Rollout]) -> bool:
    raise LookupError("no reward model")


async def fail_later(rollouts: Sequence[sb.Rollout]) -> bool:
    await checkpoint()
    return fail(rollouts)


@pytest.mark.parametrize(
    ("accept", "error", "says"),
    [
        (fail, LookupError, "no reward model"),
        (fail_later, LookupError, "no reward model"),
        (lambda rollouts: None, TypeError, "accept= returned None: return True"),
    ],
    ids=["raises", "raises later", "no return"],
)
async def test_what_it_raises_comes_out_of_the_put(accept: Any, error: type[Exception], says: str) -> None:
    async with sb.StreamBalancer(config(), accept=accept) as balancer:
        with pytest.raises(error, match=says):
            await balancer.put(make_rollout(3))
        assert balancer.statistics().accepted == 0


async def test_put_nowait_cannot_wait_for_a_verdict() -> None:
    answers: list[Any] = []

    async def later() -> bool:
        return True

    def accept(rollouts: Sequence[sb.Rollout]) -> Any:
        answers.append(later())
        return answers[-1]

    async with sb.StreamBalancer(config(), accept=accept) as balancer:
        with pytest.raises(sb.errors.WouldBlock, match="use put"):
            balancer.put_nowait(make_rollout(3))
    assert inspect.getcoroutinestate(answers[0]) == inspect.CORO_CLOSED


# -- nack --------------------------------------------------------------------------------------------------------------


async def test_a_trainer_that_waits_is_woken_by_a_nack() -> None:
    async with sb.StreamBalancer(config()) as balancer:
        await fill(balancer, [3] * 4)
        batches = balancer.batches(auto_ack=False)
        first = await anext(batches)
        got: list[sb.Batch] = []

        async def trainer() -> None:
            got.append(await anext(batches))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(trainer)
            await settle()
            assert not got
            balancer.nack(first.step)
        assert got == [first]
