"""Somebody without the token, at every port this process listens on: it can neither put, read, supersede, nor stop or
slow anything."""

from __future__ import annotations

import os
import random
import socket
import stat
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from typing import Any

import anyio
import msgspec
import pytest
from guard import GUARD_S
from torch._C._distributed_c10d import TCPStore

import stream_balancer as sb
from stream_balancer.net.handshake import Handshake
from stream_balancer.net.listener import split_address
from stream_balancer.net.messages import (
    HEADER_BYTES,
    PROTOCOL,
    Call,
    Challenge,
    Close,
    Hello,
    Join,
    MoverNote,
    Refused,
    Report,
    Welcome,
    frame,
    read_envelope,
    read_header,
)
from stream_balancer.testing import make_rollout

TOKEN = "the token of the test"
NAME = "a rollout of the test"  # long: what a stranger sees has 4,000 random bytes, where two are met now and then
ABOUT = {"rank": 0, "dp_size": 1, "incarnation": 10**9, "depth": 2, "max_batch_bytes": 2**30}
REQUESTS = [
    Join(b"", kind, "forger", b"f" * 16, (), msgspec.Raw(msgspec.msgpack.encode(ABOUT)))
    for kind in ("rank", "producer", "fetcher")
]
PUT = frame(Call(0, 0, "put", msgspec.Raw(b"\x90")), 512, (0, 512)) + bytes(512)


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


@contextmanager
def stranger(port: int) -> Iterator[socket.socket]:
    """A connection of somebody who was told nothing."""
    with closing(socket.create_connection(("127.0.0.1", port), timeout=GUARD_S)) as sock:
        yield sock


def answers(sock: socket.socket) -> bytes:
    """All it says until it hangs up."""
    got = b""
    with suppress(ConnectionError):
        while part := sock.recv(65536):
            got += part
    return got


def challenged(sock: socket.socket) -> Challenge:
    """An honest beginning."""
    sock.sendall(frame(Hello(PROTOCOL, b"n" * 16)))
    size, crc = read_header(sock.recv(HEADER_BYTES, socket.MSG_WAITALL))
    message = read_envelope(sock.recv(size, socket.MSG_WAITALL), crc).message
    assert isinstance(message, Challenge)
    return message


Attack = Callable[[socket.socket, random.Random], object]


def says(data: bytes) -> Attack:
    return lambda sock, _: sock.sendall(data)


def noise(size: int) -> Attack:
    return lambda sock, chance: sock.sendall(chance.randbytes(size))


def joins(request: Join, prove: Callable[[Challenge], bytes]) -> Attack:
    def attack(sock: socket.socket, _: random.Random) -> None:
        sock.sendall(frame(msgspec.structs.replace(request, proof=prove(challenged(sock)))) + PUT)

    return attack


def guesses(request: Join, token: bytes) -> Attack:
    """As if it knew the token."""

    def attack(sock: socket.socket, _: random.Random) -> None:
        handshake = Handshake(token, request)
        handshake._mine = b"n" * 16
        handshake._theirs = challenged(sock).nonce
        sock.sendall(frame(msgspec.structs.replace(request, proof=handshake._proof(b"joiner"))) + PUT)

    return attack


def damaged(sock: socket.socket, chance: random.Random) -> None:
    """One bit of an honest message is wrong."""
    message = bytearray(frame(msgspec.structs.replace(REQUESTS[0], proof=bytes(32))))
    message[chance.randrange(len(message))] ^= 1 << chance.randrange(8)
    challenged(sock)
    sock.sendall(bytes(message))


ATTACKS: dict[str, Attack] = {
    "noise": noise(400),
    "one byte": noise(1),
    "http": says(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "ssh": says(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "a set in a TCPStore": says(bytes([3]) + struct.pack("<q", 0) + b"\x00" + struct.pack("<q", 3) + b"key"),
    "a put without a handshake": says(PUT),
    "a report without a handshake": says(frame(Report("done", 0))),
    "a note without a handshake": says(frame(MoverNote(1, b"x"))),
    "the end of a rank, without a handshake": says(frame(Close())),
    "a join without a hello": says(frame(REQUESTS[0])),
    "a welcome": says(frame(Welcome())),
    "a huge message": says(b"sbn\x01" + struct.pack("<II", 2**31, 0)),
    "an empty message": says(b"sbn\x01" + struct.pack("<II", 0, 0)),
    "a message of noise": lambda sock, chance: sock.sendall(
        b"sbn\x01" + struct.pack("<II", 64, 0) + chance.randbytes(64)
    ),
    "another protocol": says(frame(Hello(PROTOCOL + 1, bytes(16)))),
    "two hellos": says(frame(Hello(PROTOCOL, bytes(16))) * 2),
    "a bit is wrong": damaged,
    "refuses": says(frame(Refused("closed", "go away"))),
    **{f"{request.kind} without a proof": joins(request, lambda _: b"") for request in REQUESTS},
    **{f"{request.kind} reflects": joins(request, lambda challenge: challenge.proof) for request in REQUESTS},
    **{f"{request.kind} with no token": guesses(request, b"") for request in REQUESTS},
    **{f"{request.kind} with a guess": guesses(request, b"guess" * 4) for request in REQUESTS},
}


@asynccontextmanager
async def training() -> AsyncIterator[tuple[sb.TorchTransport, Callable[[int], Any]]]:
    """A rank trains what a producer puts, whose tokens stay with it: every kind of port we have is open."""
    config = sb.BalancerConfig(dp_size=1, batch_size=2, window=2)
    put, steps, ids = list[str](), list[int](), list[str]()
    with anyio.fail_after(GUARD_S):
        async with (
            sb.TorchTransport.listen(dp_size=1, token=TOKEN, movers=("torch_dist",)) as transport,
            sb.StreamBalancer(config) as balancer,
            anyio.create_task_group() as tasks,
        ):

            async def iterate() -> None:
                async for batch in sb.RankFeed(
                    transport.address, rank=0, dp_size=1, token=TOKEN, movers=("torch_dist",)
                ):
                    steps.append(batch.step)
                    ids.extend(r.rollout_id for r in batch.rollouts if not r.is_padding)

            tasks.start_soon(sb.serve, balancer, transport)
            tasks.start_soon(iterate)
            async with sb.connect(transport.address, token=TOKEN, hand_over="direct", label="p") as producer:

                async def train(count: int) -> None:
                    """So many more steps."""
                    for _ in range(2 * count):
                        put.append(f"{NAME} {len(put)}")
                        await producer.put(make_rollout(5, put[-1]))
                    while len(ids) < len(put):
                        await anyio.sleep(0.001)

                await train(1)
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
                with stranger(port) as sock, suppress(OSError):  # it may have been thrown out already
                    sock.settimeout(0.1)  # gloo never answers
                    ATTACKS[name](sock, random.Random(seed))
                    sock.shutdown(socket.SHUT_WR)
                    got += answers(sock)
            return got

        for name in ATTACKS:
            seen += await anyio.to_thread.run_sync(attack_all, name, 0)
            await train(1)
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


async def trains(transport: sb.TorchTransport, source: Any, *, token: str | None = None) -> None:
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
            await trains(transport, store, token=TOKEN)
