"""A channel over a gloo pair: a thread that reads packets, a thread that writes them, and how both always end.

::

    reader thread   connect, then wait for the peer's next packet   woken by: a packet, the peer's death, poison
    writer thread   wait for something to send                      woken by: send(), close(), every keepalive_s

    packet   256 bytes, always: magic | packets seen | size | checksum | messages that fit, each behind its length
    bulk     a message that does not fit, or the buffers behind one; then an empty packet on the same tag

A receive that is shorter than its message aborts a gloo process, so packets have one size, and sizes come before bytes.
No wait ever expires: in gloo an expired wait breaks the pair, and a peer that is merely slow must not be cut off. Two
facts about gloo make that possible (``tests/dist`` holds them):

* A receive that has no bytes yet is woken at once by the peer's death and by poison; a transfer cut in the middle is
  not. So bulk is posted, but only ever waited for once the empty packet *behind* it on the same tag has arrived.
* A send is complete when the peer says so in its own packets (``seen``), so nobody waits for sends at all; what they
  need is kept in a ledger until then.

Several small messages share a packet, because every packet wakes the peer. Not here: what messages mean (the sessions),
how the two ends meet (``pair``).
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import struct
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from multiprocessing.util import Finalize
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from stream_balancer.errors import WireError
from stream_balancer.transport.buffers import SlabPool
from stream_balancer.transport.channel import Channel, Outgoing, PeerClosed, Receiver, Sendable, Source
from stream_balancer.transport.gloo.shared_memory import SharedSlabs, SharedViews, available
from stream_balancer.wire.messages import (
    Close,
    MapBuffer,
    Message,
    ProbeMemory,
    ProbeResult,
    ReleaseBuffers,
    SharedBuffers,
    decode_message,
    encode_message,
)

__all__ = ["CHUNK_BYTES", "GlooChannel", "LinkOptions", "Pair", "Pending"]

CHUNK_BYTES = 16 * 2**20
"""Bulk travels in pieces of this size: packing one overlaps with sending the one before."""
MAX_MESSAGE_BYTES = 2**26
PACKET_BYTES = 256
_HEADER = struct.Struct("<8sQII")  # magic, packets seen, bytes of messages, CRC of the packet with this field 0
_INLINE_BYTES = PACKET_BYTES - _HEADER.size
_LENGTH = struct.Struct("<H")  # of a message in a packet
_MAGIC = b"strmbal\x03"

logger = logging.getLogger("stream_balancer.transport")


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


class LinkOptions(NamedTuple):
    """What a user may set of a link between processes."""

    keepalive_s: float = 10.0
    """How often an idle end says that it lives; after three times that without a word the peer is reported stalled."""
    linger_s: float = 5.0
    """How long a closing end waits for the other's answer."""
    narrow: bool = True
    """int64 columns travel as int32 where the values fit."""
    shared_memory: bool = True
    """Buffers are read where they were packed, if both ends are on one machine."""


class _Sent(NamedTuple):
    """What must live until the peer has seen a packet."""

    packet: int
    """Its number."""
    keep: list[object]
    then: Sequence[Callable[[], object]]
    """To be called then."""


