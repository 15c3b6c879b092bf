"""Channels over TCP keep the contract of every channel; and refuse hostile bytes before they allocate."""

from __future__ import annotations

import random
import socket
import struct
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
from guard import GUARD_S
from lockstep import in_lockstep

from stream_balancer.errors import WireError
from stream_balancer.testing.channels import Recorder, check_channel
from stream_balancer.transport.channel import Outgoing
from stream_balancer.transport.sockets.channel import SocketChannel
from stream_balancer.transport.sockets.framing import MAX_MESSAGE_BYTES, frame
from stream_balancer.transport.sockets.hub import Hub
from stream_balancer.wire.messages import Accepted, Close, Taken

Hubs = tuple[Hub, Hub]


@pytest.fixture
def hubs() -> Iterator[Hubs]:
    """One thread for all connections of a side."""
    both = Hub("sb-one", lambda: True), Hub("sb-other", lambda: True)
    for hub in both:
        hub.start()
    yield both
    for hub in both:
        hub.close()


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


async def test_the_contract(hubs: Hubs) -> None:
    @asynccontextmanager
    async def open_pair() -> AsyncIterator[tuple[SocketChannel, SocketChannel]]:
        one, other = (SocketChannel(hub, sock) for hub, sock in zip(hubs, connected(), strict=True))
        yield one, other
        one.abort()
        other.abort()

    await check_channel(open_pair)


HOSTILE = {
    "noise": random.Random(1).randbytes(300),
    "an impossible length": struct.pack("<II", MAX_MESSAGE_BYTES + 1, 0),
    "no length": struct.pack("<II", 0, 0),
    "a wrong checksum": struct.pack("<II", 2, 1) + b"ab",
    "no message": struct.pack("<II", 2, zlib.crc32(b"ab")) + b"ab",
    "after its close": frame(Close()) + frame(Taken(1)),
}


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE.keys())
async def test_hostile_bytes_end_that_connection_alone(hubs: Hubs, raw: bytes) -> None:
    recorders = Recorder(), Recorder()
    attacked, (one, other) = connected(), connected()
    hostile, healthy = SocketChannel(hubs[0], attacked[0]), SocketChannel(hubs[0], one)
    hostile.start(recorders[0])
    healthy.start(recorders[1])
    with attacked[1] as sock:
        sock.sendall(raw)
        error = await recorders[0].end()
        assert isinstance(error, WireError) or raw.startswith(frame(Close()))
        sock.settimeout(GUARD_S)
        while sock.recv(4096):
            pass
    with other as sock:
        sock.sendall(frame(Taken(2)))
        await recorders[1].arrived(1)
    assert recorders[0].messages == []


async def test_messages_arrive_however_they_are_cut(hubs: Hubs) -> None:
    recorder, chance = Recorder(), random.Random(0)
    one, other = connected()
    channel = SocketChannel(hubs[0], one)
    channel.start(recorder)
    raw = b"".join(frame(Taken(n)) + frame(Accepted((n,)), (n,)) + bytes([n] * n) for n in range(60))
    with other as sock:
        while raw:
            cut = chance.randrange(1, 200)
            sock.sendall(raw[:cut])
            raw = raw[cut:]
        await recorder.arrived(120)
    assert recorder.buffers[1::2] == [[bytes([n] * n)] for n in range(60)]
    channel.abort()


async def test_threads_that_send_at_the_same_time_wake_the_channel(hubs: Hubs) -> None:
    recorder = Recorder()
    one, other = (SocketChannel(hub, sock) for hub, sock in zip(hubs, connected(), strict=True))
    one.start(Recorder())
    other.start(recorder)
    in_lockstep(SocketChannel.send, *(partial(one.send, Outgoing(Taken(n))) for n in range(2)))
    await recorder.arrived(2)
    assert sorted(m.total for m in recorder.messages if isinstance(m, Taken)) == [0, 1]
    one.abort()
    other.abort()


async def test_what_cannot_be_sent_ends_it_with_its_own_error(hubs: Hubs) -> None:
    recorder = Recorder()
    one, other = connected()
    channel = SocketChannel(hubs[0], one)
    channel.start(recorder)
    channel.send(Outgoing(Taken(1), references=(object(),)))
    assert isinstance(await recorder.end(), TypeError)
    other.close()
