"""Hostile bytes: of strangers without the token, at every port this process listens on, who can neither put, read,
supersede, nor stop or slow anything; of producers that know it, whose connection is closed with a warning."""

from __future__ import annotations

import logging
import os
import random
import secrets
import socket
import stat
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import msgspec
import pytest
from guard import GUARD_S
from helpers import until
from processes import served
from torch._C._distributed_c10d import TCPStore

import stream_balancer as sb
from stream_balancer.net import messages as m
from stream_balancer.net.handshake import Handshake
from stream_balancer.net.listener import split_address
from stream_balancer.testing import make_rollout
from stream_balancer.wire.codec import Handle, Owner, encode_rollouts

TOKEN = "the token of the test"


def hear(peer: socket.socket) -> Any:
    """The next message."""
    size, crc = m.read_header(peer.recv(m.HEADER_BYTES, socket.MSG_WAITALL))
    return m.read_envelope(peer.recv(size, socket.MSG_WAITALL), crc).message


def answers(sock: socket.socket) -> bytes:
    """All it says until it hangs up."""
    got = b""
    with suppress(ConnectionError):
        while part := sock.recv(65536):
            got += part
    return got


# -- strangers ---------------------------------------------------------------------------------------------------------

NAME = "a rollout of the test"  # long: what a stranger sees has 4,000 random bytes, where two are met now and then
ABOUT = {"rank": 0, "dp_size": 1, "incarnation": 10**9, "depth": 2, "max_batch_bytes": 2**30}
REQUESTS = [
    m.Join(b"", kind, "forger", b"f" * 16, (), msgspec.Raw(msgspec.msgpack.encode(ABOUT)))
    for kind in ("rank", "producer", "fetcher")
]
PUT = m.frame(m.Call(0, 0, "put", msgspec.Raw(b"\x90")), 512, (0, 512)) + bytes(512)