class GlooChannel(Channel):
    """One end of a pair."""

    threads = True

    def __init__(
        self,
        name: str,
        connect: Callable[[], Pair],
        cancel: Callable[[], object],
        options: LinkOptions,
        *,
        pool: SlabPool,
        offer: int | None = None,
    ) -> None:
        """``name``: of its threads. ``connect`` builds the pair, in the reader thread; ``cancel``, from any thread,
        makes it raise. ``pool``: where buffers are packed. ``offer``: this end packs batches, and keeps so many idle
        buffers of shared memory for them; None: it maps what the peer offers."""
        self._name, self._connect, self._cancel = name, connect, cancel
        self.options, self._pool = options, pool
        self._packs_batches = offer is not None
        self._receiver: Receiver
        self._changed = threading.Condition(threading.Lock())
        self._outbox: deque[Sendable] = deque()
        self._pair: Pair | None = None
        self._aborting = self._over = False  # over: the reader has ended
        self._close_queued = self._peer_has_closed = False
        self._close_packet: int | None = None  # its number, once Close was written
        self._give_up_at = math.inf  # from then on
        self._failure: Exception | None = None  # of the writer; the reader passes it on
        self._received = self._seen = self._sent = 0  # packets; seen: received, and all that is in them was acted on
        self._seen_told = self._seen_owed = 0  # the peer knows that so many were seen, and waits to hear of so many
        self._bulk_received = False  # since the last packet
        self._ledger: deque[_Sent] = deque()
        self._heard_at = time.monotonic()
        self._stalled = False
        self._offered = _offered(offer) if options.shared_memory and offer is not None else None
        self._sharing = None if self._offered else False  # None: the peer has not answered yet
        self._views = SharedViews(self._on_freed)
        self._freed: deque[int] = deque()
        self._shared: tuple[int, ...] = ()  # where the buffers of the next message lie
        self._reader = threading.Thread(target=self._read_all, name=f"{name}-reader", daemon=True)
        self._writer = threading.Thread(target=self._write_all, name=f"{name}-writer", daemon=True)

    # Channel: from any thread

    @property
    def narrow(self) -> bool:
        """Whether fewer bytes are cheaper here."""
        return self.options.narrow and not self._sharing

    @property
    def shares_memory(self) -> bool:
        """Whether buffers go through shared memory: the peer runs on this machine and may map it."""
        return bool(self._sharing)

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        _end_all_when_this_process_ends()
        _OPEN.add(self)
        self._reader.start()

    def send(self, item: Sendable) -> None:
        with self._changed:
            if not (self._close_queued or self._over):
                self._outbox.append(item)
                self._changed.notify_all()

    def close(self, reason: str = "") -> None:
        with self._changed:
            if not (self._close_queued or self._over):
                self._outbox.append(Outgoing(Close(reason)))
                self._close_queued = True
                self._changed.notify_all()

    def wait_closed(self, timeout_s: float) -> None:
        """Does not wait for a peer that was never there."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._pair is None, timeout_s)

    def abort(self) -> None:
        with self._changed:
            self._aborting = self._close_queued = True
            self._changed.notify_all()
        if self._pair is None:
            self._cancel()
        self._break()
        for thread in (self._reader, self._writer):
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join()
        self._pair = None
        self._let_go(self._sent)
        self._outbox.clear()
        if self._offered is not None:
            self._offered.close()
        _OPEN.discard(self)

    def _break(self) -> None:
        pair = self._pair
        if pair is not None:
            pair.poison()

    def _end_with_the_process(self) -> None:
        """Nobody has closed it. Let what a rank acknowledged last arrive."""
        if not self._packs_batches and (self._close_queued or self._outbox or self._ledger):
            self.close()
            self.wait_closed(self.options.linger_s)
        self.abort()

    # reading

    def _read_all(self) -> None:
        try:
            pair = self._connect()
            with self._changed:
                self._pair = pair
                if self._offered is not None:
                    self._outbox.appendleft(Outgoing(self._offered.probe()))
                aborting = self._aborting
            if not aborting:
                self._heard_at = time.monotonic()
                self._writer.start()
                self._read(pair)
        except Exception as error:  # noqa: BLE001 - gloo, stores and receivers raise errors of many kinds; all end it
            reason = self._failure or error
            self._break()  # so that the peer learns at once that nobody reads any more
            if not self._aborting:
                self._receiver.ended(reason)
        finally:
            self._let_go(self._sent)
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _read(self, pair: Pair) -> None:
        packet = torch.zeros(PACKET_BYTES, dtype=torch.uint8)
        while True:
            for raw in self._receive_messages(pair, packet):
                sizes, message = decode_message(raw)
                if self._failure is not None:
                    raise self._failure
                if isinstance(message, Close):
                    self._on_close(pair, packet, message.reason)
                    return
                if not self._is_control(message):
                    self._receiver.receive(message, self._receive_buffers(pair, packet, message, sizes), ())
                del message, raw  # waiting for the next must not keep it alive
            self._acknowledge()  # not before all that is in the packet was acted on: the peer lets go of what it kept

    def _receive_messages(self, pair: Pair, packet: Tensor) -> Iterator[bytes | memoryview]:
        """The messages of the next packet; none if it is a sign of life."""
        size, inline = self._receive_packet(pair, packet)
        if size > _INLINE_BYTES:
            large = torch.empty(size, dtype=torch.uint8)
            self._receive_bulk(pair, packet, [large])
            yield large.numpy().data
        while inline:
            length = _LENGTH.unpack_from(inline)[0] if len(inline) >= _LENGTH.size else 0
            raw, inline = inline[_LENGTH.size : _LENGTH.size + length], inline[_LENGTH.size + length :]
            if not 0 < length == len(raw):
                raise WireError(f"a packet whose messages have impossible lengths. {_INSTALL}")
            yield raw

    def _receive_packet(self, pair: Pair, packet: Tensor) -> tuple[int, bytes]:
        """Bytes of messages, and those bytes if they are in the packet. Drops what the peer has seen."""
        _wait(pair.receive(packet))
        raw = bytearray(packet.numpy().data)
        magic, seen, size, crc = _HEADER.unpack_from(raw)
        _HEADER.pack_into(raw, 0, magic, seen, size, 0)
        if magic != _MAGIC or zlib.crc32(raw) != crc:
            raise WireError(f"not a packet of this protocol, or damaged on its way. {_INSTALL}")
        if seen > self._sent or size > MAX_MESSAGE_BYTES:
            raise WireError(f"a packet that has seen {seen} of {self._sent}, and announces {size} bytes. {_INSTALL}")
        self._received += 1
        self._heard_at = time.monotonic()
        if self._stalled:
            self._stalled = False
            self._receiver.stalled(0.0)
        self._let_go(seen)
        return size, bytes(raw[_HEADER.size : _HEADER.size + size]) if size <= _INLINE_BYTES else b""

    def _receive_bulk(self, pair: Pair, packet: Tensor, targets: Sequence[Tensor]) -> None:
        posted = [pair.receive(piece) for target in targets for piece in _pieces(target)]
        if self._receive_packet(pair, packet)[0]:  # behind it on the same tag: once it is here, so is the bulk
            raise WireError(f"bulk was followed by a message, not by an empty packet. {_INSTALL}")
        for piece in posted:
            _wait(piece)
        self._bulk_received = True

    def _receive_buffers(
        self, pair: Pair, packet: Tensor, message: Message, sizes: tuple[int, ...]
    ) -> Sequence[Tensor]:
        wanted = self._receiver.admit(message, sizes)
        if self._shared:
            numbers, self._shared = self._shared, ()
            if len(numbers) != len(sizes):
                raise WireError(f"{len(sizes)} buffers in {len(numbers)} of shared memory. {_INSTALL}")
            return [self._views.lend(number, size) for number, size in zip(numbers, wanted, strict=True)]
        targets = [self._receiver.allocate(size) for size in wanted]
        if targets:
            self._receive_bulk(pair, packet, [target[:size] for target, size in zip(targets, sizes, strict=True)])
        return targets

    def _acknowledge(self) -> None:
        """The peer keeps the memory of bulk until it hears that it was received: in whatever is sent next, or now."""
        with self._changed:
            self._seen = self._received
            if self._bulk_received:
                self._bulk_received = False
                self._seen_owed = self._seen  # not earlier: the writer would send empty packets until it may say so
                self._changed.notify_all()

    def _let_go(self, seen: int) -> None:
        while self._ledger and self._ledger[0].packet <= seen:
            for then in self._ledger.popleft().then:
                then()

    def _on_close(self, pair: Pair, packet: Tensor, reason: str) -> None:
        """Answer, or have the answer: who closed first hangs up, the other one waits for that."""
        self._receiver.ended(PeerClosed(reason))
        was_first = self._close_queued
        self.close()
        with self._changed:
            self._peer_has_closed = True
            self._changed.notify_all()
        with suppress(OSError, WireError):
            while not (was_first and self._close_was_seen):
                self._bulk_received = True
                self._acknowledge()
                self._receive_packet(pair, packet)
        self._break()

    # writing

    def _write_all(self) -> None:
        try:
            while self._wait_for_work():
                if not self._write_what_there_is():
                    self._send_packet(b"")
                    self._check_silence(time.monotonic() - self._heard_at)
        except ConnectionError:
            pass  # the reader sees it too, behind what has arrived
        except Exception as error:  # noqa: BLE001 - as in _read_all; also what a bad batch raises while it is packed
            self._failure = error
            self._break()

    def _wait_for_work(self) -> bool:
        """Until there is something to send, or a sign of life is due. False if all is over."""
        with self._changed:
            left_s = self._give_up_at - time.monotonic()
            if not (self._has_item or self._seen_told < self._seen_owed or self._is_done):
                self._changed.wait(max(min(self.options.keepalive_s, left_s), 0.0))
        if time.monotonic() >= self._give_up_at:
            raise TimeoutError(f"no answer to the close within linger_s={self.options.linger_s}")
        return not self._is_done

    @property
    def _close_was_seen(self) -> bool:
        return self._close_packet is not None and not (self._ledger and self._ledger[0].packet <= self._close_packet)

    @property
    def _is_done(self) -> bool:
        return self._aborting or self._over

    def _write_what_there_is(self) -> bool:
        """Everything in the outbox, small messages together. False if there was nothing."""
        packet = _Packet(self)
        wrote = False
        while (item := self._next_item()) is not None:
            outgoing = item(self) if callable(item) else item
            if outgoing is not None:
                self._write(outgoing, packet)
                wrote = True
            del item, outgoing  # waiting for the next one must not keep this one alive
        packet.flush()
        return wrote

    def _next_item(self) -> Sendable | None:
        with self._changed:
            if self._freed:
                numbers = [self._freed.popleft() for _ in range(len(self._freed))]
                return Outgoing(ReleaseBuffers(tuple(numbers)))
            return self._outbox.popleft() if self._has_item and not self._is_done else None

    @property
    def _has_item(self) -> bool:
        """Something can be sent; the lock is held. What a batch becomes depends on whether memory is shared: it waits
        for the peer's answer to that."""
        if self._freed:
            return True
        if not self._outbox:
            return False
        first = self._outbox[0]
        return self._sharing is not None or self._peer_has_closed or not (callable(first) or first.sources)

    def _write(self, outgoing: Outgoing, packet: _Packet) -> None:
        message, sources = outgoing.message, outgoing.sources
        sizes = tuple(source.size for source in sources)
        keep: list[object] = []
        shared = self._fill_shared(message, sources, packet, keep) if sources and self._sharing else False
        packet.add(encode_message(message, sizes), keep)
        if shared or not sources:
            for source in sources:
                if source.sent is not None:
                    source.sent()
        else:
            packet.flush()
            works = [work for source in sources for work in self._send_bulk(source)]
            self._send_packet(b"", works, [source.sent for source in sources if source.sent is not None])
        if isinstance(message, Close):
            packet.flush()
            self._close_packet = self._sent
            self._give_up_at = time.monotonic() + self.options.linger_s

    def _fill_shared(self, message: Message, sources: Sequence[Source], packet: _Packet, keep: list[object]) -> bool:
        """Write the buffers into shared memory. False, having sent nothing of them, if there is none left."""
        assert self._offered is not None
        numbers = []
        try:
            for source in sources:
                lent = self._offered.lend(source.size)
                numbers.append(lent.number)
                for news in lent.news:
                    packet.add(encode_message(news), [lent.keep])
                deque(source.fill(lent.memory), maxlen=0)
        except OSError as error:
            for number in numbers:
                self._offered.give_back(number)
            logger.warning("%s: no shared memory for %s, sent by socket: %s", self._name, message, error)
            return False
        packet.add(encode_message(SharedBuffers(tuple(numbers))))
        return True

    def _send_bulk(self, source: Source) -> Iterator[object]:
        """Post each piece as soon as its bytes are final; yields what must be kept."""
        pieces = [] if source.pieces is None else source.pieces()
        if len(pieces) == 1:
            buffer, fill = pieces[0], iter([source.size])
        else:
            buffer = self._pool.lend(source.size)
            fill = source.fill(buffer)
        yield buffer
        sent = 0
        for final in fill:
            while sent < source.size and (final == source.size or sent + CHUNK_BYTES <= final):
                piece = buffer[sent : min(sent + CHUNK_BYTES, source.size)]
                yield self._post(piece)
                sent += piece.numel()
        if sent < source.size:
            raise ValueError(f"a source of {source.size} bytes wrote {sent}")

    def _send_packet(
        self, messages: bytes | bytearray, keep: Sequence[object] = (), then: Sequence[Callable[[], object]] = ()
    ) -> None:
        """``keep``, and bulk sent before it, is dropped once the peer has seen it."""
        self._send_sized(len(messages), messages, keep, then)

    def _send_sized(
        self, size: int, messages: bytes | bytearray, keep: Sequence[object], then: Sequence[Callable[[], object]]
    ) -> None:
        raw = bytearray(PACKET_BYTES)
        raw[_HEADER.size : _HEADER.size + len(messages)] = messages
        seen = self._seen
        _HEADER.pack_into(raw, 0, _MAGIC, seen, size, 0)
        _HEADER.pack_into(raw, 0, _MAGIC, seen, size, zlib.crc32(raw))
        packet = torch.frombuffer(raw, dtype=torch.uint8)
        self._sent += 1
        kept: list[object] = [packet, *keep]
        self._ledger.append(_Sent(self._sent, kept, then))  # before the send: the peer may answer first
        kept.append(self._post(packet))
        self._seen_told = seen

    def _send_large(self, raw: bytes) -> None:
        """A message that does not fit into a packet."""
        if len(raw) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(raw)} bytes; at most {MAX_MESSAGE_BYTES} can be sent")
        self._send_sized(len(raw), b"", (), ())
        large = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        self._send_packet(b"", [large, *(self._post(piece) for piece in _pieces(large))])

    def _post(self, tensor: Tensor) -> object:
        pair = self._pair
        if pair is None:
            raise ConnectionAbortedError("the connection was closed here")
        try:
            return pair.send(tensor)
        except RuntimeError as error:
            raise ConnectionResetError(_short(error)) from error

    def _check_silence(self, seconds: float) -> None:
        if seconds > 3 * self.options.keepalive_s:
            self._stalled = True
            self._receiver.stalled(seconds)

    # shared memory

    def _is_control(self, message: Message) -> bool:
        """Whether it was the channel's own business, and is done."""
        match message:
            case ProbeMemory() if not self._packs_batches:
                self.send(Outgoing(ProbeResult(self.options.shared_memory and self._views.probe(message))))
            case ProbeResult() if self._offered is not None:
                with self._changed:
                    self._sharing = message.ok
                    self._changed.notify_all()
            case MapBuffer() if not self._packs_batches:
                self._views.announce(message)
            case SharedBuffers() if not self._packs_batches:
                self._shared = message.numbers
            case ReleaseBuffers() if self._offered is not None:
                for number in message.numbers:
                    self._offered.give_back(number)
            case _:
                return False
        return True

    def _on_freed(self, number: int) -> None:
        """Runs wherever the last view of a buffer dies, perhaps inside a garbage collection in the middle of send(): so
        it does not wait for the lock. If somebody has it, the number goes with the next packet."""
        self._freed.append(number)
        if self._changed.acquire(blocking=False):
            self._changed.notify_all()
            self._changed.release()


