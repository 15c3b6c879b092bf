"""Producers in processes of their own: every put is held, a killed one disturbs nobody, a dead controller is told."""

from __future__ import annotations

import signal

import anyio
import pytest
from forked import Python

import stream_balancer as sb
from stream_balancer.testing import make_rollout

SCRIPT = """
import sys, stream_balancer as sb
from stream_balancer.testing import make_rollout
producer = sb.connect(sys.argv[1]).blocking
try:
    for n in range(int(sys.argv[3])):
        producer.put(make_rollout(5 + n % 7, f"{sys.argv[2]}.{n}"))
    print("done", flush=True)
except sb.BrokenResourceError:
    print("lost", flush=True)
"""  # never closed: the interpreter's exit must end the threads


def start(address: str | None, name: str, count: int) -> Python:
    return Python("-c", SCRIPT, address, name, count)


def ended(process: Python) -> tuple[int | None, str, str]:
    out, errors = process.communicate(40)
    return process.returncode, out, errors


@pytest.mark.processes
async def test_processes_put_and_a_killed_one_disturbs_nobody() -> None:
    config = sb.BalancerConfig(dp_size=1, batch_size=8, window=8, capacity=8)
    seen: list[str] = []
    with anyio.fail_after(50):
        async with sb.TorchTransport.listen(dp_size=1) as transport, sb.StreamBalancer(config) as balancer:
            good, victim = start(transport.address, "good", 40), start(transport.address, "victim", 10**6)

            async def train() -> None:
                async for batch in sb.RankFeed(transport.address, rank=0, dp_size=1):
                    seen.extend(r.rollout_id for r in batch.rollouts if not r.is_padding)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(sb.serve, balancer, transport)
                tasks.start_soon(train)
                while not any(name.startswith("victim") for name in seen):
                    await anyio.sleep(0.01)
                victim.send_signal(signal.SIGKILL)
                await anyio.to_thread.run_sync(ended, victim)
                assert await anyio.to_thread.run_sync(ended, good) == (0, "done\n", "")
                async with sb.connect(transport.address) as producer:
                    await producer.put(make_rollout(3, "here"))
                    balancer.end()
    assert {f"good.{n}" for n in range(40)} | {"here"} <= set(seen)
    assert len(seen) == len(set(seen))


@pytest.mark.processes
async def test_the_end_of_the_controller_is_told() -> None:
    with anyio.fail_after(50):
        async with sb.TorchTransport.listen(dp_size=1) as transport:
            process = start(transport.address, "p", 1)
            await transport.accept_producer()  # nobody attends: the put waits
        assert await anyio.to_thread.run_sync(ended, process) == (0, "lost\n", "")
