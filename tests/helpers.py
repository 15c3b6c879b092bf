"""What many tests begin with: a small balancer's knobs, waits for what tasks and threads do, a port that answers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def answering(handle: Callable[[socket.socket], object]) -> Iterator[str]:
    """The address of a port in whose thread ``handle`` is called with every connection, one after the other."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                sock = server.accept()[0]
            except OSError:
                return
            handle(sock)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()
