"""Channels over TCP, any number of them on one hub's thread.

Small messages that wait together travel in one system call, and are read in one. A large buffer is sent from where it
lies (:attr:`~stream_balancer.transport.channel.Source.pieces`), and received into the place that its session allocates:
its tokens are copied by the system only. Each end releases the connection once it has closed and the peer has.
"""

from __future__ import annotations

import selectors
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from stream_balancer.errors import WireError
from stream_balancer.transport.channel import Channel, Outgoing, PeerClosed, Receiver, Sendable, Source, refusal
from stream_balancer.transport.sockets.framing import HEADER_BYTES, frame, read_header, read_message
from stream_balancer.transport.sockets.hub import Hub, Served, keep_alive
from stream_balancer.transport.threads import ThreadEvent
from stream_balancer.wire.messages import Close

__all__ = ["SocketChannel"]

# Read from one socket before the others, and replies, get their turn. With less, streams of large rollouts lose a
# quarter of their speed (bench/connect.py).
_TURN_BYTES = 4 * 2**20
_GATHER = 512  # pieces per sendmsg; the system's limit is 1024
_COPY_BYTES = 64 * 1024  # below that a dozen pieces cost more than their bytes


class _Piece(NamedTuple):
    """What is still to be sent, what keeps it alive, and what to call once it is sent."""

    view: memoryview
    keep: object
    sent: Callable[[], object] | None = None


