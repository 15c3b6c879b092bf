"""A channel over a gloo pair: a thread that reads packets, a thread that writes them, and how both always end.

::

    reader thread   connect, then wait for the peer's next packet   woken by: a packet, the peer's death, poison
    writer thread   wait for something to send                      woken by: send(), close(), every keepalive_s

Not here: what a packet is and why no wait expires (``packets``), buffers in shared memory (``sharing``), what messages
mean (the sessions), how the two ends meet (``pair``).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from torch import Tensor

from stream_balancer.errors import WireError
from stream_balancer.transport.buffers import BufferPool
from stream_balancer.transport.channel import Channel, Outgoing, PeerClosed, Receiver, Sendable, Source, refusal
from stream_balancer.transport.gloo.packets import CHUNK_BYTES, Packet, Packets, Pair
from stream_balancer.transport.gloo.process_end import end_with_the_process, has_ended
from stream_balancer.transport.gloo.sharing import Maps, Offers, offers_or_none
from stream_balancer.wire.messages import Close, Message, decode_message, encode_message

__all__ = ["GlooChannel", "LinkOptions"]

_REFUSAL_S = 1.0  # for the peer to read why it is refused; it reads all the time

logger = logging.getLogger("stream_balancer.transport")


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
        pool: BufferPool,
        offer: int | None = None,
    ) -> None:
        """``name``: of its threads. ``connect`` builds the pair, in the reader thread; ``cancel``, from any thread,
        makes it raise. ``pool``: where buffers are packed. ``offer``: this end packs batches, and keeps so many idle
        buffers of shared memory for them; None: it maps what the peer offers."""
        self._name, self._connect, self._cancel = name, connect, cancel
        self.options, self._pool = options, pool
        self._receiver: Receiver
        self._changed = threading.Condition(threading.Lock())
        self._outbox: deque[Sendable] = deque()
        self._packets: Packets | None = None  # once connected
        self._aborting = self._over = False  # over: the reader has ended
        self._close_queued = self._peer_has_closed = False
        self._close_packet: int | None = None  # its number, once Close was written
        self._give_up_at = math.inf  # from then on
        self._failure: Exception | None = None  # of the writer; the reader passes it on
        self._heard_at = time.monotonic()
        self._stalled = False
        self._offers: Offers | None = None  # at most one of the two
        self._maps: Maps | None = None
        if offer is None:
            self._maps = Maps(self.send, self._wake_if_possible, allowed=options.shared_memory)
        elif options.shared_memory:
            self._offers = offers_or_none(offer, self._wake)
        self._reader = threading.Thread(target=self._read_all, name=f"{name}-reader", daemon=True)
        self._writer = threading.Thread(target=self._write_all, name=f"{name}-writer", daemon=True)

    # Channel: from any thread

    @property
    def narrow(self) -> bool:
        """Whether fewer bytes are cheaper here."""
        return self.options.narrow and not self.shares_memory

    @property
    def shares_memory(self) -> bool:
        """Whether buffers go through shared memory: the peer runs on this machine and may map it."""
        return self._offers is not None and bool(self._offers.accepted)

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        end_with_the_process(self)
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
            self._changed.wait_for(lambda: self._over or self._packets is None, timeout_s)

    def abort(self) -> None:
        with self._changed:
            self._aborting = self._close_queued = True
            self._changed.notify_all()
        # Not connected yet: the reader waits in connect(), which only cancel() can end. Set before, `_aborting` stops a
        # reader that is just through with it.
        if self._packets is None:
            self._cancel()
        self._break()
        # Both end by themselves now: what they wait for was cancelled, poisoned or notified above.
        for thread in (self._reader, self._writer):
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join()
        packets, self._packets = self._packets, None
        if packets is not None:
            packets.let_go_of_all()
        self._outbox.clear()
        if self._offers is not None:
            self._offers.close()
        has_ended(self)

    def end_with_the_process(self) -> None:
        """Nobody has closed it. Let what a rank acknowledged last arrive."""
        packets = self._packets
        unheard = self._close_queued or self._outbox or (packets is not None and not packets.all_seen)
        if self._maps is not None and unheard:
            self.close()
            self.wait_closed(self.options.linger_s)
        self.abort()

    def _break(self) -> None:
        packets = self._packets
        if packets is not None:
            packets.poison()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _wake_if_possible(self) -> None:
        """From inside a garbage collection, perhaps in the middle of send(), so it does not wait for the lock. If
        somebody has it, what there is to send goes with the next packet."""
        if self._changed.acquire(blocking=False):
            self._changed.notify_all()
            self._changed.release()

    # reading

    def _read_all(self) -> None:
        packets = None
        try:
            packets = Packets(self._connect(), self._on_packet)
            with self._changed:
                self._packets = packets
                if self._offers is not None:
                    # In front: until the peer has answered the probe, no batch knows whether it goes through shared
                    # memory.
                    self._outbox.appendleft(Outgoing(self._offers.probe()))
                aborting = self._aborting
            if not aborting:
                self._heard_at = time.monotonic()
                self._writer.start()
                self._read(packets)
        except Exception as error:  # noqa: BLE001 - gloo, stores and receivers raise errors of many kinds; all end it
            # A writer that fails breaks the pair, which is what the reader then sees: the cause is the writer's.
            reason = self._failure or error
            if packets is not None:
                self._refuse(packets, reason)
            self._break()  # so that the peer learns at once that nobody reads any more
            if not self._aborting:
                self._receiver.ended(reason)
        finally:
            if packets is not None:
                packets.let_go_of_all()
            with self._changed:
                self._over = True
                self._changed.notify_all()
            if self._offers is not None:
                # The size of whole batches: nobody may abort() this channel before all is closed.
                if self._writer.ident is not None:
                    self._writer.join()
                self._offers.close()

    def _refuse(self, packets: Packets, error: Exception) -> None:
        """Let the peer know why it is refused, if that is so: it hangs up once it has read that."""
        refused = refusal(error)
        with self._changed:
            if refused is None or error is self._failure or self._aborting:
                return
            self._outbox.clear()
            self._outbox.append(Outgoing(refused))
            self._close_queued = True
            self._changed.notify_all()
        packets.wait_broken(_REFUSAL_S)

    def _read(self, packets: Packets) -> None:
        while True:
            for raw in packets.receive():
                sizes, message = decode_message(raw)
                if self._failure is not None:
                    raise self._failure
                if isinstance(message, Close):
                    self._on_close(packets, message.reason)
                    return
                if not self._is_control(message):
                    self._receiver.receive(message, self._receive_buffers(packets, message, sizes), ())
                del message, raw  # waiting for the next must not keep it alive
            self._acted(packets)

    def _receive_buffers(self, packets: Packets, message: Message, sizes: tuple[int, ...]) -> Sequence[Tensor]:
        wanted = self._receiver.admit(message, sizes)
        # The receiver is asked before anything is allocated: it refuses what is too large or was not due.
        mapped = None if self._maps is None else self._maps.buffers(wanted)
        if mapped is not None:
            return mapped
        targets = [self._receiver.allocate(size) for size in wanted]
        if targets:
            packets.receive_bulk([target[:size] for target, size in zip(targets, sizes, strict=True)])
        return targets

    def _is_control(self, message: Message) -> bool:
        """Whether it was the channel's own business, and is done."""
        memory = self._offers or self._maps
        return memory is not None and memory.handle(message)

    def _acted(self, packets: Packets, *, confirm: bool = False) -> None:
        with self._changed:
            if packets.acted(confirm=confirm):
                self._changed.notify_all()

    def _on_packet(self) -> None:
        self._heard_at = time.monotonic()
        if self._stalled:
            self._stalled = False
            self._receiver.stalled(0.0)

    def _on_close(self, packets: Packets, reason: str) -> None:
        """Answer, or have the answer: who closed first hangs up, the other one waits for that."""
        self._receiver.ended(PeerClosed(reason))
        was_first = self._close_queued
        self.close()
        with self._changed:
            self._peer_has_closed = True
            self._changed.notify_all()
        with suppress(OSError, WireError):
            while not (was_first and self._close_packet is not None and packets.was_seen(self._close_packet)):
                self._acted(packets, confirm=True)
                deque(packets.receive(), maxlen=0)
        self._break()

    # writing

    def _write_all(self) -> None:
        packets = self._packets
        assert packets is not None
        try:
            while self._wait_for_work(packets):
                if not self._write_what_there_is(packets):
                    packets.send(b"")
                    self._check_silence(time.monotonic() - self._heard_at)
        except ConnectionError:
            pass  # the reader sees it too, behind what has arrived
        except Exception as error:  # noqa: BLE001 - as in _read_all; also what a bad batch raises while it is packed
            self._failure = error
            self._break()

    def _wait_for_work(self, packets: Packets) -> bool:
        """Until there is something to send, or a sign of life is due. False if all is over."""
        with self._changed:
            left_s = self._give_up_at - time.monotonic()
            if not (self._has_item or packets.must_confirm or self._is_done):
                self._changed.wait(max(min(self.options.keepalive_s, left_s), 0.0))
        if time.monotonic() >= self._give_up_at:
            raise TimeoutError(f"no answer to the close within linger_s={self.options.linger_s}")
        return not self._is_done

    @property
    def _is_done(self) -> bool:
        return self._aborting or self._over

    def _write_what_there_is(self, packets: Packets) -> bool:
        """Everything in the outbox, small messages together. False if there was nothing."""
        packet = Packet(packets)
        wrote = False
        while (item := self._next_item()) is not None:
            # A callable is an item that is made when its turn comes: of several reports that wait, the last says all.
            outgoing = item(self) if callable(item) else item
            if outgoing is not None:
                self._write(outgoing, packets, packet)
                wrote = True
            del item, outgoing  # waiting for the next one must not keep this one alive
        packet.flush()
        return wrote

    def _next_item(self) -> Sendable | None:
        with self._changed:
            if self._maps is not None and self._maps.must_release:
                return Outgoing(self._maps.release())
            return self._outbox.popleft() if self._has_item and not self._is_done else None

    @property
    def _has_item(self) -> bool:
        """Something can be sent; the lock is held."""
        if self._maps is not None and self._maps.must_release:
            return True
        if not self._outbox:
            return False
        first = self._outbox[0]
        if callable(first) or first.sources:  # what a batch becomes depends on whether memory is shared
            return self._offers is None or self._offers.accepted is not None or self._peer_has_closed
        return True

    def _write(self, outgoing: Outgoing, packets: Packets, packet: Packet) -> None:
        message, sources = outgoing.message, outgoing.sources
        in_memory = not sources or self._fill_shared(message, sources, packet)
        packet.add(encode_message(message, tuple(source.size for source in sources)))
        called = [source.sent for source in sources if source.sent is not None]
        if in_memory:
            for sent in called:
                sent()
        else:
            packet.flush()
            works = [work for source in sources for work in self._send_bulk(source, packets)]
            packets.send(b"", works, called)
        if isinstance(message, Close):
            packet.flush()
            self._close_packet = packets.sent
            self._give_up_at = time.monotonic() + self.options.linger_s

    def _fill_shared(self, message: Message, sources: Sequence[Source], packet: Packet) -> bool:
        """Write the buffers into shared memory; False if there is none, or none left."""
        if self._offers is None or not self._offers.accepted:
            return False
        try:
            self._offers.fill(sources, packet)
        except OSError as error:
            logger.warning("%s: no shared memory for %s, sent by socket: %s", self._name, message, error)
            return False
        return True

    def _send_bulk(self, source: Source, packets: Packets) -> Iterator[object]:
        """Post each piece as soon as its bytes are final; yields what must be kept."""
        pieces = [] if source.pieces is None else source.pieces()
        if len(pieces) == 1:  # it lies there as it shall travel: no copy
            buffer, fill = pieces[0], iter([source.size])
        else:
            buffer = self._pool.lend(source.size)
            fill = source.fill(buffer)
        yield buffer
        sent = 0
        for final in fill:
            # Whole chunks as they fill; what is left over goes once all is final.
            while sent < source.size and (final == source.size or sent + CHUNK_BYTES <= final):
                piece = buffer[sent : min(sent + CHUNK_BYTES, source.size)]
                yield packets.post(piece)
                sent += piece.numel()
        if sent < source.size:
            raise ValueError(f"a source of {source.size} bytes wrote {sent}")

    def _check_silence(self, seconds: float) -> None:
        if seconds > 3 * self.options.keepalive_s:
            self._stalled = True
            self._receiver.stalled(seconds)
