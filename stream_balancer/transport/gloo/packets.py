"""Packets on a gloo pair: several small messages in each, bulk behind them, and what must live until the peer has it.

::

    packet   256 bytes, always: magic | packets seen | size | checksum | messages that fit, each behind its length
    bulk     a message that does not fit, or the buffers behind one; then an empty packet on the same tag

A receive that is shorter than its message aborts a gloo process, so packets have one size, and sizes come before bytes.
No wait ever expires: in gloo an expired wait breaks the pair, and a peer that is merely slow must not be cut off. Two
facts about gloo make that possible (``tests/dist`` holds them):

* A receive that has no bytes yet is woken at once by the peer's death and by poison; a transfer cut in the middle is
  not. So bulk is posted, but only ever waited for once the empty packet *behind* it on the same tag has arrived.
* A send is complete when the peer says so in its own packets (``seen``), so nobody waits for sends at all; what they
  need is kept in a ledger until then.

Several small messages share a packet, because every packet wakes the peer. Not here: threads (``channel``), what
messages mean, how the two ends meet (``pair``).
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from stream_balancer.errors import WireError

__all__ = ["CHUNK_BYTES", "INSTALL", "PACKET_BYTES", "Packet", "Packets", "Pair", "Pending"]

T = TypeVar("T")
CHUNK_BYTES = 16 * 2**20
"""Bulk travels in pieces of this size: packing one overlaps with sending the one before."""
MAX_MESSAGE_BYTES = 2**26
"""Bytes of a message without its buffers. Checked before they are allocated."""
PACKET_BYTES = 256
"""gloo must know the size of what it receives before it comes, so every packet has this one. Most messages fit in;
others follow as bulk."""
INSTALL = "Install one stream_balancer everywhere"

_HEADER = struct.Struct("<8sQII")  # magic, packets seen, bytes of messages, CRC of the packet with this field 0
_INLINE_BYTES = PACKET_BYTES - _HEADER.size
_LENGTH = struct.Struct("<H")  # of a message in a packet
_MAGIC = b"strmbal\x03"


class Pending(Protocol):
    """A posted operation. Must be kept until the peer is known to have what was sent."""

    def wait(self) -> None:
        """Block until done, for ever if need be. Raises RuntimeError if the pair broke."""
        ...


class Pair(Protocol):
    """Two processes, joined. Messages arrive in the order they were sent. Safe to use from any thread."""

    def send(self, tensor: Tensor) -> object:
        """Post a send; keep the result until the peer has it. Raises RuntimeError if the pair is broken."""
        ...

    def receive(self, tensor: Tensor) -> Pending:
        """Post a receive of exactly ``tensor.nbytes``."""
        ...

    def poison(self) -> None:
        """Break the pair: every queued receive ends with an error, here and at the peer."""
        ...

    def wait_broken(self, timeout_s: float) -> None:
        """Wait until the peer has broken the pair; after so long, break it."""
        ...


class _Sent(NamedTuple):
    """What must live until the peer has seen a packet."""

    packet: int
    """Its number."""
    keep: list[object]
    then: Sequence[Callable[[], object]]
    """To be called then."""


class Packets:
    """Both directions of one pair. One thread receives, one sends. Raises OSError once the pair is broken."""

    def __init__(self, pair: Pair, on_packet: Callable[[], object]) -> None:
        """``on_packet`` is called for every packet that arrives: a sign that the peer lives."""
        self._pair, self._on_packet = pair, on_packet
        self._incoming = torch.zeros(PACKET_BYTES, dtype=torch.uint8)
        self._received = 0  # packets
        self._acted_on = 0  # packets received, all of whose messages were acted on
        self._bulk_received = False  # since acted()
        self._to_confirm = 0  # the peer keeps memory until it hears that so many packets were acted on ...
        self._confirmed = 0  # ... and has heard of so many
        self._ledger: deque[_Sent] = deque()
        self.sent = 0
        """Packets: the number of the last one."""

    def poison(self) -> None:
        """Break the pair, at both ends. From any thread."""
        self._pair.poison()

    def wait_broken(self, timeout_s: float) -> None:
        """Wait until the peer has broken the pair, or is gone; after so long, break it. Nothing is received any
        more."""
        self._pair.wait_broken(timeout_s)

    # receiving

    def receive(self) -> Iterator[bytes | memoryview]:
        """The messages of the next packet; none if it is a sign of life. Call :meth:`acted` once they were acted on."""
        size, inline = self._receive_packet()
        if size > _INLINE_BYTES:
            large = torch.empty(size, dtype=torch.uint8)
            self.receive_bulk([large])
            yield large.numpy().data
        while inline:
            length = _LENGTH.unpack_from(inline)[0] if len(inline) >= _LENGTH.size else 0
            raw, inline = inline[_LENGTH.size : _LENGTH.size + length], inline[_LENGTH.size + length :]
            if not 0 < length == len(raw):
                raise WireError(f"a packet whose messages have impossible lengths. {INSTALL}")
            yield raw

    def receive_bulk(self, targets: Sequence[Tensor]) -> None:
        """Fill ``targets``, ``[n]`` uint8 each, with the bulk behind the message that came last."""
        posted = [_or_lost(self._pair.receive, piece) for target in targets for piece in _pieces(target)]
        if self._receive_packet()[0]:  # behind it on the same tag: once it is here, so is the bulk
            raise WireError(f"bulk was followed by a message, not by an empty packet. {INSTALL}")
        for piece in posted:
            _or_lost(piece.wait)
        self._bulk_received = True

    def acted(self, *, confirm: bool = False) -> bool:
        """All that has arrived was acted on, so the peer may let go of what it kept for it. True if it shall hear that
        now: it sent bulk, which is much memory. ``confirm``: let it hear in any case."""
        self._acted_on = self._received
        if not (self._bulk_received or confirm):
            return False
        self._bulk_received = False
        # Not earlier, or the writer sends empty packets one after the other until there is something to confirm.
        self._to_confirm = self._acted_on
        return True

    def _receive_packet(self) -> tuple[int, bytes]:
        """Bytes of messages, and those bytes if they are in the packet. Drops what the peer has seen."""
        _or_lost(_or_lost(self._pair.receive, self._incoming).wait)
        raw = bytearray(self._incoming.numpy().data)
        magic, seen, size, crc = _HEADER.unpack_from(raw)
        _HEADER.pack_into(raw, 0, magic, seen, size, 0)
        if magic != _MAGIC or zlib.crc32(raw) != crc:
            raise WireError(f"not a packet of this protocol, or damaged on its way. {INSTALL}")
        if seen > self.sent or size > MAX_MESSAGE_BYTES:
            raise WireError(f"a packet that has seen {seen} of {self.sent}, and announces {size} bytes. {INSTALL}")
        self._received += 1
        self._on_packet()
        self._let_go(seen)
        return size, bytes(raw[_HEADER.size : _HEADER.size + size]) if size <= _INLINE_BYTES else b""

    # sending

    @property
    def must_confirm(self) -> bool:
        """Whether the peer waits to hear that its bulk has arrived: any packet says so."""
        return self._confirmed < self._to_confirm

    @property
    def all_seen(self) -> bool:
        """Whether the peer has acted on everything that was sent."""
        return not self._ledger

    def was_seen(self, number: int) -> bool:
        """Whether the peer has acted on packet ``number``, and on all before it."""
        return not (self._ledger and self._ledger[0].packet <= number)

    def send(
        self, messages: bytes | bytearray, keep: Sequence[object] = (), then: Sequence[Callable[[], object]] = ()
    ) -> None:
        """A packet. ``keep``, and bulk posted before it, is dropped once the peer has seen it; ``then`` is called."""
        self._send_sized(len(messages), messages, keep, then)

    def send_large(self, raw: bytes) -> None:
        """A message that does not fit into a packet."""
        if len(raw) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(raw)} bytes; at most {MAX_MESSAGE_BYTES} can be sent")
        self._send_sized(len(raw), b"", (), ())
        large = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        self.send(b"", [large, *(self.post(piece) for piece in _pieces(large))])

    def post(self, piece: Tensor) -> object:
        """Send bulk; what is returned must be kept until the packet behind it was seen."""
        return _or_lost(self._pair.send, piece)

    def let_go_of_all(self) -> None:
        """The peer is gone: nothing needs to be kept for it."""
        self._let_go(self.sent)

    def _send_sized(
        self, size: int, messages: bytes | bytearray, keep: Sequence[object], then: Sequence[Callable[[], object]]
    ) -> None:
        raw = bytearray(PACKET_BYTES)
        raw[_HEADER.size : _HEADER.size + len(messages)] = messages
        seen = self._acted_on  # read once: the receiving thread may move it on meanwhile
        _HEADER.pack_into(raw, 0, _MAGIC, seen, size, 0)
        _HEADER.pack_into(raw, 0, _MAGIC, seen, size, zlib.crc32(raw))
        packet = torch.frombuffer(raw, dtype=torch.uint8)
        self.sent += 1
        kept: list[object] = [packet, *keep]
        self._ledger.append(_Sent(self.sent, kept, then))  # before the send: the peer may answer first
        kept.append(self.post(packet))
        self._confirmed = seen

    def _let_go(self, seen: int) -> None:
        while self._ledger and self._ledger[0].packet <= seen:
            for then in self._ledger.popleft().then:
                then()


class Packet:
    """Small messages that will travel together."""

    def __init__(self, packets: Packets) -> None:
        self._packets = packets
        self._messages = bytearray()
        self._keep: list[object] = []

    def add(self, raw: bytes, keep: Sequence[object] = ()) -> None:
        """One more message; those that do not fit beside it are sent. ``keep`` lives until the peer has acted on it."""
        if len(self._messages) + _LENGTH.size + len(raw) > _INLINE_BYTES:
            self.flush()
        if _LENGTH.size + len(raw) > _INLINE_BYTES:
            self._packets.send_large(raw)
            return
        self._messages += _LENGTH.pack(len(raw)) + raw
        self._keep += keep

    def flush(self) -> None:
        """Send them, if there are any."""
        if self._messages:
            messages, self._messages = self._messages, bytearray()
            keep, self._keep = self._keep, []
            self._packets.send(messages, keep)


def _pieces(tensor: Tensor) -> list[Tensor]:
    """Views of ``[n]`` uint8, of ``CHUNK_BYTES`` each, the last one shorter."""
    return [tensor[at : at + CHUNK_BYTES] for at in range(0, tensor.numel(), CHUNK_BYTES)]


def _or_lost(call: Callable[..., T], *args: Tensor) -> T:
    """All calls of a pair raise RuntimeError once it is broken, those that only post included."""
    try:
        return call(*args)
    except RuntimeError as error:
        raise ConnectionResetError(_short(error)) from error


def _short(error: BaseException) -> str:
    """gloo's error in a few words."""
    text = str(error)
    for known in ("Connection closed by peer", "Connection reset by peer", "Application timeout caused pair closure"):
        if known in text:
            return known.lower()
    return text.split("\n", 1)[0][:200] or type(error).__name__
