"""What many tests begin with: a small balancer's knobs, waits for what tasks and threads do, a port that answers,
networks that break. No other test looks into a feed, a producer, or a network."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import anyio
import anyio.lowlevel

import stream_balancer as sb
from stream_balancer.core.machine import BalancerCore
from stream_balancer.host.producers import attend
from stream_balancer.net.session import Session
from stream_balancer.testing import make_rollouts
from stream_balancer.testing.network import MemoryPeer

__all__ = ["answering", "attend", "config", "fill", "kill", "polled", "settle", "until", "waiting", "wire_of"]


def config(**knobs: Any) -> sb.BalancerConfig:
    """Two ranks, four rollouts a batch."""
    return sb.BalancerConfig(**{"dp_size": 2, "batch_size": 4, **knobs})


def polled(core: BalancerCore, now: float = 0.0) -> sb.Batch:
    """The batch that leaves now."""
    batch = core.poll(now)
    assert batch is not None, "no batch leaves"
    return batch


async def settle() -> None:
    """Let every task run until it waits, without moving the clock."""
    for _ in range(20):
        await anyio.lowlevel.checkpoint()


async def until(condition: Callable[[], bool]) -> None:
    """In real time: for other threads and processes, and tasks that notify nobody."""
    while not condition():  # noqa: ASYNC110
        await anyio.sleep(0.002)


async def fill(balancer: sb.StreamBalancer, lengths: Sequence[int], **knobs: Any) -> None:
    """Put rollouts of these lengths, called r0, r1, and so on; or as ``make_rollouts`` is told."""
    for rollout in make_rollouts(lengths, **knobs):
        await balancer.put(rollout)


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


def kill(peer: sb.RankFeed | sb.Producer) -> None:
    """Let it be gone without a word, as with its process; where it joins again, its network breaks."""
    session = _session_of(peer)
    if isinstance(session.line.dialer, MemoryPeer):
        session.line.dialer.cut("connection closed by peer")
    elif session.line.connection is not None:
        session.io.do(session.line.connection.abort)


def wire_of(of: sb.Producer | sb.RankFeed | MemoryPeer) -> MemoryPeer:
    """``hold()``, ``release()``, ``cut(cause, seen_by=)`` of a feed or producer in a memory network; 0 is the
    controller's end, 1 the other."""
    dialer = of if isinstance(of, MemoryPeer) else _session_of(of).line.dialer
    assert isinstance(dialer, MemoryPeer)
    return dialer


def _session_of(peer: sb.RankFeed | sb.Producer) -> Session:
    return peer._port.session if isinstance(peer, sb.RankFeed) else peer._session