class SocketChannel(Served, Channel):
    """One connection. The thread belongs to the hub, and ends with that."""

    threads = narrow = True

    def __init__(self, hub: Hub, sock: socket.socket) -> None:
        """``sock``: connected, and the handshake is over. It belongs to the channel from now on."""
        super().__init__(hub, sock)
        keep_alive(sock)
        self._receiver: Receiver
        self._items: deque[Sendable] = deque()
        self._pump_is_queued = False
        self._outgoing: deque[_Piece] = deque()
        self._started = self._closed = self._close_sent = self._end_reported = False
        self._finished = ThreadEvent()

    # from any thread

    def start(self, receiver: Receiver) -> None:
        self._receiver, self._started = receiver, True
        self.hub.do(self._begin)

    def send(self, item: Sendable) -> None:
        """Takes no lock, so finalizers may call it."""
        if self._closed:
            return
        self._items.append(item)
        if not self._pump_is_queued:
            self._pump_is_queued = True
            self.hub.do(self._pump)

    def close(self, reason: str = "") -> None:
        self.send(Outgoing(Close(reason)))
        self._closed = True

    def wait_closed(self, timeout_s: float) -> None:
        self._finished.wait(timeout_s)

    def abort(self) -> None:
        self._closed = True
        self.hub.do(lambda: self.fail(ConnectionAbortedError("closed on this side")))

    # in the hub's thread

    def _begin(self) -> None:
        self._parser = self._parse()
        self._space = next(self._parser)
        self.serve()
        self._pump()

    def _ready(self, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._guarded(self._write)
        if mask & selectors.EVENT_READ and self.open:
            self._guarded(self._read)

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except BlockingIOError:
            pass
        except Exception as error:  # noqa: BLE001 - the network's, or the session's: either way this one is over
            self._refuse(error)
            self.fail(error)

    def _refuse(self, error: Exception) -> None:
        """Let the peer know, if that is what it is. What the system does not take at once is lost with the rest."""
        refused = refusal(error)
        if refused is not None and self.open and not self._close_sent:
            self._close_sent = True
            raw = frame(refused)
            self._outgoing.append(_Piece(memoryview(raw), raw))
            with suppress(OSError):
                self._note_sent(self.sock.sendmsg([piece.view for piece in islice(self._outgoing, _GATHER)]))

    def _pump(self) -> None:
        # First of all: whoever sees it set has appended before this, and whoever does not queues another call. To look
        # whether the own item is the only one would not do: two threads that append at the same time both see two.
        self._pump_is_queued = False
        if self.open:
            self._guarded(self._pack_all)

    def _pack_all(self) -> None:
        while self._items and self.open:
            item = self._items.popleft()
            outgoing = item(self) if callable(item) else item
            if outgoing is not None and not self._close_sent:
                self._pack(outgoing)
        self._write()

    def _pack(self, outgoing: Outgoing) -> None:
        if outgoing.references:
            raise TypeError("a socket carries no object references")
        self._close_sent = isinstance(outgoing.message, Close)
        raw = frame(outgoing.message, tuple(source.size for source in outgoing.sources))
        self._outgoing.append(_Piece(memoryview(raw), raw))
        for source in outgoing.sources:
            self._outgoing += _pieces(source)

    def _write(self) -> None:
        try:
            while self._outgoing and self.open:
                self._note_sent(self.sock.sendmsg([piece.view for piece in islice(self._outgoing, _GATHER)]))
        except ConnectionError:
            self._drop_outgoing()  # reading sees it too, behind what has arrived: perhaps why this peer is refused
        finally:
            self.watch(writable=bool(self._outgoing))
        if self._close_sent and self._end_reported:
            self.fail(ConnectionAbortedError("both ends have closed"))

    def _note_sent(self, count: int) -> None:
        while count:
            piece = self._outgoing.popleft()
            if count < len(piece.view):
                self._outgoing.appendleft(piece._replace(view=piece.view[count:]))
            elif piece.sent is not None:
                piece.sent()
            count -= min(count, len(piece.view))

    def _read(self) -> None:
        """Into where the next bytes belong, and ahead: what comes after them is often small, and there already."""
        ahead, start, stop, left = self.hub.scratch, 0, 0, _TURN_BYTES
        while self.open and (start < stop or left > 0):
            if start < stop:
                count = min(len(self._space), stop - start)
                self._space[:count] = ahead[start : start + count]
                start += count
            else:
                received = self.sock.recvmsg_into([self._space, ahead])[0]
                if not received:
                    raise ConnectionResetError("connection closed by peer")
                left -= received
                self.hub.received_bytes += received
                count = min(len(self._space), received)
                start, stop = 0, received - count
            self._space = self._space[count:]
            if not len(self._space):
                self._space = next(self._parser)

    def _parse(self) -> Iterator[memoryview]:
        """Yields what is to be filled next."""
        header = memoryview(bytearray(HEADER_BYTES))
        while True:
            yield header
            size, crc = read_header(header)
            raw = memoryview(bytearray(size))
            yield raw
            sizes, message = read_message(raw, crc)
            if self._end_reported:
                raise WireError("it goes on after it has closed")
            if isinstance(message, Close):
                self._on_close(message.reason)
                continue
            buffers = [self._receiver.allocate(total) for total in self._receiver.admit(message, sizes)]
            yield from _views(buffers, sizes)
            self._receiver.receive(message, buffers, ())
            del message, buffers  # waiting for the next must not keep them alive

    def _on_close(self, reason: str) -> None:
        self._end_reported = True
        self._receiver.ended(PeerClosed(reason))
        self.close()
        self.hub.do(self._pump)  # if both have closed, nothing is left to do but to release it

    def _over(self, error: Exception) -> None:
        self._closed = True
        self._items.clear()
        self._drop_outgoing()
        if isinstance(error, ConnectionError) and "closed" not in str(error):
            error = ConnectionResetError("connection reset by peer")
        if self._started and not self._end_reported:
            self._end_reported = True
            self._receiver.ended(error)
        self._finished.set()

    def _drop_outgoing(self) -> None:
        for piece in self._outgoing:
            if piece.sent is not None:
                piece.sent()
        self._outgoing.clear()


def _views(buffers: Sequence[Tensor], sizes: Sequence[int]) -> Iterator[memoryview]:
    for buffer, size in zip(buffers, sizes, strict=True):
        if size:
            yield buffer[:size].numpy().data


def _pieces(source: Source) -> Iterator[_Piece]:
    """A source's bytes. Large ones are not copied if they lie somewhere; small ones are, in one call for all."""
    if not source.size:
        if source.sent is not None:
            source.sent()
        return
    if source.pieces is None:
        tensors: Sequence[Tensor] = [_filled(source)]
    elif source.size <= _COPY_BYTES:
        tensors = [torch.cat([*source.pieces()])]
    else:
        tensors = [piece for piece in source.pieces() if piece.numel()]
    if sum(tensor.numel() for tensor in tensors) != source.size:
        raise ValueError(f"{source.size} bytes were announced, but there are others: a rollout was changed while put")
    for tensor in tensors:
        yield _Piece(tensor.numpy().data, tensor, source.sent if tensor is tensors[-1] else None)


def _filled(source: Source) -> Tensor:
    buffer = torch.empty(source.size, dtype=torch.uint8)
    for _ in source.fill(buffer):
        pass
    return buffer