def listening_ports() -> set[int]:
    """Where this process listens; found in the kernel, so that a listener nobody thought of is found too."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            status = os.stat(f"/proc/self/fd/{name}")
            if stat.S_ISSOCK(status.st_mode):
                inodes.add(str(status.st_ino))
    ports = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}") as lines:
            for line in lines:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def challenged(sock: socket.socket) -> m.Challenge:
    """An honest beginning."""
    sock.sendall(m.frame(m.Hello(m.PROTOCOL, b"n" * 16)))
    message = hear(sock)
    assert isinstance(message, m.Challenge)
    return message


Attack = Callable[[socket.socket, random.Random], object]


def says(data: bytes) -> Attack:
    return lambda sock, _: sock.sendall(data)


def noise(size: int) -> Attack:
    return lambda sock, chance: sock.sendall(chance.randbytes(size))


def joins(request: m.Join, prove: Callable[[m.Challenge], bytes]) -> Attack:
    def attack(sock: socket.socket, _: random.Random) -> None:
        sock.sendall(m.frame(msgspec.structs.replace(request, proof=prove(challenged(sock)))) + PUT)

    return attack


ATTACKS: dict[str, Attack] = {
    "noise": noise(400),
    "http": says(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "a set in a TCPStore": says(bytes([3]) + struct.pack("<q", 0) + b"\x00" + struct.pack("<q", 3) + b"key"),
    "a put without a handshake": says(PUT),
    "the end of a rank, without a handshake": says(m.frame(m.Close())),
    "a join without a hello": says(m.frame(REQUESTS[0])),
    "refuses": says(m.frame(m.Refused("closed", "go away"))),
    **{f"{request.kind} without a proof": joins(request, lambda _: b"") for request in REQUESTS},
    **{f"{request.kind} reflects": joins(request, lambda challenge: challenge.proof) for request in REQUESTS},
}


@asynccontextmanager
async def training() -> AsyncIterator[tuple[sb.TorchTransport, Callable[[], Any]]]:
    """A rank trains what a producer puts, whose tokens stay with it: every kind of port we have is open. The second
    makes it train one more step."""
    movers = ("torch_dist",)
    listen = {"token": TOKEN, "movers": movers}
    put, steps, ids = list[str](), list[int](), list[str]()
    async with served(sb.serve, listen=listen, batch_size=2, window=2) as (balancer, transport):

        async def iterate() -> None:
            async for batch in sb.RankFeed(transport.address, rank=0, dp_size=1, token=TOKEN, movers=movers):
                steps.append(batch.step)
                ids.extend(r.rollout_id for r in batch.rollouts if not r.is_padding)

        async def train() -> None:
            for _ in range(2):
                put.append(f"{NAME} {len(put)}")
                await producer.put(make_rollout(5, put[-1]))
            await until(lambda: len(ids) == len(put))

        async with (
            anyio.create_task_group() as tasks,
            sb.connect(transport.address, token=TOKEN, hand_over="direct", label="p") as producer,
        ):
            tasks.start_soon(iterate)
            await train()
            yield transport, train
            balancer.end()
    assert steps == list(range(len(put) // 2))
    assert sorted(ids) == sorted(put)


async def test_a_stranger_at_every_port_gets_nothing(caplog: pytest.LogCaptureFixture) -> None:
    before = listening_ports()
    seen = b""
    async with training() as (transport, train):
        ours = listening_ports() - before
        assert split_address(transport.address)[1] in ours
        # The controller's, and the producer's payloads. Gloo's, of a device that later pairs share, is a third.
        assert len(ours) in (2, 3), "a listener nobody here thought of"

        def attack_all(name: str, seed: int) -> bytes:
            got = b""
            for port in ours:
                with socket.create_connection(("127.0.0.1", port)) as sock, suppress(OSError):  # it may be thrown out
                    sock.settimeout(0.1)  # gloo never answers
                    ATTACKS[name](sock, random.Random(seed))
                    sock.shutdown(socket.SHUT_WR)
                    got += answers(sock)
            return got

        for name in ATTACKS:
            seen += await anyio.to_thread.run_sync(attack_all, name, 0)
            await train()
        assert TOKEN.encode() not in seen
        assert NAME.encode() not in seen
    assert "was sent away" in caplog.text


def test_other_machines_need_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STREAM_BALANCER_TOKEN", raising=False)
    for host in ("0.0.0.0", "::", ""):
        with pytest.raises(ValueError, match=r"without a token: whoever reaches that port"):
            sb.TorchTransport.listen(dp_size=1, host=host, advertise="localhost")
        with pytest.raises(ValueError, match=r"pass advertise="):
            sb.TorchTransport.listen(dp_size=1, host=host, token=TOKEN)
    with pytest.raises(ValueError, match="no name or address of this machine"):
        sb.TorchTransport.listen(dp_size=1, host="no such host")


async def trains(transport: sb.TorchTransport, source: Any, token: str | None = None) -> None:
    """A rank comes by this way, and has a step."""
    config = sb.BalancerConfig(dp_size=1, batch_size=1, window=1)
    async with (
        sb.StreamBalancer(config) as balancer,
        sb.RankFeed(source, rank=0, dp_size=1, token=token) as feed,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(sb.serve, balancer, transport)
        await balancer.put(make_rollout(3))
        assert (await anext(feed)).step == 0
        tasks.cancel_scope.cancel()


async def test_a_store_names_the_token_only_to_who_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STREAM_BALANCER_TOKEN", raising=False)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with anyio.fail_after(GUARD_S):
        async with sb.TorchTransport(store, dp_size=1) as transport:
            with pytest.raises(ValueError, match="another token"):
                await anext(sb.RankFeed(transport.address, rank=0, dp_size=1))
            await trains(transport, store)
        async with sb.TorchTransport(store, dp_size=1, token=TOKEN) as transport:
            with pytest.raises(ValueError, match="another token"):
                await anext(sb.RankFeed(store, rank=0, dp_size=1))
            with pytest.raises(ValueError, match="another token"):
                await sb.connect(store, token="another token, just as long").put(make_rollout(3))
            await trains(transport, store, TOKEN)


# -- who knows the token, and breaks the protocol ----------------------------------------------------------------------


def called(number: int, method: str, args: Any = None, data: bytes = b"", total: int | None = None) -> bytes:
    """A call as bytes."""
    raw = args if isinstance(args, msgspec.Raw) else msgspec.Raw(msgspec.msgpack.encode(args))
    total = len(data) if total is None else total
    return m.frame(m.Call(number, 0, method, raw), total, (0, total) if total else ()) + data


def putting(name: str = "half", number: int = 0, args: Any = None) -> bytes:
    """A put as bytes; ``args``: what it says instead of its head and header."""
    encoded = encode_rollouts([make_rollout(9, name)])
    data = b"".join(bytes(memoryview(piece).cast("B")) for piece in encoded.payload.pieces)
    return called(number, "put", [None, None, True, encoded.header] if args is None else args, data)


def flipped(message: bytes, at: int) -> bytes:
    """One bit is wrong."""
    return message[:at] + bytes([message[at] ^ 1]) + message[at + 1 :]


def kept() -> bytes:
    """A put that says of one payload that another producer keeps it."""
    handles = [Handle(Owner(f"tcp://nowhere:{number}", b""), 0) for number in (1, 2)]
    encoded = encode_rollouts([make_rollout(9, f"kept{number}") for number in (1, 2)], handles=handles)
    return called(0, "put", [None, None, True, encoded.header])


HEADER = [None, None, True, encode_rollouts([make_rollout(9, "half")]).header]
PRODUCERS = {
    "flipped bit of a message": flipped(putting(), 14),
    "report of a rank": m.frame(m.Report("taken", 0)),
    "reply of a controller": m.frame(m.Reply(0)),
    "handshake again": m.frame(m.Hello(m.PROTOCOL, bytes(16))),
    "a message that is too large": struct.pack("<4sII", b"sbn\x01", 2**31, 0),
    "too large": called(0, "put", HEADER, total=2**61),
    "above max_put_bytes": called(0, "put", HEADER, total=2**20 + 64),
    "a put of no bytes": called(0, "put", HEADER),
    "a put of other bytes": called(0, "put", HEADER, bytes(7)),
    "a put of noise": called(0, "put", random.Random(3).randbytes(512), bytes(512)),
    "a put whose rollouts are noise": called(0, "put", [None, None, True, random.Random(3).randbytes(512)], bytes(512)),
    "a put of nothing": called(0, "put"),
    "a put of payloads of two producers": kept(),
    "an unknown method": called(0, "delete"),
    "a group of nobody": called(0, "put", [None, True, True, None]),
    "a slot that is none": putting(args=["x", None, True, HEADER[-1]]),
    "a count below nothing": called(0, "reserve", [0, -1]),
    "a drop of what it does not keep": called(0, "drop", [0]),
    "a declaration of noise": called(0, "declare", [1, 2, 3]),
    "a cancel with bytes": m.frame(m.Cancel(0), 64, (0, 64)) + bytes(64),
    "cancels what it has not asked": m.frame(m.Cancel(7)),
    "goes on after it has closed": m.frame(m.Close()) + putting(),
    "number twice": putting("once") + putting("twice"),
    "number left out": putting(number=3),
}
CLOSED = "goes on after it has closed"
QUIET = {"half a message": putting()[:20], "half a payload": putting()[:-30], "nothing": b""}  # the peer just goes away


async def test_hostile_producers_are_sent_away_and_others_notice_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """They know the token, and break the protocol."""
    caplog.set_level(logging.WARNING, "stream_balancer.net")
    options = {"token": TOKEN, "max_put_bytes": 2**20, "staged_bytes": 2**19}
    async with served(window=64, listen=options) as (balancer, transport):
        async with sb.connect(transport.address, token=TOKEN) as healthy:
            await healthy.put(make_rollout(3, "first"))
            for attacks, warned in ((PRODUCERS, 1), (QUIET, 0)):
                for name, message in attacks.items():
                    caplog.clear()
                    await anyio.to_thread.run_sync(attack, transport.address, message, bool(warned))
                    await healthy.put(make_rollout(3, f"after {name} {warned}"))
                    assert len(caplog.records) == (warned and name != CLOSED), (name, caplog.text)
            held = {r.rollout_id for r in balancer.snapshot().waiting}
            assert len(held) == 1 + len(PRODUCERS) + len(QUIET) + 1
            assert "once" in held  # what came before the offence was in order


async def test_a_producer_that_does_not_keep_to_its_limits_is_sent_away(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "stream_balancer.net")
    async with served(capacity=4, listen={"token": TOKEN, "staged_bytes": len(putting()) + 400}) as (
        balancer,
        transport,
    ):
        for n in range(4):
            await balancer.put(make_rollout(3, f"here{n}"))
        greedy = b"".join(putting(f"greedy{n}", n) for n in range(4))  # all of them wait for room
        await anyio.to_thread.run_sync(attack, transport.address, greedy, True)
        await until(lambda: "have no reply" in caplog.text and not balancer.statistics().blocked_puts)


def attack(address: str, message: bytes, wait: bool) -> None:
    """m.Join, send it all, and wait to be thrown out."""
    about = msgspec.Raw(msgspec.msgpack.encode([False, []]))
    handshake = Handshake(TOKEN.encode(), m.Join(b"", "producer", "hostile", secrets.token_bytes(16), (), about))
    with socket.create_connection(split_address(address), timeout=GUARD_S) as peer:
        peer.sendall(m.frame(handshake.hello()))
        answer = handshake.hear(hear(peer))
        assert answer is not None
        peer.sendall(m.frame(answer))
        hear(peer)
        with suppress(ConnectionError):
            peer.sendall(message)
            if wait:
                answers(peer)
