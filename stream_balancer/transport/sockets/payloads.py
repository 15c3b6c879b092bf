"""Payloads that stay with their producer, and how a rank reads them into the buffer it trains from.

::

    PayloadServer (a producer's thread)  <--WantPayloads--  Fetcher (the thread in which a rank reads)
                                           --Payloads-->

Nothing is copied on the way but by the system: the producer sends its own tensors' memory, the rank receives into the
place the tokens have in its batch. Where both are one process, there is no socket, only that copy.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from typing import NamedTuple, cast

from torch import Tensor

from stream_balancer.errors import ClosedResourceError, WireError
from stream_balancer.transport.channel import Outgoing, PayloadSource, Session, Source, either
from stream_balancer.transport.handshake import Joining
from stream_balancer.transport.sockets.acceptor import Acceptor, send_now
from stream_balancer.transport.sockets.channel import SocketChannel
from stream_balancer.transport.sockets.framing import HEADER_BYTES, frame, read_header, read_message
from stream_balancer.transport.sockets.hub import Hub, keep_alive, listen
from stream_balancer.transport.sockets.joiner import join_over
from stream_balancer.types import Rollout
from stream_balancer.wire.messages import (
    MAX_ENTRIES,
    JoinFetcher,
    Message,
    Owner,
    Payloads,
    WantPayloads,
    WelcomeProducer,
)
from stream_balancer.wire.partial_batch import WantedPayload, payload
from stream_balancer.wire.slices import Slice, sliced

__all__ = ["Fetcher", "PayloadServer"]

_GATHER = 256  # buffers per recvmsg; the system's limit is 1024
_TURN_BYTES = 2**20  # read from one owner before the others get their turn
_CONNECT_S = 10.0  # to a producer, which listens from its join on; then its payloads count as gone


# --- the producer ----------------------------------------------------------------------------------------------------

_HERE: weakref.WeakValueDictionary[str, PayloadServer] = weakref.WeakValueDictionary()


class PayloadServer:
    """The payloads that a producer keeps for ranks. Served in the producer's hub; reading is safe from any thread."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(16)
        self._socket: socket.socket | None = None
        self._kept: dict[int, _Kept] = {}
        _HERE[self.token] = self

    def __len__(self) -> int:
        return len(self._kept)

    def listen(self, host: str, label: str) -> Owner:
        """Listen for ranks on ``host``; where. Raises ValueError or OSError if that is not possible."""
        self.close()
        self._socket = listen(host)
        return Owner(host, self._socket.getsockname()[1], self.token, label)

    def serve(self, hub: Hub) -> None:
        """Let ranks in who know the token. In the hub's thread."""
        sock, self._socket = self._socket, None
        if sock is not None:
            Acceptor(hub, sock, self.token.encode(), {JoinFetcher: lambda peer, _: self._admit(hub, peer)})

    def close(self) -> None:
        """Do not listen, if nobody is served yet."""
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.close()

    def _admit(self, hub: Hub, sock: socket.socket) -> None:
        try:
            send_now(sock, WelcomeProducer(0, 0))
        except OSError:
            sock.close()
        else:
            channel = SocketChannel(hub, sock)
            channel.start(_OwnerSession(self, channel))

    def keep(self, key: int, rollout: Rollout) -> None:
        """Hold a rollout's tokens and tensors until :meth:`drop`."""
        num_columns = sum(column.numel() > 0 for column in rollout.tokens.values())
        self._kept[key] = _Kept(payload(rollout), num_columns, rollout.num_tokens)

    def drop(self, keys: Iterable[int]) -> None:
        """They are not needed any more; unknown ones are fine."""
        for key in keys:
            self._kept.pop(key, None)

    def clear(self) -> None:
        """Nothing is needed any more."""
        self._kept.clear()

    def get(self, key: int, degree: int = 1, place: int = 0) -> list[Tensor] | None:
        """The bytes kept under this number, piece by piece; None if there are none. With a degree the part of the rank
        at this place, copied."""
        kept = self._kept.get(key)
        if kept is None or degree == 1:
            return None if kept is None else kept.pieces
        return sliced(kept.pieces, kept.num_columns, Slice(degree, place, kept.num_tokens))


class _Kept(NamedTuple):
    """A payload, and what is needed to slice it."""

    pieces: list[Tensor]
    num_columns: int
    """Of the pieces; the others are tensors."""
    num_tokens: int


