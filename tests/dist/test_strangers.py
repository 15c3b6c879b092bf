"""Somebody without the token, at every port this process listens on: it can neither put, read, supersede, nor stop or
slow anything."""

from __future__ import annotations

import logging
import os
import random
import socket
import stat
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from typing import Any

import anyio
import msgspec
import pytest
from guard import GUARD_S
from torch._C._distributed_c10d import TCPStore

import stream_balancer as sb
from stream_balancer.testing import make_rollout
from stream_balancer.transport.gloo import pair as _gloo
from stream_balancer.transport.handshake import pack, proof_of
from stream_balancer.transport.sockets import acceptor as _acceptor
from stream_balancer.transport.sockets.framing import frame
from stream_balancer.transport.sockets.joiner import parse_address, receive_message
from stream_balancer.wire.messages import (
    PROTOCOL,
    Challenge,
    Close,
    Hello,
    Join,
    JoinFetcher,
    JoinPeer,
    JoinProducer,
    JoinRank,
    PairAddress,
    Put,
    Refused,
    RolloutHeader,
    WelcomeRank,
)

TOKEN = "the token of the test"
NAME = "a rollout of the test"  # long: what a stranger sees has 4,000 random bytes, where two are met now and then
SUPERSEDES = JoinRank(0, 1, 10**9, 2, 2**30)
REQUESTS: list[Join] = [
    SUPERSEDES,
    JoinProducer("forger"),
    JoinFetcher(),
    JoinPeer("0/0/1", 0),
]


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
def stranger(port: int, timeout_s: float = GUARD_S) -> Iterator[socket.socket]:
    """A connection of somebody who was told nothing."""
    with closing(socket.create_connection(("127.0.0.1", port), timeout=timeout_s)) as sock:
        yield sock


def answers(sock: socket.socket) -> bytes:
    """All it says until it hangs up."""
    got = b""
    with suppress(ConnectionError):
        while part := sock.recv(65536):
            got += part
    return got


def challenged(sock: socket.socket) -> tuple[Challenge, bytes]:
    """An honest beginning: the challenge, and my nonce."""
    nonce = os.urandom(16)
    sock.sendall(pack(Hello(PROTOCOL, nonce)))
    message = receive_message(sock)
    assert isinstance(message, Challenge)
    return message, nonce


Attack = Callable[[socket.socket, random.Random], object]


def says(data: bytes) -> Attack:
    return lambda sock, _: sock.sendall(data)


def joins(request: Join, prove: Callable[[Challenge, bytes], bytes], then: bytes = b"") -> Attack:
    def attack(sock: socket.socket, _: random.Random) -> None:
        proof = prove(*challenged(sock))
        sock.sendall(pack(msgspec.structs.replace(request, proof=proof)) + then)

    return attack


def noise(size: int) -> Attack:
    return lambda sock, chance: sock.sendall(chance.randbytes(size))


def damaged(sock: socket.socket, chance: random.Random) -> None:
    """One bit of an honest message is wrong."""
    message = bytearray(pack(msgspec.structs.replace(SUPERSEDES, proof=bytes(32))))
    message[chance.randrange(len(message))] ^= 1 << chance.randrange(8)
    challenged(sock)
    sock.sendall(bytes(message))