class _Packet:
    """Small messages that will travel together."""

    def __init__(self, channel: GlooChannel) -> None:
        self._channel = channel
        self._messages = bytearray()
        self._keep: list[object] = []

    def add(self, raw: bytes, keep: Sequence[object] = ()) -> None:
        """One more message; those that do not fit beside it are sent."""
        if len(self._messages) + _LENGTH.size + len(raw) > _INLINE_BYTES:
            self.flush()
        if _LENGTH.size + len(raw) > _INLINE_BYTES:
            self._channel._send_large(raw)
            return
        self._messages += _LENGTH.pack(len(raw)) + raw
        self._keep += keep

    def flush(self) -> None:
        """Send them, if there are any."""
        if self._messages:
            messages, self._messages = self._messages, bytearray()
            keep, self._keep = self._keep, []
            self._channel._send_packet(messages, keep)


_INSTALL = "Install one stream_balancer everywhere"


def _offered(keep: int) -> SharedSlabs | None:
    if available():
        with suppress(OSError):
            return SharedSlabs(keep)
    return None


def _pieces(tensor: Tensor) -> list[Tensor]:
    """Views of ``[n]`` uint8, of ``CHUNK_BYTES`` each, the last one shorter."""
    return [tensor[at : at + CHUNK_BYTES] for at in range(0, tensor.numel(), CHUNK_BYTES)]


