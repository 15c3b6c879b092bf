"""What many tests begin with: a small balancer's knobs, waits for what tasks and threads do, a port that answers,
networks that break. No other test looks into a feed, a producer, or a network."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import anyio.lowlevel

import stream_balancer as sb
from stream_balancer.controller.producers import attend
from stream_balancer.testing import MemoryNetwork
from stream_balancer.transport.channel import Channel
from stream_balancer.transport.event_loop import at_once
from stream_balancer.transport.memory_channel import Wire
from stream_balancer.transport.rank_port import RankPort
from stream_balancer.transport.rank_session import RankSession
from stream_balancer.wire.messages import JoinRank

__all__ = ["Rejoining", "answering", "attend", "config", "kill", "settle", "until", "waiting", "wire_of"]


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


def kill(feed: sb.RankFeed) -> None:
    """Let a rank be gone without a word, as with its process."""
    port: Any = feed._port
    if hasattr(port, "abort"):
        port.abort()
    else:
        port.session._dialer.cut("connection closed by peer")


def wire_of(producer: sb.Producer | Any) -> Any:
    """The wire of a producer, or of what ``MemoryNetwork.connect_producer`` returns: ``hold()``, ``release()``,
    ``cut(cause, seen_by=)``, of which 0 is the controller's end and 1 the producer's."""
    if hasattr(producer, "_session"):
        return producer._session._dialer
    return getattr(producer, "_port", producer).wire


class Rejoining:
    """The only rank of a memory network; ``port`` is for its feed. It joins again when its wire is cut."""

    def __new__(cls, network: MemoryNetwork) -> Any:
        if hasattr(network, "admission"):
            return super().__new__(cls)
        peer: Any = network.connect(0, rejoin=True)  # type: ignore[call-arg]
        peer.port = peer
        return peer

    def __init__(self, network: MemoryNetwork) -> None:
        self._admission = network.admission
        self._request = JoinRank(0, 1, 0, depth=2, max_batch_bytes=2**20, feed_id=b"one feed")
        self.joined = 0
        self.port = RankPort(self._join(), self._request, reconnect=self._join)
        self.port.start()

    def _join(self) -> Channel:
        self.wire = Wire()
        here, there = self.wire.ends
        assert self._admission.refusal(self._request) is None
        session = RankSession(here, self._request, at_once)
        here.start(session)
        assert self._admission.admit(session)
        self.joined += 1
        return there
