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
from helpers import fill, settle, waiting
from invariants import verify

import stream_balancer as sb
from stream_balancer.testing import make_rollout, make_rollouts

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
