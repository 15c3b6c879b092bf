"""Every way to put: accept= first, then room; cancelled at either, in any way there is, it was not accepted, nothing is
doubled, and nobody is left waiting."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal

import anyio
import helpers
import pytest
import torch
from anyio.lowlevel import checkpoint
from helpers import attend, fill, settle, waiting
from invariants import verify
from served import attended

import stream_balancer as sb
from stream_balancer.testing import MemoryNetwork, make_rollout, make_rollouts

How = Literal["scope", "native", "timeout"]
# native task.cancel() and asyncio.timeout are asyncio's own
config = partial(helpers.config, window=4, capacity=4)


CASES = [("asyncio", "scope"), ("asyncio", "native"), ("asyncio", "timeout"), ("trio", "scope")]
ways = pytest.mark.parametrize(("anyio_backend", "how"), CASES, indirect=["anyio_backend"])
MAX_PASSES = 12


class Outcome:
    """What became of a call: its result, or cancelled."""

    def __init__(self) -> None:
        self.finished = False
        self.result: Any = None


async def cancelled_after(
    passes: int, how: How, call: Callable[[], Awaitable[Any]], meanwhile: Callable[[], Awaitable[Any]]
) -> Outcome:
    """Start ``call`` and ``meanwhile``, cancel ``call`` after so many passes of the loop, wait for both."""
    outcome = Outcome()

    async def run() -> None:
        outcome.result = await call()
        outcome.finished = True

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(meanwhile)
        if how == "scope":
            async with anyio.create_task_group() as victim:
                victim.start_soon(run)
                for _ in range(passes):
                    await checkpoint()
                victim.cancel_scope.cancel()
        elif how == "native":
            task = asyncio.ensure_future(run())
            for _ in range(passes):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        else:
            # a timeout that expires while other things happen at the same instant
            async def timed() -> None:
                try:
                    async with asyncio.timeout(0):
                        await run()
                except TimeoutError:
                    pass

            task = asyncio.ensure_future(timed())
            await asyncio.wait([task])
    return outcome


@ways
@pytest.mark.parametrize("passes", range(0, 2 * MAX_PASSES, 2))
async def test_a_cancelled_put_was_not_accepted_and_passes_its_turn_on(how: How, passes: int) -> None:
    """The first of five that wait is cancelled at every pass around the moment when there is room for four."""
    async with sb.StreamBalancer(config()) as balancer, anyio.create_task_group() as tasks:
        await fill(balancer, [3] * 4)
        batches = balancer.batches()

        async def others() -> None:
            for rollout in make_rollouts([2] * 4, prefix="other"):
                await checkpoint()
                tasks.start_soon(balancer.put, rollout)
            await checkpoint()
            await anext(batches)

        outcome = await cancelled_after(passes, how, lambda: balancer.put(make_rollout(2, "victim")), others)
        await settle()
        verify(balancer.parts.core)
        assert len(waiting(balancer)) == 4
        assert ("victim" in waiting(balancer)) == outcome.finished
        assert balancer.statistics().blocked_puts == outcome.finished
        tasks.cancel_scope.cancel()


@ways
@pytest.mark.parametrize("passes", range(MAX_PASSES))
async def test_a_cancelled_trainer_took_nothing(how: How, passes: int) -> None:
    async with sb.StreamBalancer(config(window=8, capacity=8)) as balancer:
        batches = balancer.batches()
        outcome = await cancelled_after(passes, how, lambda: anext(batches), partial(fill, balancer, [3] * 8))
        stats = balancer.statistics()
        assert stats.waiting + stats.in_flight == 8
        assert stats.in_flight == (4 if outcome.finished else 0)
        balancer.end()
        rest = [batch async for batch in batches]
        got = ([outcome.result] if outcome.finished else []) + rest
        assert sorted(r.rollout_id for b in got for r in b.rollouts) == [f"r{n}" for n in range(8)]


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
        config(micro_batches=sb.MicroBatches(max_tokens=10), sync="step"),
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


async def test_siblings_that_come_one_by_one_are_judged_when_the_last_is_there() -> None:
    asked: list[int] = []

    async def accept(rollouts: Sequence[sb.Rollout]) -> bool:
        asked.append(len(rollouts))
        await anyio.sleep(1.0)
        return has_signal(rollouts)

    knobs = config(groups=sb.Groups(size=3), batch_size=6, window=12, capacity=24)
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
        groups=sb.Groups(size=4),
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


WAYS = ["put", "put_group", "slot", "slot_group", "producer", "producer_group"]
LATE = ["late0", "late1"]


async def test_the_controller_checks_a_group_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer may be a program of another make."""
    monkeypatch.setattr("stream_balancer.client.producer.check_group", lambda _: None)
    async with attended(sb.StreamBalancer(config())) as (balancer, transport, _):
        producer = sb.connect(transport.connect_producer())
        for group in ([make_rollout(3, "a", group_id="g"), make_rollout(3, "b", group_id="h")], [make_rollout(3, "a")]):
            with pytest.raises(sb.errors.RolloutError, match="siblings that share one group_id"):
                await producer.put_group(group)
        assert balancer.statistics().accepted == 0
        await producer.put_group([make_rollout(3, name, group_id="g") for name in "ab"])
        assert balancer.statistics().accepted == 2


