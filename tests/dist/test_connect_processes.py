"""A producer that is never closed: its process ends all the same, whether the controller still lives or not."""

from __future__ import annotations

import anyio
import pytest
from forked import Python
from guard import GUARD_S
from helpers import attend, until

import stream_balancer as sb

SCRIPT = """
import sys, stream_balancer as sb
from stream_balancer.testing import make_rollout
producer = sb.connect(sys.argv[1]).blocking
try:
    producer.put(make_rollout(5))
    print("done", flush=True)
except sb.errors.BrokenResourceError:
    print("lost", flush=True)
"""


@pytest.mark.processes
async def test_an_unclosed_producer_ends_with_its_process() -> None:
    with anyio.fail_after(GUARD_S):
        async with sb.TorchTransport.listen(dp_size=1) as transport:
            async with (
                sb.StreamBalancer(sb.BalancerConfig(dp_size=1, batch_size=8)) as balancer,
                anyio.create_task_group() as tasks,
            ):
                tasks.start_soon(attend, balancer, transport)
                assert await ended(Python("-c", SCRIPT, transport.address)) == (0, "done\n", "")
                tasks.cancel_scope.cancel()
            unattended = Python("-c", SCRIPT, transport.address)
            knocking = lambda: transport.service._listening._knocking  # noqa: E731
            await until(lambda: any(one.welcome is None for one in knocking()))  # nobody attends: the put waits
        assert await ended(unattended) == (0, "lost\n", "")


async def ended(process: Python) -> tuple[int | None, str, str]:
    out, errors = await anyio.to_thread.run_sync(process.communicate, GUARD_S)
    return process.returncode, out, errors
