"""Payloads that stay with their producer, and how a rank reads them into the buffer it trains from.

::

    PayloadServer (a producer's thread)  <--WantPayloads--  Fetcher (the thread in which a rank reads)
                                           --Payloads-->

Nothing is copied on the way but by the system: the producer sends its own tensors' memory, the rank receives into the
place the tokens have in its batch. Where both are one process, there is no socket, only that copy.
"""

from __future__ import annotations

import secrets
import socket
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice

from torch import Tensor

from stream_balancer.errors import ClosedResourceError, WireError
from stream_balancer.transport.channel import Outgoing, PayloadSource, Session, Source, unexpected
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
from stream_balancer.wire.partial_share import payload

__all__ = ["Fetcher", "PayloadServer"]

_GATHER = 256  # buffers per recvmsg; the system's limit is 1024
_CONNECT_S = 10.0


# --- the producer ----------------------------------------------------------------------------------------------------

_HERE: weakref.WeakValueDictionary[str, PayloadServer] = weakref.WeakValueDictionary()


class PayloadServer:
    """The payloads that a producer keeps for ranks. Served in the producer's hub; reading is safe from any thread."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(16)
        self._socket: socket.socket | None = None
        self._kept: dict[int, list[Tensor]] = {}
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
        self._kept[key] = payload(rollout)

    def drop(self, keys: Iterable[int]) -> None:
        """They are not needed any more; unknown ones are fine."""
        for key in keys:
            self._kept.pop(key, None)

    def clear(self) -> None:
        """Nothing is needed any more."""
        self._kept.clear()

    def get(self, key: int) -> list[Tensor] | None:
        """The bytes kept under this number, piece by piece; None if there are none."""
        return self._kept.get(key)


class _OwnerSession(Session):
    """The owner's end of a rank that fetches."""

    def __init__(self, payloads: PayloadServer, channel: SocketChannel) -> None:
        self._payloads, self._channel = payloads, channel

    def receive(self, message: Message, buffers: Sequence[Tensor], references: Sequence[object]) -> None:
        if not isinstance(message, WantPayloads):
            raise unexpected(message, "payloads are fetched")
        kept = {key: self._payloads.get(key) for key in message.keys}
        missing = tuple(key for key in message.keys if kept[key] is None)
        sources = [_source(pieces) for key in message.keys if (pieces := kept[key]) is not None]
        self._channel.send(Outgoing(Payloads(message.number, missing), sources))

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
    """Reads payloads of any owner."""

    def __init__(self) -> None:
        self._open: dict[Owner, socket.socket] = {}
        self._lock = threading.Lock()
        self._closed = False

    def read(
        self,
        owner: Owner,
        keys: Sequence[int],
        targets: Sequence[Sequence[Tensor]],
        references: Sequence[object] = (),
    ) -> Mapping[int, str]:
        here = _HERE.get(owner.token)
        if here is not None:
            return _copy(here, keys, targets)
        gone: dict[int, str] = {}
        try:
            for first in range(0, len(keys), MAX_ENTRIES):
                part = slice(first, first + MAX_ENTRIES)
                gone |= {first + index: why for index, why in self._fetch(owner, keys[part], targets[part]).items()}
        except OSError as error:
            self._forget(owner)
            if self._closed:
                raise ClosedResourceError from None
            gone = dict.fromkeys(range(len(keys)), str(error))
        except WireError:
            self._forget(owner)
            raise
        return gone

    def close(self) -> None:
        self._closed = True
        with self._lock:
            for sock in self._open.values():
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads; closing would not
                sock.close()
            self._open.clear()

    def _forget(self, owner: Owner) -> None:
        with self._lock:
            sock = self._open.pop(owner, None)
        if sock is not None:
            sock.close()

    def _fetch(self, owner: Owner, keys: Sequence[int], targets: Sequence[Sequence[Tensor]]) -> dict[int, str]:
        sock = self._connected(owner)
        sock.sendall(frame(WantPayloads(0, tuple(keys))))
        header = bytearray(HEADER_BYTES)
        _receive(sock, [memoryview(header)])
        size, crc = read_header(header)
        raw = bytearray(size)
        _receive(sock, [memoryview(raw)])
        sizes, answer = read_message(raw, crc)
        if not isinstance(answer, Payloads):
            raise WireError(f"producer {owner.label} sent a {type(answer).__name__} message instead of payloads")
        missing = set(answer.missing)
        wanted = [pieces for key, pieces in zip(keys, targets, strict=True) if key not in missing]
        if list(sizes) != [sum(piece.numel() for piece in pieces) for pieces in wanted]:
            raise WireError(
                f"producer {owner.label} sends payloads of other sizes than it described. Install one stream_balancer "
                "everywhere"
            )
        _receive(sock, [piece.numpy().data for piece in chain.from_iterable(wanted)])
        return {index: f"it does not have payload {key}" for index, key in enumerate(keys) if key in missing}

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


def _copy(here: PayloadServer, keys: Sequence[int], targets: Sequence[Sequence[Tensor]]) -> dict[int, str]:
    gone: dict[int, str] = {}
    for index, (key, pieces) in enumerate(zip(keys, targets, strict=True)):
        kept = here.get(key)
        if kept is None:
            gone[index] = f"it does not have payload {key}"
            continue
        if [part.numel() for part in kept] != [piece.numel() for piece in pieces]:
            raise WireError("a producer in this process keeps a payload of another size than was described")
        for part, piece in zip(kept, pieces, strict=True):
            piece.copy_(part)
    return gone


def _receive(sock: socket.socket, views: Iterable[memoryview]) -> None:
    spaces = deque(view for view in views if len(view))
    while spaces:
        count = sock.recvmsg_into(list(islice(spaces, _GATHER)))[0]
        if not count:
            raise ConnectionResetError("connection closed by peer")
        while count:
            space = spaces.popleft()
            if count < len(space):
                spaces.appendleft(space[count:])
            count -= min(count, len(space))
