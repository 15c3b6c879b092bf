"""A balancer that a test serves on a port of this machine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
from guard import GUARD_S
from helpers import attend

import stream_balancer as sb


@asynccontextmanager
async def served(
    serve: Callable[..., Awaitable[object]] = attend, *, listen: dict[str, Any] | None = None, **knobs: Any
) -> AsyncIterator[tuple[sb.StreamBalancer, sb.TorchTransport]]:
    """To producers alone, until the test is through; with ``sb.serve`` to ranks too, until all is acknowledged.
    ``listen``: options of the transport."""
    config = sb.BalancerConfig(**{"dp_size": 1, "batch_size": 4, "window": 4, **knobs})
    with anyio.fail_after(GUARD_S):
        async with (
            sb.TorchTransport.listen(dp_size=config.dp_size, **(listen or {})) as transport,
            sb.StreamBalancer(config) as balancer,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(serve, balancer, transport)
            yield balancer, transport
            if serve is attend:
                tasks.cancel_scope.cancel()