class _OwnerSession(Session):
    """The owner's end of a rank that fetches."""

    def __init__(self, payloads: PayloadServer, channel: SocketChannel) -> None:
        self._payloads, self._channel = payloads, channel

    def _on_want(self, message: WantPayloads, *_: object) -> None:
        parts = message.parts or ((1, 0),) * len(message.keys)
        if len(parts) != len(message.keys) or any(place >= degree for degree, place in parts):
            raise WireError("a rank wants parts of payloads that there cannot be")
        # Looked up once: a key that is dropped meanwhile must not be named missing and sent as well.
        kept = {key: self._payloads.get(key, *part) for key, part in zip(message.keys, parts, strict=True)}
        missing = tuple(key for key in message.keys if kept[key] is None)
        sources = [_source(pieces) for key in message.keys if (pieces := kept[key]) is not None]
        self._channel.send(Outgoing(Payloads(message.number, missing), sources))

    actions = either((WantPayloads, _on_want))

    def ended(self, error: Exception) -> None:
        """The rank may come again."""


def _source(pieces: Sequence[Tensor]) -> Source:
    def fill(buffer: Tensor) -> Iterator[int]:
        at = 0
        for piece in pieces:
            buffer[at : at + piece.numel()] = piece
            at += piece.numel()
        yield at

    return Source(sum(piece.numel() for piece in pieces), fill, lambda: pieces)


# --- the rank --------------------------------------------------------------------------------------------------------


class Fetcher(PayloadSource):
    """Reads payloads of any owner: all are asked before the first answer is read."""

    def __init__(self) -> None:
        self._open: dict[Owner, socket.socket] = {}
        self._lock = threading.Lock()
        self._closed = self._reading = False

    def read(self, wanted: Sequence[WantedPayload]) -> Mapping[int, str]:
        gone: dict[int, str] = {}
        by_owner: dict[Owner, dict[int, WantedPayload]] = {}
        for number, one in enumerate(wanted):
            here = _HERE.get(one.owner.token)
            if here is None:
                by_owner.setdefault(one.owner, {})[number] = one
            elif (why := _copy(here, one)) is not None:
                gone[number] = why
        with self._using_sockets(by_owner):
            gone |= self._read_over_sockets(by_owner)
        return gone

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for sock in self._open.values():
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads; closing would not
            if not self._reading:
                self._close_all()

    @contextmanager
    def _using_sockets(self, owners: Iterable[Owner]) -> Iterator[None]:
        """A thread that reads closes its sockets by itself: were they closed under it, their numbers could be those of
        other files by the time it asks the system to read."""
        with self._lock:
            if self._closed:
                raise ClosedResourceError
            self._reading = True
        try:
            yield
        except BaseException:
            for owner in owners:  # what some of them send by now answers nothing
                self._forget(owner)
            raise
        finally:
            self._stop_reading()

    def _stop_reading(self) -> None:
        with self._lock:
            self._reading = False
            if self._closed:
                self._close_all()

    def _close_all(self) -> None:
        for sock in self._open.values():
            sock.close()
        self._open.clear()

    def _read_over_sockets(self, by_owner: Mapping[Owner, Mapping[int, WantedPayload]]) -> dict[int, str]:
        gone: dict[int, str] = {}
        with selectors.DefaultSelector() as selector:
            for owner, theirs in by_owner.items():
                try:
                    selector.register(self._ask(owner, theirs), selectors.EVENT_READ, _Reader(owner, theirs))
                except OSError as error:
                    gone |= self._lost(owner, theirs, error)
            # Read as they send: what waits in the system's buffer for one owner's turn is soon all that it can send.
            while selector.get_map():
                for key, _ in selector.select():
                    reader: _Reader = key.data
                    try:
                        if reader.read(cast("socket.socket", key.fileobj)):
                            selector.unregister(key.fileobj)
                            gone |= reader.missing
                    except OSError as error:
                        selector.unregister(key.fileobj)
                        gone |= self._lost(reader.owner, reader.wanted, error)
        return gone

    def _lost(self, owner: Owner, wanted: Iterable[int], error: OSError) -> dict[int, str]:
        """Without its connection, all that is wanted of an owner is gone."""
        if self._closed:
            raise ClosedResourceError from None
        self._forget(owner)
        return dict.fromkeys(wanted, str(error))

    def _forget(self, owner: Owner) -> None:
        with self._lock:
            sock = self._open.pop(owner, None)
        if sock is not None:
            sock.close()

    def _ask(self, owner: Owner, wanted: Mapping[int, WantedPayload]) -> socket.socket:
        sock = self._connected(owner)
        for part in _parts(wanted):
            parts = tuple((1, 0) if one.part is None else one.part[:2] for one in part.values())
            keys = tuple(one.key for one in part.values())
            sock.sendall(frame(WantPayloads(0, keys, parts if set(parts) != {(1, 0)} else ())))
        return sock

    def _connected(self, owner: Owner) -> socket.socket:
        sock = self._open.get(owner)
        if sock is None:
            sock = socket.create_connection((owner.host, owner.port), timeout=_CONNECT_S)
            keep_alive(sock)
            with self._lock:
                self._open[owner] = sock
            if self._closed:  # close() may have come too early to see the socket
                self._forget(owner)
                raise ClosedResourceError
            try:
                join_over(sock, Joining(owner.token.encode(), JoinFetcher()))
            except (ValueError, WireError) as error:
                raise ConnectionRefusedError(f"somebody else listens where it did: {error}") from None
        return sock


