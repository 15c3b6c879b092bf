"""An address that is wrong, and who is refused, says so; nothing that never had a connection claims that the balancer
is full, and who is refused does not come again with the same."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import anyio
import anyio.to_thread
import helpers
import pytest
from forked import free_port
from guard import GUARD_S
from helpers import answering, until
from processes import served
from torch._C._distributed_c10d import TCPStore

import stream_balancer as sb
from stream_balancer.net import connection as _connection
from stream_balancer.net import line as _line
from stream_balancer.net.listener import Listener
from stream_balancer.testing import make_rollout

Tries = Callable[[str], object]


def opens_a_feed(address: str) -> object:
    with sb.RankFeed(address, rank=0, dp_size=1, connect_timeout_s=GUARD_S) as feed:
        return next(feed)


def puts(address: str) -> object:
    with sb.connect(address, connect_timeout_s=GUARD_S) as producer:
        return producer.put(make_rollout(3))


both = pytest.mark.parametrize("tries", [opens_a_feed, puts])


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


@both
def test_what_is_no_address_is_an_error_at_once(tries: Tries, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)  # no name server is asked
    for host in ("no.such.host.invalid", "no such host", "x..y"):
        with pytest.raises(ValueError, match=f"there is no host '{host}'.*Check the address tcp://{host}:29400"):
            tries(f"tcp://{host}:29400")
    for address in ("127.0.0.1:1", "tcp://127.0.0.1", "tcp://:29400", "tcp://host:0", "tcp://host:70000"):
        with pytest.raises(ValueError, match="is not an address of a controller"):
            tries(address)
    with pytest.raises(TypeError, match="29400 says nothing of a controller: expected its address"):
        tries(29400)  # type: ignore[arg-type]


@both
@pytest.mark.parametrize("says", [b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(100)])
def test_something_else_that_answers_is_an_error(tries: Tries, says: bytes) -> None:
    with foreign_server(says) as address:
        with pytest.raises(sb.errors.WireError, match=f"{address} does not answer as a controller .*Check the address"):
            tries(address)


@both
@pytest.mark.parametrize("kind", ["silent", "hangs up", "store", "nobody"])
def test_what_does_not_answer_is_an_error_in_the_end_and_a_warning_meanwhile(
    tries: Tries, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_connection, "HANDSHAKE_S", 0.05)
    monkeypatch.setattr(_line, "_WARN_AFTER_S", 0.1)
    monkeypatch.setattr(sys.modules[__name__], "GUARD_S", 1.0)  # a busy machine takes a moment to try
    caplog.set_level(logging.WARNING, "stream_balancer.net")
    error = sb.errors.RankLostError if tries is opens_a_feed else sb.errors.BrokenResourceError
    if kind == "nobody":
        address = nobody_there()
        refused = f"nobody answers at {address}: Connection refused"
        with pytest.raises(error, match=f"not connected within connect_timeout_s=1.0: {refused}"):
            tries(address)
        (record,) = caplog.records
        assert record.message.endswith(f"is not connected: {refused}; trying again")
        return
    with pytest.raises(error, match=r"accepts the connection, but .*Either something else listens there"):
        if kind == "store":
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            tries(f"tcp://127.0.0.1:{store.port}")
        else:
            with foreign_server(None if kind == "silent" else b"") as address:
                tries(address)


async def test_a_put_that_was_never_connected_does_not_blame_the_balancer() -> None:
    producer = sb.connect(nobody_there())
    problem = r"not connected: (nobody answers at tcp://127.0.0.1:\d+|nobody has answered yet)"
    for put, timeout_s in ((producer.blocking.put, 0.2), (producer.blocking.put_nowait, 0.05)):
        with pytest.raises(TimeoutError, match=f"put\\(\\) was not accepted within {timeout_s} s: {problem}"):
            await anyio.to_thread.run_sync(partial(put, make_rollout(3), timeout_s=timeout_s))
    await producer.aclose()


async def test_a_controller_that_is_too_busy_to_answer_or_not_there_yet_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks and producers may start before their controller."""
    monkeypatch.setattr(_connection, "HANDSHAKE_S", 0.05)
    with anyio.fail_after(GUARD_S):
        with foreign_server(None) as address:
            producer = sb.connect(address)
            await until(lambda: "does not answer" in str(producer._session.line.problem))
        monkeypatch.setattr(_connection, "HANDSHAKE_S", GUARD_S)
        port = int(address.rpartition(":")[2])
        async with producer, sb.RankFeed(address, rank=0, dp_size=1) as feed:
            async with served(sb.serve, listen={"port": port}, batch_size=1, window=1) as (balancer, _):
                await producer.put(make_rollout(3, "late"))
                batch = await anext(feed)
                assert [rollout.rollout_id for rollout in batch.rollouts] == ["late"]
                batch.ack()
                balancer.end()
                assert [step async for step in feed] == []


# -- refusals ----------------------------------------------------------------------------------------------------------


@both
async def test_a_controller_that_closes_before_it_has_served(tries: Tries) -> None:
    """Who waited to be let in hears it."""
    transport = sb.TorchTransport.listen(dp_size=1)

    async def close_it() -> None:
        await until(lambda: bool(transport.service._inbox.jobs))
        await transport.aclose()

    with anyio.fail_after(GUARD_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(close_it)
            with pytest.raises(sb.errors.RefusedError, match="closed its transport") as refused:
                await anyio.to_thread.run_sync(tries, transport.address)
    assert (refused.value.reason, isinstance(refused.value, sb.errors.BrokenResourceError)) == ("closed", True)


@pytest.mark.parametrize(
    "opens",
    [partial(sb.RankFeed, rank=0, dp_size=1), sb.connect, lambda _, tls: Listener("127.0.0.1", 0, b"", print, tls=tls)],
    ids=["feed", "producer", "controller"],
)
def test_what_is_no_context_of_tls_is_an_error_at_once(opens: Callable[..., object]) -> None:
    """In the I/O thread each try would end with an error there, and a feed would wait for ever."""
    with pytest.raises(TypeError, match=r"tls must be an ssl\.SSLContext, with certificates, or None, not True"):
        opens("tcp://127.0.0.1:1", tls=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_serve_at_an_address(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAM_BALANCER_TOKEN", "a token that all of them have")
    port, knobs = free_port(), helpers.config(dp_size=1, batch_size=2)
    async with sb.StreamBalancer(knobs, num_producers=1) as balancer, anyio.create_task_group() as tasks:
        tasks.start_soon(sb.serve, balancer, f"tcp://{host}:{port}")
        async with sb.connect(f"tcp://127.0.0.1:{port}") as producer:
            for n in range(4):
                await producer.put(make_rollout(3 + n, f"r{n}"))
            await producer.end()
        async with sb.RankFeed(f"tcp://127.0.0.1:{port}", rank=0, dp_size=1) as feed:
            assert [batch.global_num_rollouts async for batch in feed] == [2, 2]
