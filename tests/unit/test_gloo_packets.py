"""What messages become on a pair: packets that carry several, and what is refused. A pair without a network."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from guard import GUARD_S
from torch import Tensor

from stream_balancer.errors import WireError
from stream_balancer.testing.channels import Recorder, source_of
from stream_balancer.transport.buffers import BufferPool
from stream_balancer.transport.channel import Outgoing
from stream_balancer.transport.gloo import pair as pair_module
from stream_balancer.transport.gloo.channel import GlooChannel, LinkOptions
from stream_balancer.transport.gloo.packets import PACKET_BYTES
from stream_balancer.wire.messages import Message, Payloads, PutRefused, StepReport, Taken


class FakePair:
    """Remembers what is sent; receives what a test gives."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self._incoming: list[bytes] = []
        self._posted = 0
        self._changed = threading.Condition()
        self._poisoned = False

    def give(self, raw: bytes) -> None:
        with self._changed:
            self._incoming.append(raw)
            self._changed.notify_all()

    def send(self, tensor: Tensor) -> object:
        self.sent.append(tensor.numpy().tobytes())
        return None

    def receive(self, tensor: Tensor) -> _Pending:
        self._posted += 1
        return _Pending(self, tensor, self._posted)

    def poison(self) -> None:
        with self._changed:
            self._poisoned = True
            self._changed.notify_all()

    def wait_broken(self, timeout_s: float) -> None:
        self.poison()

    def take(self, tensor: Tensor, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._incoming) >= number or self._poisoned)
            if len(self._incoming) < number:
                raise RuntimeError("Connection closed by peer")
            raw = self._incoming[number - 1]
        tensor[:] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)


class _Pending:
    def __init__(self, pair: FakePair, tensor: Tensor, number: int) -> None:
        self._pair, self._tensor, self._number = pair, tensor, number

    def wait(self) -> None:
        self._pair.take(self._tensor, self._number)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def pair() -> FakePair:
    return FakePair()


def a_channel(pair: FakePair, connected: threading.Event) -> GlooChannel:
    def connect() -> FakePair:
        connected.wait(GUARD_S)
        return pair

    return GlooChannel("sb-test", connect, connected.set, LinkOptions(), pool=BufferPool(1))


@pytest.fixture
def channel(pair: FakePair, recorder: Recorder) -> Iterator[GlooChannel]:
    connected = threading.Event()
    connected.set()
    channel = a_channel(pair, connected)
    channel.start(recorder)
    yield channel
    channel.abort()


def packets_of(*messages: Message) -> list[bytes]:
    """What they are sent as, if all are there when the pair is."""
    pair, connected = FakePair(), threading.Event()
    channel = a_channel(pair, connected)
    channel.start(Recorder())
    for message in messages:
        channel.send(Outgoing(message))
    done = threading.Event()
    channel.send(lambda _: done.set())
    connected.set()
    assert done.wait(GUARD_S)
    channel.abort()
    return pair.sent


def test_a_report_and_the_taking_of_the_next_batch_travel_as_one_packet() -> None:
    (packet,) = packets_of(StepReport(4, 1.5, 0.5, 0.1), Taken(5))
    assert len(packet) == PACKET_BYTES


def test_small_messages_share_packets_and_none_is_lost(
    pair: FakePair, channel: GlooChannel, recorder: Recorder
) -> None:
    sent = [Taken(n) for n in range(100)]
    packets = packets_of(*sent)
    assert len(packets) < 10
    for packet in packets:
        pair.give(packet)
    end = threading.Event()
    recorder.on_message = lambda message: end.set() if len(recorder.messages) == len(sent) else None
    assert end.wait(GUARD_S) or len(recorder.messages) == len(sent)
    assert recorder.messages == sent


def test_a_message_larger_than_a_packet_travels_behind_one(
    pair: FakePair, channel: GlooChannel, recorder: Recorder
) -> None:
    message = PutRefused(1, "other", "x" * 1000)
    packets = packets_of(message)
    assert [len(packet) for packet in packets][0::2] == [PACKET_BYTES, PACKET_BYTES]
    came = threading.Event()
    recorder.on_message = lambda _: came.set()
    for packet in packets:
        pair.give(packet)
    assert came.wait(GUARD_S)
    assert recorder.messages == [message]


def wait_for_end(recorder: Recorder) -> None:
    while recorder.error is None:
        time.sleep(0.001)


def damaged(packet: bytes, at: int) -> bytes:
    return packet[:at] + bytes([packet[at] ^ 1]) + packet[at + 1 :]


