"""What the pages' fragments take for granted: a controller that has rollouts, ranks that can reach it."""

from __future__ import annotations

import importlib
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace

import anyio
import torch
import torch.distributed as dist
from anyio.abc import TaskGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

import stream_balancer as sb
from stream_balancer import serve
from stream_balancer.net.address import current_world
from stream_balancer.testing import MemoryNetwork

GUARD_S = 120.0  # against hangs


def rollout(n: int = 0) -> sb.Rollout:
    return sb.Rollout(tokens={"input_ids": torch.arange(5 + n % 7)}, rollout_id=f"r{n}")


@contextmanager
def controller(
    dp_size: int = 1, rollouts: int = 8, store: dist.Store | None = None, stay_s: float = 0.0
) -> Iterator[str]:
    """A balancer in a thread, with rollouts; the address for its ranks and producers. ``stay_s``: so long can one more
    rank come in after the end."""
    address: SimpleQueue[str] = SimpleQueue()
    done = threading.Event()

    async def main() -> None:
        config = sb.BalancerConfig(dp_size=dp_size, batch_size=2, capacity=64, max_skips=32)
        listening = (
            sb.TorchTransport.listen(dp_size=dp_size) if store is None else sb.TorchTransport(store, dp_size=dp_size)
        )
        async with sb.StreamBalancer(config) as balancer, listening as transport, anyio.create_task_group() as tasks:
            tasks.start_soon(sb.serve, balancer, transport)
            tasks.start_soon(anyio.sleep, stay_s)
            address.put("" if store is not None else transport.address)
            for n in range(rollouts):
                await balancer.put(rollout(n))
            if rollouts:
                balancer.end()
            else:  # producers bring them; none may lose its controller before it knows that a rollout was accepted
                await anyio.to_thread.run_sync(done.wait, GUARD_S)
                assert balancer.statistics().accepted
                tasks.cancel_scope.cancel()

    thread = threading.Thread(target=anyio.run, args=(main,), daemon=True)
    thread.start()
    yield address.get(timeout=GUARD_S)
    done.set()
    thread.join(GUARD_S)
    assert not thread.is_alive(), "the controller did not end"


@asynccontextmanager
async def in_memory(dp_size: int) -> AsyncIterator[tuple[sb.StreamBalancer, MemoryNetwork, TaskGroup]]:
    """A balancer that has ended, with rollouts for two steps; a transport for its ranks; who trains and serves."""
    config = sb.BalancerConfig(dp_size=dp_size, batch_size=2)
    async with sb.StreamBalancer(config) as balancer, MemoryNetwork(dp_size=dp_size) as transport:
        for n in range(4):
            await balancer.put(rollout(n))
        balancer.end()
        async with anyio.create_task_group() as tasks:
            yield balancer, transport, tasks


@contextmanager
def world() -> Iterator[None]:
    """torchrun's world, of one rank, which hosts the controller too."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with controller(store=current_world()[0]):
        yield
    dist.destroy_process_group()
