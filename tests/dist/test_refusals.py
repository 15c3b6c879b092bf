"""Who is refused learns why, the same way over every transport, and does not come again with the same."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import pytest
from guard import GUARD_S
from helpers import answering, attend
from scripted import make_batch

import stream_balancer as sb
from stream_balancer.testing import MemoryNetwork, make_rollout
from stream_balancer.transport.channel import Outgoing
from stream_balancer.transport.gloo.torch_dist import open_port, open_producer
from stream_balancer.transport.handshake import Accepting, pack
from stream_balancer.transport.request_ledger import Limits
from stream_balancer.transport.request_messages import EncodedRequest
from stream_balancer.transport.requests import Mode, Request
from stream_balancer.transport.sockets.acceptor import send_now
from stream_balancer.transport.sockets.joiner import Joiner, receive_message
from stream_balancer.transport.sockets.producers import connect_producer
from stream_balancer.wire import messages as m

TOKEN = "a token of sixteen or more"


def iterates(address: str, **options: Any) -> None:
    """A rank."""
    with sb.RankFeed(address, **{"rank": 0, "dp_size": 1, "token": TOKEN, **options}) as feed:
        next(iter(feed))


def puts(address: str, **options: Any) -> None:
    """A producer."""

    async def main() -> None:
        async with sb.connect(address, **{"token": TOKEN, **options}) as producer:
            await producer.put(make_rollout(3, "r"))

    anyio.run(main)


@asynccontextmanager
async def controller() -> AsyncIterator[sb.TorchTransport]:
    with anyio.fail_after(GUARD_S):
        async with (
            sb.TorchTransport.listen(dp_size=1, token=TOKEN) as transport,
            sb.StreamBalancer(sb.BalancerConfig(dp_size=1, batch_size=1)) as balancer,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(attend, balancer, transport)
            tasks.start_soon(partial(anyio.sleep, math.inf))
            transport._open()
            yield transport
            tasks.cancel_scope.cancel()


@pytest.mark.parametrize("joins", [iterates, puts])
async def test_another_token(joins: Callable[..., None]) -> None:
    async with controller() as transport:
        with pytest.raises(sb.RefusedError, match="same token") as refused:
            await anyio.to_thread.run_sync(partial(joins, transport.address, token=TOKEN + "!"))
    assert (refused.value.reason, isinstance(refused.value, ValueError)) == ("authentication", True)


@pytest.mark.parametrize("joins", [iterates, puts])
async def test_another_version_of_the_library(joins: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    async with controller() as transport:
        monkeypatch.setattr("stream_balancer.transport.handshake.Joining.hello", m.Hello(m.PROTOCOL + 1, bytes(16)))
        with pytest.raises(sb.RefusedError, match="Install one version") as refused:
            await anyio.to_thread.run_sync(partial(joins, transport.address))
    assert (refused.value.reason, isinstance(refused.value, ValueError)) == ("protocol", True)


@pytest.mark.parametrize("joins", [iterates, puts])
async def test_a_controller_that_is_closing(joins: Callable[..., None]) -> None:
    async with controller() as transport:
        transport.admission.close()
        with pytest.raises(sb.RefusedError, match="closed its transport") as refused:
            await anyio.to_thread.run_sync(partial(joins, transport.address))
    assert (refused.value.reason, isinstance(refused.value, sb.BrokenResourceError)) == ("closed", True)


async def test_a_controller_that_is_closing_in_this_event_loop() -> None:
    transport = MemoryNetwork(dp_size=1)
    await transport.aclose()
    with pytest.raises(sb.RefusedError, match="closed its transport"):
        transport.connect(0).take()


# --- in the middle of the conversation --------------------------------------------------------------------------------


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await anyio.sleep(0.005)


def refused_by(take: Callable[[], object]) -> sb.RefusedError | None:
    try:
        take()
    except sb.RefusedError as error:
        return error
    return None


@pytest.mark.parametrize("rejoin", [False, True])
@pytest.mark.parametrize("shared_memory", [False, True])
async def test_a_rank_whose_report_is_refused_raises_why(rejoin: bool, shared_memory: bool) -> None:
    with anyio.fail_after(GUARD_S):
        async with sb.TorchTransport.listen(dp_size=1, shared_memory=shared_memory) as transport:
            request = m.JoinRank(0, 1, 0, depth=2, max_batch_bytes=2**20)
            port = open_port(transport.address, request, rejoin=rejoin)
            link = await transport.accept()
            await until(lambda: link.credits > 0)
            link.send(make_batch(0, 1).ranks[0])
            await until(lambda: port.take() is not None)
            port.report(m.StepReport(0, math.nan))
            await until(lambda: refused_by(port.take) is not None)
            await port.aclose()
            await until(lambda: not link.live)
            error = refused_by(port.take)
            assert error is not None
            assert "impossible durations" in str(error)
            await until(lambda: not link.live)  # the channel's thread tells the loop after the rank
            with pytest.raises(sb.RankLostError, match="broke the protocol"):
                link.report()


class NumberedBehind(EncodedRequest):
    """A put that no controller takes."""

    def outgoing(self) -> Outgoing:
        message, sources, _ = super().outgoing()
        assert isinstance(message, m.Put)
        return Outgoing(m.Put(message.number, m.RolloutHeader(0, 0, message.rollout.wire_bytes, 1)), sources)


@pytest.mark.parametrize("rejoin", [False, True])
async def test_a_producer_whose_put_is_refused_raises_why(rejoin: bool) -> None:
    async with controller() as transport:
        port = open_producer(transport.address, token=TOKEN, rejoin=rejoin)
        done = threading.Event()
        put = NumberedBehind(Request(Mode.PUT, [make_rollout(3, "r")]), done.set)
        port.ask(put)
        await anyio.to_thread.run_sync(done.wait)
        await port.aclose()
    assert isinstance(put.error, sb.RefusedError)
    assert put.error.reason == "protocol"
    assert str(put.error).endswith("; whether it was accepted is not known")


# --- who comes again --------------------------------------------------------------------------------------------------


@contextmanager
def listening(on_join: Callable[[socket.socket, m.Join], object]) -> Iterator[str]:
    """A controller that lets everybody in, calls ``on_join``, and hangs up."""

    def let_in(sock: socket.socket) -> None:
        with sock:
            accepting = Accepting(b"", (m.JoinRank, m.JoinProducer))
            sock.sendall(pack(accepting.receive(receive_message(sock))))  # type: ignore[arg-type]
            on_join(sock, accepting.receive(receive_message(sock)))  # type: ignore[arg-type]

    with answering(let_in) as address:
        yield address


def test_a_feed_says_who_it_is_each_time_that_it_joins() -> None:
    """Else its own former connection would keep it out."""
    ids: list[bytes] = []
    twice = threading.Event()

    def note(_: socket.socket, request: m.Join) -> None:
        assert isinstance(request, m.JoinRank)
        ids.append(request.feed_id)
        if len(ids) == 2:
            twice.set()

    with listening(note) as address:
        feed = sb.RankFeed(address, rank=0, dp_size=1)
        assert twice.wait(GUARD_S)
        feed.close()
    assert all(ids)
    assert len(set(ids)) == 1


class CountingJoiner(Joiner):
    """Waits for nobody between its attempts, but remembers that it would."""

    def __init__(self, address: str) -> None:
        super().__init__(address, name="", token=None)
        self.events: list[str] = []
        wait = self._cancelled.wait
        self._cancelled.wait = lambda timeout=None: self.events.append("pause") or wait(0)  # type: ignore[method-assign]


def test_who_joins_again_waits_a_moment_first() -> None:
    """A controller may let in, and cut off at once."""
    joined: list[str] = []
    three = threading.Event()

    def cut_off(sock: socket.socket, _: m.Join) -> None:
        joined.append("joined")
        joiner.events.append("joined")
        if len(joined) == 3:
            three.set()
        send_now(sock, m.WelcomeProducer(*Limits()))

    with listening(cut_off) as address:
        joiner = CountingJoiner(address)
        port = connect_producer(joiner, "p", linger_s=1.0, rejoin=True)
        assert three.wait(GUARD_S)
        port.close()
    assert joiner.events[:5] == ["joined", "pause", "joined", "pause", "joined"]
