"""Hostile bytes on the producers' port: that connection is closed with a warning, nobody else notices."""

from __future__ import annotations

import logging
import random
import socket
import struct
import threading
import zlib
from contextlib import closing

import anyio
import msgspec
import pytest
import torch
from guard import GUARD_S
from helpers import attend

import stream_balancer as sb
from stream_balancer.testing import make_rollout
from stream_balancer.transport.handshake import Joining, pack
from stream_balancer.transport.request_messages import EncodedRequest
from stream_balancer.transport.requests import Mode, Request
from stream_balancer.transport.sockets.framing import frame
from stream_balancer.transport.sockets.joiner import join_over, parse_address
from stream_balancer.wire.messages import (
    PROTOCOL,
    Accepted,
    Cancel,
    Close,
    Hello,
    JoinProducer,
    MapBuffer,
    Put,
    PutGroup,
    RolloutHeader,
    Taken,
)
from stream_balancer.wire.rollouts import encode_rollout

TOKEN = "a token of the test"


def put(name: str = "half", number: int = 0, **header: int) -> bytes:
    """A put as bytes; ``header`` is what its header should not say."""
    one = EncodedRequest(Request(Mode.PUT, [make_rollout(9, name)]), lambda: None)
    one.number = number
    message, (source,), _ = one.outgoing()
    assert isinstance(message, Put)
    assert source.pieces is not None
    body = torch.cat(list(source.pieces())).numpy().tobytes()
    rollout = msgspec.structs.replace(message.rollout, **header)
    return frame(msgspec.structs.replace(message, rollout=rollout), (len(body),)) + body


def wrong_dtype() -> bytes:
    """int64 ids declared to be floats: another dtype than input_ids may have."""
    encoded = encode_rollout(make_rollout(9, "half"))
    header, body = encoded.header, torch.cat(encoded.pieces()).numpy().tobytes()
    meta = msgspec.msgpack.decode(body[: header.meta_bytes])
    meta[4][0][1] = meta[4][0][2] = 8
    packed = msgspec.msgpack.encode(meta)
    assert len(packed) == header.meta_bytes
    header = msgspec.structs.replace(header, meta_crc=zlib.crc32(packed))
    return frame(Put(0, header), (len(body),)) + packed + body[len(packed) :]


def flipped(message: bytes, at: int) -> bytes:
    """One bit is wrong."""
    return message[:at] + bytes([message[at] ^ 1]) + message[at + 1 :]


SMALL = RolloutHeader(64, 0, 512, 512)
PRODUCERS = {
    "noise": random.Random(2).randbytes(400),
    "flipped bit of a length": flipped(put(), 3),
    "flipped bit of a message": flipped(put(), 12),
    "flipped bit of a description": flipped(
        put(), len(put()) - encode_rollout(make_rollout(9, "half")).header.wire_bytes
    ),
    "message of a rank": frame(Taken(1)),
    "message of the controller": frame(Accepted((0,))),
    "message of a channel of another kind": frame(MapBuffer(1, 1, 64)),
    "handshake again": pack(Hello(PROTOCOL, bytes(16))) + bytes(100),
    "a message that is too large": struct.pack("<II", 2**31, 0),
    "too large": frame(Put(0, RolloutHeader(64, 0, 2**61, 2**61)), (2**61,)),
    "above max_put_bytes": frame(Put(0, RolloutHeader(64, 0, 2**20 + 64, 2**20 + 64)), (2**20 + 64,)),
    "a put of no bytes": frame(Put(0, RolloutHeader(0, 0, 0, 0)), (0,)),
    "a put without a buffer": frame(Put(0, SMALL)),
    "a put with two buffers": frame(Put(0, SMALL), (512, 512)),
    "a put of noise": frame(Put(0, SMALL), (512,)) + random.Random(3).randbytes(512),
    "a put that it keeps, but nobody could fetch": put(payload=0),
    "a put that says less than comes": put(wire_bytes=64),
    "a group of nobody": frame(PutGroup(0, ())),
    "a cancel with a buffer": frame(Cancel(0), (64,)) + bytes(64),
    "cancels what it has not sent": frame(Cancel(7)),
    "goes on after it has closed": frame(Close()) + put(),
    "number twice": put("once") + put("twice"),
    "wrong dtype": wrong_dtype(),
}
CLOSED = "goes on after it has closed"
QUIET = {"half a message": put()[:20], "half a buffer": put()[:-30], "nothing": b""}  # the peer just goes away


async def test_hostile_producers_are_sent_away_and_others_notice_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """They know the token, and break the protocol."""
    caplog.set_level(logging.WARNING, "stream_balancer.transport")
    config = sb.BalancerConfig(dp_size=1, batch_size=4, window=64)
    with anyio.fail_after(GUARD_S):
        async with (
            sb.TorchTransport.listen(dp_size=1, token=TOKEN, max_put_bytes=2**20, staged_bytes=2**19) as transport,
            sb.StreamBalancer(config) as balancer,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(attend, balancer, transport)
            async with sb.connect(transport.address, token=TOKEN) as healthy:
                await healthy.put(make_rollout(3, "first"))
                address = parse_address(transport.address)
                for attacks, warned in ((PRODUCERS, 1), (QUIET, 0)):
                    for name, message in attacks.items():
                        caplog.clear()
                        await anyio.to_thread.run_sync(attack, address, message, bool(warned))
                        await healthy.put(make_rollout(3, f"after {name} {warned}"))
                        assert len(caplog.records) == (warned and name != CLOSED), (name, caplog.text)
                assert [t.name for t in threading.enumerate()].count("sb-acceptor") == 1
                held = {r.rollout_id for r in balancer.snapshot().waiting}
                assert len(held) == 1 + len(PRODUCERS) + len(QUIET) + 1
                assert "once" in held  # what came before the offence was in order
            tasks.cancel_scope.cancel()


def attack(address: tuple[str, int], message: bytes, wait: bool, joining: Joining | None = None) -> None:
    """Join, send it all, and wait to be thrown out."""
    with closing(socket.create_connection(address)) as peer:
        join_over(peer, joining or Joining(TOKEN.encode(), JoinProducer("hostile")))
        peer.settimeout(GUARD_S)
        try:
            peer.sendall(message)
            while wait and peer.recv(4096):
                pass
        except ConnectionError:
            pass
