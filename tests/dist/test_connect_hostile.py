"""Hostile bytes on the producers' port: that connection is closed with a warning, nobody else notices."""

from __future__ import annotations

import logging
import random
import socket
import threading
import zlib
from contextlib import closing

import anyio
import msgspec
import pytest
import torch

import stream_balancer as sb
from stream_balancer.controller.producers import attend
from stream_balancer.testing import make_rollout
from stream_balancer.transport.gloo.joiner import join_over, parse_address
from stream_balancer.transport.handshake import Joining, pack
from stream_balancer.transport.put_ledger import Limits, Mode, PutLedger
from stream_balancer.transport.puts import WireTicket, write_puts
from stream_balancer.wire.messages import Hello, JoinProducer
from stream_balancer.wire.share import PROTOCOL, Frame, Kind, read_frame

TOKEN = "a token of the test"


def raw(frame: Frame, body: bytes = b"") -> bytes:
    return frame.pack().numpy().tobytes() + body


def puts(name: str = "half") -> bytes:
    book = PutLedger()
    book.open(Limits())
    book.add(WireTicket([make_rollout(9, name)], Mode.PUT, lambda: None))
    slab = torch.cat(write_puts(book.take()[0]))
    return raw(Frame(Kind.PUTS, wire_bytes=slab.numel()), slab.numpy().tobytes())


def wrong_version(message: bytes) -> bytes:
    words = torch.frombuffer(bytearray(message[:128]), dtype=torch.int64).clone()
    words[1] += 1
    return words.numpy().tobytes()


def wrong_dtype(message: bytes) -> bytes:
    """int64 ids declared to be floats: another dtype than input_ids may have."""
    body = message[256:]
    frame_words = torch.frombuffer(bytearray(message[128:256]), dtype=torch.int64)
    frame = read_frame(frame_words)
    meta = msgspec.msgpack.decode(body[: frame.meta_bytes])
    meta[4][0][1] = meta[4][0][2] = 8
    packed = msgspec.msgpack.encode(meta)
    assert len(packed) == frame.meta_bytes
    inner = raw(frame._replace(meta_crc=zlib.crc32(packed)), packed + body[frame.meta_bytes :])
    return message[:128] + inner


PRODUCERS = {
    "noise": random.Random(2).randbytes(400),
    "wrong version": wrong_version(puts()),
    "flipped bit": bytes([puts()[0]]) + bytes([puts()[1] ^ 1]) + puts()[2:],
    "kind of a rank": raw(Frame(Kind.REPORT, taken=1)),
    "kind of the controller": raw(Frame(Kind.ACCEPTED, step=0, nanoseconds=1)),
    "handshake again": pack(Hello(PROTOCOL, bytes(16))) + bytes(100),
    "too large": raw(Frame(Kind.PUTS, wire_bytes=2**61)),
    "above max_put_bytes": raw(Frame(Kind.PUTS, wire_bytes=2**20 + 1)),
    "empty puts": raw(Frame(Kind.PUTS)),
    "puts of noise": raw(Frame(Kind.PUTS, wire_bytes=512), random.Random(3).randbytes(512)),
    "cancels what it has not sent": raw(Frame(Kind.CANCEL, step=7)),
    "bye with a body": raw(Frame(Kind.BYE, wire_bytes=8), b"12345678"),
    "number twice": puts("once") + puts("twice"),
    "wrong dtype": wrong_dtype(puts()),
}
QUIET = {"half a frame": puts()[:100], "half a body": puts()[:-30], "nothing": b""}  # the peer just goes away


async def test_hostile_producers_are_sent_away_and_others_notice_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """They know the token, and break the protocol."""
    caplog.set_level(logging.WARNING, "stream_balancer.transport")
    config = sb.BalancerConfig(dp_size=1, batch_size=4, window=64)
    with anyio.fail_after(50):
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
                        assert len(caplog.records) == warned, (name, caplog.text)
                assert [t.name for t in threading.enumerate()].count("sb-acceptor") == 1
                held = {r.rollout_id for r in balancer.snapshot().waiting}
                assert len(held) == 1 + len(PRODUCERS) + len(QUIET) + 1
                assert "once" in held  # what came before the offence was in order
            tasks.cancel_scope.cancel()


def attack(address: tuple[str, int], message: bytes, wait: bool, joining: Joining | None = None) -> None:
    """Join, send it all, and wait to be thrown out."""
    with closing(socket.create_connection(address)) as peer:
        join_over(peer, joining or Joining(TOKEN.encode(), JoinProducer("hostile")))
        peer.settimeout(20)
        try:
            peer.sendall(message)
            while wait and peer.recv(4096):
                pass
        except ConnectionError:
            pass
