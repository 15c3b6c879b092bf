"""What many tests begin with: a small balancer's knobs, and waits for what tasks and threads do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel

import stream_balancer as sb


def config(**knobs: Any) -> sb.BalancerConfig:
    """Two ranks, four rollouts a batch."""
    return sb.BalancerConfig(**{"dp_size": 2, "batch_size": 4, **knobs})


async def settle() -> None:
    """Let every task run until it waits, without moving the clock."""
    for _ in range(20):
        await anyio.lowlevel.checkpoint()


async def until(condition: Callable[[], bool]) -> None:
    """In real time: for other threads and processes, and tasks that notify nobody."""
    while not condition():  # noqa: ASYNC110
        await anyio.sleep(0.002)


def waiting(balancer: sb.StreamBalancer) -> list[str]:
    """Ids of the waiting rollouts, oldest first."""
    return [rollout.rollout_id for rollout in balancer.snapshot().waiting]
