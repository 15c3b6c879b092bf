# ruff: noqa: SIM117 - the scopes end at different places
"""Puts from elsewhere, over the memory twin: the same contract, under virtual time, cancelled at every pass."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Literal

import anyio
import helpers
import pytest
from anyio.lowlevel import checkpoint
from helpers import settle

import stream_balancer as sb
from stream_balancer.controller.producers import attend
from stream_balancer.producer.client import connect
from stream_balancer.testing import make_rollout, make_rollouts
from stream_balancer.transport.memory import MemoryTransport

How = Literal["scope", "native", "timeout"]
config = partial(helpers.config, window=4, capacity=4)


CASES = [("asyncio", "scope"), ("asyncio", "native"), ("asyncio", "timeout"), ("trio", "scope")]
ways = pytest.mark.parametrize(("anyio_backend", "how"), CASES, indirect=["anyio_backend"])


async def test_put_waits_while_the_balancer_is_full_and_errors_keep_their_words() -> None:
    async with sb.StreamBalancer(config()) as balancer, MemoryTransport(dp_size=2) as transport:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(attend, balancer, transport)
            producer = connect(transport.connect_producer())
            await settle()
            for rollout in make_rollouts([3] * 4):
                await producer.put(rollout)
            assert balancer.statistics().accepted == 4
            with pytest.raises(sb.DuplicateRolloutError) as there:
                await producer.put(make_rollout(3, "r0"))
            with pytest.raises(sb.DuplicateRolloutError) as here:
                balancer.put_nowait(make_rollout(3, "r0"))
            assert str(there.value) == str(here.value)
            with pytest.raises(sb.WouldBlock):
                producer.put_nowait(make_rollout(3, "x"))
            done = anyio.Event()

            async def late() -> None:
                await producer.put_group([make_rollout(2, f"g{n}", group_id="g") for n in range(2)])
                done.set()

            tasks.start_soon(late)
            await settle()
            assert not done.is_set()
            await anext(balancer.batches())
            await settle()
            assert done.is_set()
            balancer.end()
            with pytest.raises(sb.ClosedResourceError, match=r"after end\(\)"):
                await producer.put(make_rollout(3, "y"))
            tasks.cancel_scope.cancel()


@ways
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("passes", range(14))
async def test_a_cancelled_put_was_not_accepted(how: How, passes: int, held: bool) -> None:
    async with sb.StreamBalancer(config()) as balancer, MemoryTransport(dp_size=2) as transport:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(attend, balancer, transport)
            outlet = transport.connect_producer()
            producer = connect(outlet)
            for rollout in make_rollouts([3] * 4):
                await producer.put(rollout)
            batches = balancer.batches()
            finished = cancelled_later = False

            async def make_room() -> None:
                for _ in range(4):
                    await checkpoint()
                await anext(batches)
                if held:  # the verdict hangs in the wire
                    for _ in range(6):
                        await checkpoint()
                    outlet.wire.release()

            async def victim() -> None:
                nonlocal finished, cancelled_later
                await producer.put(make_rollout(2, "victim"))
                finished = True
                if how != "timeout":
                    try:
                        for _ in range(30):
                            await checkpoint()
                    except anyio.get_cancelled_exc_class():
                        cancelled_later = True
                        raise

            tasks.start_soon(make_room)
            if how == "scope":
                async with anyio.create_task_group() as inner:
                    inner.start_soon(victim)
                    for n in range(passes):
                        if held and n == 4:
                            outlet.wire.hold()
                        await checkpoint()
                    inner.cancel_scope.cancel()
            else:

                async def timed() -> None:
                    async with asyncio.timeout(0 if how == "timeout" else None):
                        await victim()

                task = asyncio.ensure_future(timed())
                if how == "native":
                    for n in range(passes):
                        if held and n == 4:
                            outlet.wire.hold()
                        await asyncio.sleep(0)
                    task.cancel()
                await asyncio.wait([task])
                if not task.cancelled():
                    task.exception()
            await settle()
            outlet.wire.release()
            await settle()
            waiting = {r.rollout_id for r in balancer.snapshot().waiting}
            assert ("victim" in waiting) == finished
            assert not finished or cancelled_later or how == "timeout"  # a late cancellation is not swallowed
            assert balancer.statistics().blocked_puts == 0
            tasks.cancel_scope.cancel()


async def test_a_put_cancelled_while_it_waits_for_room_leaves_no_trace() -> None:
    async with sb.StreamBalancer(config()) as balancer, MemoryTransport(dp_size=2) as transport:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(attend, balancer, transport)
            producer = connect(transport.connect_producer())
            for rollout in make_rollouts([3] * 4):
                await producer.put(rollout)
            with anyio.move_on_after(1.0) as scope:
                await producer.put(make_rollout(2, "v"))
            assert scope.cancelled_caught
            assert balancer.statistics().blocked_puts == 0
            await anext(balancer.batches())
            await producer.put(make_rollout(2, "v"))  # it was never taken, so it is no duplicate
            tasks.cancel_scope.cancel()


async def test_a_killed_producer_s_parked_put_is_withdrawn() -> None:
    async with sb.StreamBalancer(config()) as balancer, MemoryTransport(dp_size=2) as transport:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(attend, balancer, transport)
            outlet, other = transport.connect_producer(), connect(transport.connect_producer())
            producer = connect(outlet)
            for rollout in make_rollouts([3] * 4):
                await other.put(rollout)

            async def pending() -> None:
                with pytest.raises(sb.BrokenResourceError, match="DuplicateRolloutError"):
                    await producer.put(make_rollout(2, "parked"))

            tasks.start_soon(pending)
            await settle()
            assert balancer.statistics().blocked_puts == 1
            outlet.wire.cut("connection closed by peer")
            await settle()
            assert balancer.statistics().blocked_puts == 0
            await anext(balancer.batches())
            await other.put(make_rollout(2, "healthy"))
            tasks.cancel_scope.cancel()


async def test_without_attend_nothing_goes_in_not_even_at_once() -> None:
    async with sb.StreamBalancer(config()) as balancer, MemoryTransport(dp_size=2) as transport:
        producer = connect(transport.connect_producer())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(attend, balancer, transport)
            await settle()
            producer.put_nowait(make_rollout(3, "attended"))
            tasks.cancel_scope.cancel()
        with pytest.raises(TimeoutError, match="had no answer"):
            producer.put_nowait(make_rollout(3, "later"))
        assert {r.rollout_id for r in balancer.snapshot().waiting} == {"attended"}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(attend, balancer, transport)
            await settle()
            with pytest.raises(sb.DuplicateRolloutError):
                producer.put_nowait(make_rollout(3, "later"))
            tasks.cancel_scope.cancel()