def _wait(pending: Pending) -> None:
    try:
        pending.wait()
    except RuntimeError as error:
        raise ConnectionResetError(_short(error)) from error


def _short(error: BaseException) -> str:
    """gloo's error in a few words."""
    text = str(error)
    for known in ("Connection closed by peer", "Connection reset by peer", "Application timeout caused pair closure"):
        if known in text:
            return known.lower()
    return text.split("\n", 1)[0][:200] or type(error).__name__


# --- the end of the process -------------------------------------------------------------------------------------------

_OPEN: weakref.WeakSet[GlooChannel] = weakref.WeakSet()


@lru_cache(1)
def _end_all_when_this_process_ends() -> None:
    """A thread inside gloo while the interpreter goes away would end the process with SIGABRT, so wake and join them
    all; and what a rank acknowledged last shall arrive.

    multiprocessing ends its children without running ``atexit``, but runs what is registered with itself; a child
    forgets what its parent registered.
    """
    Finalize(None, _end_all, exitpriority=0)


def _end_all() -> None:
    for channel in list(_OPEN):
        channel._end_with_the_process()


def _forget_the_parents() -> None:
    _OPEN.clear()  # its channels, whose threads are not in this process
    _end_all_when_this_process_ends.cache_clear()


atexit.register(_end_all)  # before multiprocessing's own, where both run: it is idempotent
os.register_at_fork(after_in_child=_forget_the_parents)