@pytest.mark.parametrize("at", [0, 9, 17, 21, 25, 200])
def test_a_damaged_packet_ends_the_channel(pair: FakePair, channel: GlooChannel, recorder: Recorder, at: int) -> None:
    (packet,) = packets_of(Taken(1))
    pair.give(damaged(packet, at))
    wait_for_end(recorder)  # wait_closed() would not wait before the pair is there
    assert isinstance(recorder.error, WireError)
    assert recorder.messages == []


def test_a_pair_that_is_broken_when_a_receive_is_posted_is_a_lost_connection(
    recorder: Recorder,
) -> None:
    class Broken(FakePair):
        def receive(self, tensor: Tensor) -> _Pending:
            raise RuntimeError("Connection closed by peer")

    connected = threading.Event()
    connected.set()
    channel = a_channel(Broken(), connected)
    channel.start(recorder)
    wait_for_end(recorder)
    assert isinstance(recorder.error, ConnectionResetError)
    channel.abort()


def test_a_peer_that_has_seen_more_than_was_sent_is_refused(
    pair: FakePair, channel: GlooChannel, recorder: Recorder
) -> None:
    other, connected = FakePair(), threading.Event()
    peer = a_channel(other, connected)
    heard = Recorder()
    peer.start(heard)
    connected.set()
    for _ in range(3):
        (packet,) = packets_of(Taken(1))
        other.give(packet)
    while len(heard.messages) < 3:
        time.sleep(0.001)
    peer.send(Outgoing(Payloads(0), [source_of(torch.zeros(10, dtype=torch.uint8))]))
    done = threading.Event()
    peer.send(lambda _: done.set())
    assert done.wait(GUARD_S)
    peer.abort()
    pair.give(other.sent[-1])  # an empty packet that has seen three
    wait_for_end(recorder)  # wait_closed() would not wait before the pair is there
    assert isinstance(recorder.error, WireError)
    assert "has seen" in str(recorder.error)


def test_a_packet_counts_as_seen_once_all_that_is_in_it_was_acted_on(
    pair: FakePair, channel: GlooChannel, recorder: Recorder
) -> None:
    """Of what it kept for a packet the sender lets go then: a file that the packet's last message asks to be mapped."""
    (packet,) = packets_of(Taken(1), Taken(2))
    told: list[int] = []
    has_told = threading.Event()

    def send_something(message: Message) -> None:
        if message == Taken(2):
            done = threading.Event()
            channel.send(Outgoing(PutRefused(1, "other", "x" * 1000)))
            channel.send(lambda _: done.set())
            assert done.wait(GUARD_S)
            told.append(seen_in(pair.sent[-1]))

            has_told.set()

    recorder.on_message = send_something
    pair.give(packet)
    assert has_told.wait(GUARD_S)
    assert told == [0]


def test_bulk_is_acknowledged_by_one_empty_packet_after_it_was_acted_on(
    pair: FakePair, channel: GlooChannel, recorder: Recorder
) -> None:
    """The writer has nothing to say while a batch is decoded: each packet of it would wake the peer."""
    acted = threading.Event()

    def let_the_writer_run(message: Message) -> None:
        for n in range(100):
            written = threading.Event()

            def write(_: object, n: int = n, written: threading.Event = written) -> Outgoing:
                written.set()
                return Outgoing(Taken(n))

            channel.send(write)
            assert written.wait(GUARD_S)
        acted.set()

    recorder.on_message = let_the_writer_run
    for packet in packets_of_bulk():
        pair.give(packet)
    assert acted.wait(GUARD_S)
    while seen_in(pair.sent[-1]) == 0:
        time.sleep(0.001)
    assert [is_empty(packet) for packet in pair.sent].count(True) <= 1


def packets_of_bulk() -> list[bytes]:
    pair, connected = FakePair(), threading.Event()
    channel = a_channel(pair, connected)
    channel.start(Recorder())
    connected.set()
    done = threading.Event()

    channel.send(Outgoing(Payloads(0), [source_of(torch.zeros(10, dtype=torch.uint8))]))
    channel.send(lambda _: done.set())
    assert done.wait(GUARD_S)
    channel.abort()
    return pair.sent[:3]  # the packet, the bulk, the empty packet behind it


def is_empty(packet: bytes) -> bool:
    return int.from_bytes(packet[16:20], "little") == 0


def seen_in(packet: bytes) -> int:
    return int.from_bytes(packet[8:16], "little")


def test_a_descriptor_that_is_another_sockets_by_now_says_nothing_of_who_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setattr(pair_module, "sockets_at", lambda end: [other.fileno()])
        assert not pair_module._listens(b"an address that is not the other's", b"")