async def test_a_put_that_waited_for_room_waits_on_for_who_attends_next() -> None:
    async with sb.StreamBalancer(config()) as balancer, MemoryNetwork(dp_size=2) as transport:
        producer = sb.connect(transport.connect_producer())
        async with anyio.create_task_group() as puts:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(attend, balancer, transport)
                for n in range(6):
                    puts.start_soon(producer.put, make_rollout(3, str(n)))
                await settle()
                assert balancer.statistics().blocked_puts == 2
                tasks.cancel_scope.cancel()
            assert balancer.statistics().blocked_puts == 0
            await anext(balancer.batches())
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(attend, balancer, transport)
                await settle()
                assert len(waiting(balancer)) == 2
                tasks.cancel_scope.cancel()


# -- every way to put --------------------------------------------------------------------------------------------------


@asynccontextmanager
async def full_balancer(way: str) -> AsyncIterator[tuple[sb.StreamBalancer, Callable[[], Awaitable[None]]]]:
    """A balancer without room, whose ``accept=`` takes 10 s for late rollouts; and a put of such, in this way."""

    async def accept(rollouts: Sequence[sb.Rollout]) -> bool:
        await anyio.sleep(10.0 if rollouts[0].rollout_id in LATE else 0.0)
        return True

    by, group = way.partition("_")[::2]
    rollouts = [make_rollout(3, name, group_id="g" if group else None) for name in LATE[: 2 if group else 1]]
    async with (
        attended(sb.StreamBalancer(config(), accept=accept)) as (balancer, transport, _),
        balancer.reserve(2) as slot,
    ):
        to = {"put": balancer, "slot": slot, "producer": sb.connect(transport.connect_producer())}[by]
        await fill(balancer, [3] * 4)
        yield balancer, (lambda: to.put_group(rollouts)) if group else (lambda: to.put(rollouts[0]))


@pytest.mark.parametrize("way", WAYS)
async def test_it_is_filtered_and_then_waits_for_room(way: str) -> None:
    async with full_balancer(way) as (balancer, put), anyio.create_task_group() as tasks:
        tasks.start_soon(put)
        await anyio.sleep(9.0)
        assert balancer.statistics().blocked_puts == 0
        await anyio.sleep(2.0)
        assert balancer.statistics().blocked_puts == 1
        assert balancer.statistics().accepted == 4
        await anext(balancer.batches())
        await settle()
        assert waiting(balancer) == LATE[: 1 + way.endswith("group")]
        assert balancer.statistics().blocked_puts == 0


@pytest.mark.parametrize("after_s", [5.0, 15.0])
@pytest.mark.parametrize("way", WAYS)
async def test_cancelled_on_the_way_it_was_not_accepted(way: str, after_s: float) -> None:
    async with full_balancer(way) as (balancer, put):
        with anyio.move_on_after(after_s):
            await put()
        await settle()
        await anext(balancer.batches())
        await anyio.sleep(20.0)
        stats = balancer.statistics()
        assert (stats.accepted, stats.waiting, stats.blocked_puts, stats.reserved) == (4, 0, 0, 2)
        verify(balancer.parts.core)