PUT = frame(Put(0, RolloutHeader(64, 0, 512, 512)), (512,)) + bytes(512)
ATTACKS: dict[str, Attack] = {
    "noise": noise(400),
    "one byte": noise(1),
    "http": says(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "ssh": says(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "a set in a TCPStore": says(bytes([3]) + struct.pack("<q", 0) + b"\x00" + struct.pack("<q", 3) + b"key"),
    "a put without a handshake": says(PUT),
    "the end of a rank, without a handshake": says(frame(Close())),
    "a join without a hello": says(pack(SUPERSEDES)),
    "a welcome": says(pack(WelcomeRank())),
    "an address": says(pack(PairAddress(b"x" * 170, bytes(16)))),
    "a huge message": says(b"strmbal\x02" + struct.pack("<I", 2**31)),
    "an empty message": says(b"strmbal\x02" + struct.pack("<I", 0)),
    "a message of noise": lambda sock, chance: sock.sendall(
        b"strmbal\x02" + struct.pack("<I", 64) + chance.randbytes(64)
    ),
    "another protocol": says(pack(Hello(PROTOCOL + 1, bytes(16)))),
    "two hellos": says(pack(Hello(PROTOCOL, bytes(16))) * 2),
    "a bit is wrong": damaged,
    "refuses": says(pack(Refused("closed", "go away"))),
    **{f"{type(r).__name__} without a proof": joins(r, lambda *_: b"", PUT) for r in REQUESTS},
    **{
        f"{type(r).__name__} with no token": joins(r, lambda c, n: proof_of(b"", b"peer", c.nonce, n)) for r in REQUESTS
    },
    **{
        f"{type(r).__name__} with a guess": joins(r, lambda c, n: proof_of(b"guess" * 4, b"peer", c.nonce, n), PUT)
        for r in REQUESTS
    },
    **{f"{type(r).__name__} reflects": joins(r, lambda c, _: c.proof, PUT) for r in REQUESTS},
}


class Feed:
    """Rank 0, in a thread of its own, and what it was given."""

    def __init__(self, address: str) -> None:
        self.steps: list[int] = []
        self.ids: list[str] = []
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(address,), daemon=True)
        self._thread.start()

    def _run(self, address: str) -> None:
        try:
            for batch in sb.RankFeed(address, rank=0, dp_size=1, token=TOKEN):
                self.steps.append(batch.step)
                self.ids += [r.rollout_id for r in batch.rollouts if not r.is_padding]
        except Exception as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(GUARD_S)
        assert not self._thread.is_alive()


@asynccontextmanager
async def training() -> AsyncIterator[tuple[sb.TorchTransport, sb.Producer, Callable[[int], Any]]]:
    """A rank trains what a producer puts, whose tokens stay with it: every kind of port we have is open."""
    config = sb.BalancerConfig(dp_size=1, batch_size=2, window=2)
    put: list[str] = []
    with anyio.fail_after(GUARD_S):
        async with (
            sb.TorchTransport.listen(dp_size=1, token=TOKEN) as transport,
            sb.StreamBalancer(config) as balancer,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(sb.serve, balancer, transport)
            feed = Feed(transport.address)
            async with sb.connect(transport.address, token=TOKEN, hand_over="direct", label="p") as producer:

                async def train(steps: int) -> None:
                    """So many more steps."""
                    for _ in range(2 * steps):
                        put.append(f"{NAME} {len(put)}")
                        await producer.put(make_rollout(5, put[-1]))
                    while len(feed.ids) < len(put) and feed.error is None:
                        await anyio.sleep(0.001)

                await train(1)
                yield transport, producer, train
                balancer.end()
                await anyio.to_thread.run_sync(feed.join)
    assert feed.error is None
    assert feed.steps == list(range(len(put) // 2))
    assert sorted(feed.ids) == sorted(put)


async def test_a_stranger_at_every_port_gets_nothing(caplog: pytest.LogCaptureFixture) -> None:
    before = listening_ports()
    seen = b""
    async with training() as (transport, _, train):
        ports = listening_ports() - before
        ours = [port for port in ports if not is_shut(port)]
        assert parse_address(transport.address)[1] in ours
        assert len(ours) == 2, "a listener nobody here thought of"  # the controller's, the producer's payloads
        assert len(ports) == 4  # and one of gloo at each end
        caplog.set_level(logging.WARNING, "stream_balancer.transport")

        def attack_all(name: str, seed: int) -> bytes:
            got = b""
            for port in ours:
                with stranger(port) as sock:
                    with suppress(OSError):  # it may have been thrown out already
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
    assert "(incarnation 0) was lost" not in caplog.text


def is_shut(port: int) -> bool:
    """Whether nobody is let in there any more."""
    try:
        with stranger(port, timeout_s=0.3):
            return False
    except TimeoutError:
        return True


async def test_strangers_who_stay_make_room_for_who_belongs_here() -> None:
    """More of them than there are places; some say a little and nothing more."""
    with anyio.fail_after(GUARD_S):
        async with sb.TorchTransport.listen(dp_size=1, token=TOKEN) as transport:
            port = parse_address(transport.address)[1]
            crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(_acceptor.MAX_CANDIDATES + 40)]
            for sock in crowd[::2]:
                sock.sendall(pack(Hello(PROTOCOL, bytes(16)))[:7])
            async with sb.connect(transport.address, token=TOKEN):
                await transport.accept_producer()
            feed = sb.RankFeed(transport.address, rank=0, dp_size=1, token=TOKEN)
            assert (await transport.accept()).incarnation == 0
            for sock in crowd[:40]:  # the oldest had to go
                sock.settimeout(GUARD_S)
                assert await anyio.to_thread.run_sync(answers, sock) == b""
            await feed.aclose()
            for sock in crowd:
                sock.close()


@pytest.mark.parametrize("drips", [False, True])
async def test_who_has_not_proven_itself_in_time_goes(monkeypatch: pytest.MonkeyPatch, drips: bool) -> None:
    monkeypatch.setattr(_acceptor, "CANDIDATE_S", 0.2)

    def hang_on(port: int) -> bytes:
        with stranger(port) as sock:
            for byte in pack(Hello(PROTOCOL, bytes(16)))[:-1] if drips else b"":
                with suppress(ConnectionError):
                    sock.sendall(bytes([byte]))
                time.sleep(0.02)
            return answers(sock)

    with anyio.fail_after(GUARD_S):
        async with sb.TorchTransport.listen(dp_size=1, token=TOKEN) as transport:
            assert await anyio.to_thread.run_sync(hang_on, parse_address(transport.address)[1]) == b""


async def test_a_crowd_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "stream_balancer.transport")

    def crowd(port: int) -> None:
        for _ in range(200):
            with stranger(port) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\n")
                answers(sock)

    with anyio.fail_after(GUARD_S):
        async with sb.TorchTransport.listen(dp_size=1, token=TOKEN) as transport:
            await anyio.to_thread.run_sync(crowd, parse_address(transport.address)[1])
    assert 1 <= len(caplog.records) <= 20


# --- gloo's own port --------------------------------------------------------------------------------------------------


async def test_a_crowd_at_gloos_port_takes_no_descriptor() -> None:
    """gloo keeps every connection it gets, and ends the process when descriptors run out."""
    before = listening_ports()
    async with training() as (_, _, train):
        shut = [port for port in listening_ports() - before if is_shut(port)]
        assert len(shut) == 2
        open_before = len(os.listdir("/proc/self/fd"))
        crowd = []
        for port in shut:
            for _ in range(50):
                sock = socket.socket()
                sock.setblocking(False)
                sock.connect_ex(("127.0.0.1", port))
                crowd.append(sock)
        await train(1)
        assert len(os.listdir("/proc/self/fd")) <= open_before + len(crowd) + 5
        for sock in crowd:
            sock.close()


@pytest.mark.parametrize("says_something", [False, True])
async def test_who_takes_a_rank_s_place_at_gloos_port_is_no_rank(
    monkeypatch: pytest.MonkeyPatch, says_something: bool
) -> None:
    """Somebody connects to gloo's port before the other end does: that try fails, and the next one works."""
    monkeypatch.setattr(_gloo, "PAIR_TIMEOUT_S", 1.0)
    genuine = _gloo._Exchange.set
    strangers: list[socket.socket] = []

    def get_there_first(self: _gloo._Exchange, key: str, value: bytes) -> None:
        if len(strangers) < 2:  # one for each side: gloo chooses which of them listens
            name_bytes = struct.unpack("<q", value[:8])[0]
            port = struct.unpack("!H", value[18 + name_bytes : 20 + name_bytes])[0]
            strangers.append(socket.create_connection(("127.0.0.1", port)))
            strangers[-1].sendall(struct.pack("<q", 1 - int(key[-1])))
            if says_something:
                strangers[-1].sendall(bytes(7))
            time.sleep(0.05)
        genuine(self, key, value)

    monkeypatch.setattr(_gloo._Exchange, "set", get_there_first)
    async with training():
        pass
    assert len(strangers) == 2
    for sock in strangers:
        sock.close()


def test_other_machines_need_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STREAM_BALANCER_TOKEN", raising=False)
    for host in ("0.0.0.0", "::", ""):
        with pytest.raises(ValueError, match=r"without a token: whoever reaches that port"):
            sb.TorchTransport.listen(dp_size=1, host=host, advertise="localhost")
        with pytest.raises(ValueError, match=r"pass advertise="):
            sb.TorchTransport.listen(dp_size=1, host=host, token=TOKEN)
    with pytest.raises(ValueError, match="no name or address of this machine"):
        sb.TorchTransport.listen(dp_size=1, host="no such host")


async def test_every_address_may_be_listened_on_under_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAM_BALANCER_TOKEN", TOKEN)
    with anyio.fail_after(GUARD_S):
        for options in ({}, {"token": "", "insecure": True}):
            anywhere: dict[str, Any] = {"host": "0.0.0.0", "advertise": "localhost", **options}
            async with sb.TorchTransport.listen(dp_size=1, **anywhere) as transport:
                assert transport.address.startswith("tcp://localhost:")
                feed = sb.RankFeed(transport.address, rank=0, dp_size=1, token=options.get("token"))
                await transport.accept()
                await feed.aclose()


async def test_a_store_names_the_token_only_to_who_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STREAM_BALANCER_TOKEN", raising=False)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with anyio.fail_after(GUARD_S):
        async with sb.TorchTransport(store, dp_size=1) as transport:
            with pytest.raises(ValueError, match="do not have the same token"):
                await anext(sb.RankFeed(transport.address, rank=0, dp_size=1))
            feed = sb.RankFeed(store, rank=0, dp_size=1)
            await transport.accept()
            await feed.aclose()
        async with sb.TorchTransport(store, dp_size=1, token=TOKEN) as transport:
            with pytest.raises(ValueError, match="do not have the same token"):
                await anext(sb.RankFeed(store, rank=0, dp_size=1))
            with pytest.raises(ValueError, match="do not have the same token"):
                await sb.connect(store, token="another token, just as long").put(make_rollout(3))
            feed = sb.RankFeed(store, rank=0, dp_size=1, token=TOKEN)
            await transport.accept()
            await feed.aclose()
