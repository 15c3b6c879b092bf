"""An address that is wrong says so, and a put that never had a connection does not claim that the balancer is full."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import anyio
import pytest
from forked import free_port
from guard import GUARD_S
from helpers import answering, until
from torch._C._distributed_c10d import TCPStore

import stream_balancer as sb
from stream_balancer.net import connection as _connection
from stream_balancer.net import session as _session
from stream_balancer.testing import make_rollout

Tries = Callable[[str], object]


def opens_a_feed(address: str) -> object:
    with sb.RankFeed(address, rank=0, dp_size=1, connect_timeout_s=GUARD_S) as feed:
        return next(feed)


def puts(address: str) -> object:
    with sb.connect(address, connect_timeout_s=GUARD_S) as producer:
        return producer.put(make_rollout(3))


TRIES = [opens_a_feed, puts]


def nobody_there() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@contextmanager
def foreign_server(says: bytes | None) -> Iterator[str]:
    """Something else on the port; ``None`` says nothing and stays."""
    stayed = []

    def answer(peer: socket.socket) -> None:
        stayed.append(peer)
        if says is not None:
            with suppress(OSError), peer:
                peer.sendall(says)
                peer.recv(4096)

    try:
        with answering(answer) as address:
            yield address
    finally:
        for peer in stayed:
            peer.close()


@pytest.mark.parametrize("tries", TRIES)
@pytest.mark.parametrize("host", ["no.such.host.invalid", "no such host", "x..y"])
def test_an_unknown_host_is_an_error_at_once(tries: Tries, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)  # no name server is asked
    with pytest.raises(ValueError, match=f"there is no host '{host}'.*Check the address tcp://{host}:29400"):
        tries(f"tcp://{host}:29400")


@pytest.mark.parametrize("tries", TRIES)
@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "tcp://127.0.0.1", "tcp://:29400", "tcp://host:0", "tcp://host:70000"]
)
def test_what_is_no_address_is_an_error_at_once(tries: Tries, address: str) -> None:
    with pytest.raises(ValueError, match="is not an address of a controller"):
        tries(address)


@pytest.mark.parametrize("tries", TRIES)
def test_a_source_of_another_kind_is_an_error_at_once(tries: Tries) -> None:
    with pytest.raises(TypeError, match="29400 says nothing of a controller: expected its address"):
        tries(29400)  # type: ignore[arg-type]


@pytest.mark.parametrize("tries", TRIES)
@pytest.mark.parametrize("says", [b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(100)])
def test_something_else_that_answers_is_an_error(tries: Tries, says: bytes) -> None:
    with foreign_server(says) as address:
        with pytest.raises(sb.errors.WireError, match=f"{address} does not answer as a controller .*Check the address"):
            tries(address)


@pytest.mark.parametrize("tries", TRIES)
@pytest.mark.parametrize("kind", ["silent", "hangs up", "store"])
def test_something_else_that_does_not_answer_is_an_error_in_the_end(
    tries: Tries, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_connection, "HANDSHAKE_S", 0.05)
    monkeypatch.setattr(sys.modules[__name__], "GUARD_S", 1.0)  # a busy machine takes a moment to try
    error = sb.errors.RankLostError if tries is opens_a_feed else sb.errors.BrokenResourceError
    with pytest.raises(error, match=r"accepts the connection, but .*Either something else listens there"):
        if kind == "store":
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            tries(f"tcp://127.0.0.1:{store.port}")
        else:
            with foreign_server(None if kind == "silent" else b"") as address:
                tries(address)


@pytest.mark.parametrize("tries", TRIES)
def test_nobody_there_is_a_warning_and_then_an_error(
    tries: Tries, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_session, "_WARN_AFTER_S", 0.1)
    caplog.set_level(logging.WARNING, "stream_balancer.net")
    address = nobody_there()
    refused = f"nobody answers at {address}: Connection refused"
    kind = sb.errors.RankLostError if tries is opens_a_feed else sb.errors.BrokenResourceError
    with pytest.raises(kind, match=f"not connected within connect_timeout_s=1.0: {refused}"):
        if tries is opens_a_feed:
            next(sb.RankFeed(address, rank=0, dp_size=1, connect_timeout_s=1.0))
        else:
            sb.connect(address, connect_timeout_s=1.0).blocking.put(make_rollout(3))
    (record,) = caplog.records
    assert record.message.endswith(f"is not connected: {refused}; trying again")


async def test_a_put_that_was_never_connected_does_not_blame_the_balancer() -> None:
    producer = sb.connect(nobody_there())
    problem = r"not connected: (nobody answers at tcp://127.0.0.1:\d+|it has just begun)"

    def put_both_ways() -> None:
        with pytest.raises(TimeoutError, match=f"put\\(\\) was not accepted within 0.2 s: {problem}"):
            producer.blocking.put(make_rollout(3), timeout_s=0.2)
        with pytest.raises(TimeoutError, match=f"put\\(\\) was not accepted within 0.05 s: {problem}"):
            producer.blocking.put_nowait(make_rollout(3), timeout_s=0.05)

    await anyio.to_thread.run_sync(put_both_ways)
    await producer.aclose()


async def test_a_controller_that_is_too_busy_to_answer_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_connection, "HANDSHAKE_S", 0.05)
    with anyio.fail_after(GUARD_S):
        with foreign_server(None) as address:
            producer = sb.connect(address)
            await until(lambda: "does not answer" in str(producer._session.problem))
        balancer = sb.StreamBalancer(sb.BalancerConfig(dp_size=1, batch_size=2, window=2))
        port = int(address.rpartition(":")[2])
        monkeypatch.setattr(_connection, "HANDSHAKE_S", GUARD_S)
        async with producer, balancer, sb.TorchTransport.listen(dp_size=1, port=port) as transport:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(sb.serve, balancer, transport)
                await producer.put(make_rollout(3, "late"))
                tasks.cancel_scope.cancel()


async def test_a_port_that_was_closed_is_tried_until_somebody_listens() -> None:
    """Ranks and producers may start before their controller."""
    address = nobody_there()
    balancer = sb.StreamBalancer(sb.BalancerConfig(dp_size=1, batch_size=1, window=1))
    with anyio.fail_after(GUARD_S):
        async with sb.RankFeed(address, rank=0, dp_size=1) as feed, sb.connect(address) as producer, balancer:
            port = int(address.rpartition(":")[2])
            async with (
                sb.TorchTransport.listen(dp_size=1, port=port) as transport,
                anyio.create_task_group() as tasks,
            ):
                tasks.start_soon(sb.serve, balancer, transport)
                await producer.put(make_rollout(3, "late"))
                batch = await anext(feed)
                assert [rollout.rollout_id for rollout in batch.rollouts] == ["late"]
                tasks.cancel_scope.cancel()
