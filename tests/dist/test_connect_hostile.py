"""Hostile bytes on the producers' port: that connection is closed with a warning, nobody else notices."""

from __future__ import annotations

import logging
import random
import secrets
import socket
import struct
from contextlib import suppress
from typing import Any

import anyio
import msgspec
import pytest
from guard import GUARD_S
from helpers import until
from on_a_port import served

import stream_balancer as sb
from stream_balancer.net.handshake import Handshake
from stream_balancer.net.listener import split_address
from stream_balancer.net.messages import (
    HEADER_BYTES,
    PROTOCOL,
    Call,
    Cancel,
    Close,
    Hello,
    Join,
    Reply,
    Report,
    frame,
    read_envelope,
    read_header,
)  # fmt: skip
from stream_balancer.testing import make_rollout
from stream_balancer.wire.codec import Handle, Owner, encode_rollouts

TOKEN = "a token of the test"


def call(number: int, method: str, args: Any = None, data: bytes = b"", total: int | None = None) -> bytes:
    """A call as bytes."""
    raw = args if isinstance(args, msgspec.Raw) else msgspec.Raw(msgspec.msgpack.encode(args))
    total = len(data) if total is None else total
    return frame(Call(number, 0, method, raw), total, (0, total) if total else ()) + data


def put(name: str = "half", number: int = 0, args: Any = None) -> bytes:
    """A put as bytes; ``args``: what it says instead of its head and header."""
    encoded = encode_rollouts([make_rollout(9, name)])
    data = b"".join(bytes(memoryview(piece).cast("B")) for piece in encoded.payload.pieces)
    return call(number, "put", [None, None, True, encoded.header] if args is None else args, data)


def flipped(message: bytes, at: int) -> bytes:
    """One bit is wrong."""
    return message[:at] + bytes([message[at] ^ 1]) + message[at + 1 :]


def kept() -> bytes:
    """A put that keeps its payload."""
    encoded = encode_rollouts([make_rollout(9, "kept")], handles=[Handle(Owner("tcp://nowhere:1", b""), 0)])
    return call(0, "put", [None, None, True, encoded.header])


HEADER = [None, None, True, encode_rollouts([make_rollout(9, "half")]).header]
PRODUCERS = {
    "noise": random.Random(2).randbytes(400),
    "flipped bit of a length": flipped(put(), 5),
    "flipped bit of a message": flipped(put(), 14),
    "report of a rank": frame(Report("taken", 0)),
    "reply of a controller": frame(Reply(0)),
    "handshake again": frame(Hello(PROTOCOL, bytes(16))),
    "a message that is too large": struct.pack("<4sII", b"sbn\x01", 2**31, 0),
    "too large": call(0, "put", HEADER, total=2**61),
    "above max_put_bytes": call(0, "put", HEADER, total=2**20 + 64),
    "a put of no bytes": call(0, "put", HEADER),
    "a put of other bytes": call(0, "put", HEADER, bytes(7)),
    "a put of noise": call(0, "put", random.Random(3).randbytes(512), bytes(512)),
    "a put whose rollouts are noise": call(0, "put", [None, None, True, random.Random(3).randbytes(512)], bytes(512)),
    "a put of nothing": call(0, "put"),
    "a put that it keeps, but has not said where": kept(),
    "an unknown method": call(0, "delete"),
    "a group of nobody": call(0, "put", [None, True, True, None]),
    "a slot that is none": put(args=["x", None, True, HEADER[-1]]),
    "a count below nothing": call(0, "reserve", [0, -1]),
    "a declaration of noise": call(0, "declare", [1, 2, 3]),
    "a cancel with bytes": frame(Cancel(0), 64, (0, 64)) + bytes(64),
    "cancels what it has not asked": frame(Cancel(7)),
    "goes on after it has closed": frame(Close()) + put(),
    "number twice": put("once") + put("twice"),
    "number left out": put(number=3),
}
CLOSED = "goes on after it has closed"
QUIET = {"half a message": put()[:20], "half a payload": put()[:-30], "nothing": b""}  # the peer just goes away


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
    async with served(capacity=4, listen={"token": TOKEN, "staged_bytes": len(put()) + 400}) as (balancer, transport):
        for n in range(4):
            await balancer.put(make_rollout(3, f"here{n}"))
        greedy = b"".join(put(f"greedy{n}", n) for n in range(4))  # all of them wait for room
        await anyio.to_thread.run_sync(attack, transport.address, greedy, True)
        await until(lambda: "have no reply" in caplog.text and not balancer.statistics().blocked_puts)


def attack(address: str, message: bytes, wait: bool) -> None:
    """Join, send it all, and wait to be thrown out."""
    about = msgspec.Raw(msgspec.msgpack.encode([False, []]))
    handshake = Handshake(TOKEN.encode(), Join(b"", "producer", "hostile", secrets.token_bytes(16), (), about))
    with socket.create_connection(split_address(address)) as peer:
        peer.settimeout(GUARD_S)
        peer.sendall(frame(handshake.hello()))
        answer = handshake.hear(hear(peer))
        assert answer is not None
        peer.sendall(frame(answer))
        hear(peer)
        with suppress(ConnectionError):
            peer.sendall(message)
            while wait and peer.recv(4096):
                pass


def hear(peer: socket.socket) -> Any:
    """The next message."""
    size, crc = read_header(exactly(peer, HEADER_BYTES))
    return read_envelope(exactly(peer, size), crc).message


def exactly(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += (more := peer.recv(size - len(data)))
        assert more, "it was sent away"
    return data
