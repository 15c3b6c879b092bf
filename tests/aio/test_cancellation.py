"""Cancel anything, anywhere, in any way there is: nothing is lost, nothing is doubled, nobody is left waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Literal

import anyio
import helpers
import pytest
from anyio.lowlevel import checkpoint
from helpers import fill, settle
from invariants import verify

import stream_balancer as sb
from stream_balancer.testing import make_rollout

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
@pytest.mark.parametrize("passes", range(MAX_PASSES))
async def test_a_cancelled_put_was_not_accepted(how: How, passes: int) -> None:
    """A put that waits for room is cancelled at every pass around the moment when room appears."""
    async with sb.StreamBalancer(config()) as balancer:
        await fill(balancer, [3] * 4)
        batches = balancer.batches()

        async def make_room() -> None:
            for _ in range(4):
                await checkpoint()
            await anext(batches)

        outcome = await cancelled_after(passes, how, lambda: balancer.put(make_rollout(2, "victim")), make_room)
        await settle()
        verify(balancer.parts.core)
        waiting = {r.rollout_id for r in balancer.snapshot().waiting}
        assert ("victim" in waiting) == outcome.finished
        assert balancer.statistics().blocked_puts == 0
        # the place is not lost: four more fit
        for n in range(4 - len(waiting)):
            balancer.put_nowait(make_rollout(2, f"more{n}"))
        with pytest.raises(sb.errors.WouldBlock):
            balancer.put_nowait(make_rollout(2, "too many"))


@ways
@pytest.mark.parametrize("passes", range(MAX_PASSES))
async def test_a_cancelled_put_passes_its_turn_on(how: How, passes: int) -> None:
    """The first of many blocked puts is cancelled after it was woken: the next must be woken in its place."""
    async with sb.StreamBalancer(config()) as balancer:
        await fill(balancer, [3] * 4)
        batches = balancer.batches()
        let_in: list[int] = []

        async def others() -> None:
            async with anyio.create_task_group() as tasks:
                for n in range(4):

                    async def put(n: int = n) -> None:
                        await balancer.put(make_rollout(2, f"other{n}"))
                        let_in.append(n)

                    tasks.start_soon(put)
                await settle()
                await anext(batches)
                await settle()
                if len(let_in) < 4:  # the victim took one place: make room for the last
                    balancer.end()
                    await anext(batches)

        async def victim() -> None:
            await balancer.put(make_rollout(2, "victim"))

        try:
            with anyio.fail_after(1000):
                outcome = await cancelled_after(passes, how, victim, others)
        except BaseExceptionGroup as group:  # end() told the last of them
            _, rest = group.split(sb.errors.ClosedResourceError)
            assert rest is None
            assert len(let_in) == 3
        else:
            assert len(let_in) == 4 or outcome.finished
        verify(balancer.parts.core)


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