def _copy(here: PayloadServer, one: WantedPayload) -> str | None:
    """Why it is gone, if it is."""
    kept = here.get(one.key, *(one.part or ())[:2])
    if kept is None:
        return _does_not_have(one.key)
    if [part.numel() for part in kept] != [piece.numel() for piece in one.pieces]:
        raise WireError("a producer in this process keeps a payload of another size than was described")
    for part, piece in zip(kept, one.pieces, strict=True):
        piece.copy_(part)
    return None


def _does_not_have(key: int) -> str:
    return f"it does not have payload {key}"


def _parts(wanted: Mapping[int, WantedPayload]) -> Iterator[dict[int, WantedPayload]]:
    """As many as one message may ask for."""
    for first in range(0, len(wanted), MAX_ENTRIES):
        yield dict(islice(wanted.items(), first, first + MAX_ENTRIES))


class _Reader:
    """What one owner answers, straight into its places."""

    def __init__(self, owner: Owner, wanted: Mapping[int, WantedPayload]) -> None:
        self.owner, self.wanted = owner, wanted
        self.missing: dict[int, str] = {}
        self._parser = self._parse()
        self._spaces = deque(next(self._parser))

    def read(self, sock: socket.socket) -> bool:
        """Read what is there, and no more than others may wait for; whether that was all. Raises OSError, WireError."""
        left = _TURN_BYTES
        while left > 0:
            try:
                count = sock.recvmsg_into(list(islice(self._spaces, _GATHER)), 0, socket.MSG_DONTWAIT)[0]
            except BlockingIOError:
                return False
            if not count:
                raise ConnectionResetError("connection closed by peer")
            left -= count
            self._fill(count)
            while not self._spaces:
                spaces = next(self._parser, None)
                if spaces is None:
                    return True
                self._spaces += (space for space in spaces if len(space))
        return False

    def _fill(self, count: int) -> None:
        while count:
            space = self._spaces.popleft()
            if count < len(space):
                self._spaces.appendleft(space[count:])
            count -= min(count, len(space))

    def _parse(self) -> Iterator[Sequence[memoryview]]:
        """Yields what is to be filled next."""
        for part in _parts(self.wanted):
            header = memoryview(bytearray(HEADER_BYTES))
            yield [header]
            size, crc = read_header(header)
            raw = memoryview(bytearray(size))
            yield [raw]
            yield self._places(part, *read_message(raw, crc))

    def _places(self, part: Mapping[int, WantedPayload], sizes: Sequence[int], answer: Message) -> list[memoryview]:
        if not isinstance(answer, Payloads):
            raise WireError(f"producer {self.owner.label} sent a {type(answer).__name__} message instead of payloads")
        missing = set(answer.missing)
        self.missing |= {number: _does_not_have(one.key) for number, one in part.items() if one.key in missing}
        coming = [one.pieces for one in part.values() if one.key not in missing]
        if list(sizes) != [sum(piece.numel() for piece in pieces) for pieces in coming]:
            raise WireError(
                f"producer {self.owner.label} sends payloads of other sizes than it described. Install one "
                "stream_balancer everywhere"
            )
        return [piece.numpy().data for piece in chain.from_iterable(coming)]
