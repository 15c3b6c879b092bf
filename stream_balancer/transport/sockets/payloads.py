"""Direct hand-over: a producer keeps payloads, and ranks fetch them into the slab they train from.

::

    Payloads (in the producer's thread)  <--WANT--  Fetcher (in the reader thread of a rank's port)
                                          -PAYLOAD->

Nothing is copied on the way but by the system: the producer sends its own tensors' memory, the rank receives into the
place the tokens have in its share. Where both are one process, there is no socket, only that copy.
"""

from __future__ import annotations

import secrets
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice

import torch
from torch import Tensor

from stream_balancer.errors import ClosedResourceError, ProducerLostError, WireError
from stream_balancer.transport.gloo.joiner import join_over
from stream_balancer.transport.handshake import Joining
from stream_balancer.transport.sockets.acceptor import Acceptor, send_now
from stream_balancer.transport.sockets.hub import Connection, Hub, keep_alive, listen, unexpected
from stream_balancer.types import Rollout
from stream_balancer.wire.messages import JoinFetcher, Owner, WelcomeProducer
from stream_balancer.wire.partial_share import Skeleton, payload, read_skeleton
from stream_balancer.wire.share import FRAME_BYTES, Frame, Kind, read_frame

__all__ = ["Fetcher", "Payloads"]

_MAX_WANT_BYTES = 2**23  # a million payloads
_GATHER = 256  # buffers per recvmsg; the system's limit is 1024
_CONNECT_S = 10.0


# --- the producer ----------------------------------------------------------------------------------------------------

_HERE: weakref.WeakValueDictionary[str, Payloads] = weakref.WeakValueDictionary()


class Payloads:
    """What a producer holds for ranks. Lives in the producer's hub; reading is safe from any thread."""

    def __init__(self) -> None:
        self.secret = secrets.token_hex(16)
        self._socket: socket.socket | None = None
        self._held: dict[int, list[Tensor]] = {}
        _HERE[self.secret] = self

    def __len__(self) -> int:
        return len(self._held)

    def listen(self, host: str, label: str) -> Owner:
        """Listen for ranks on ``host``; where. Raises ValueError or OSError if that is not possible."""
        self.close()
        self._socket = listen(host)
        return Owner(host, self._socket.getsockname()[1], self.secret, label)

    def serve(self, hub: Hub) -> None:
        """Let ranks in who know the secret. In the hub's thread."""
        sock, self._socket = self._socket, None
        if sock is not None:
            Acceptor(hub, sock, self.secret.encode(), {JoinFetcher: lambda peer, _: self._admit(hub, peer)})

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
            _Rank(self, Connection(hub, sock))

    def keep(self, key: int, rollout: Rollout) -> None:
        """Hold a rollout's tokens and tensors until :meth:`drop`."""
        self._held[key] = payload(rollout)

    def drop(self, keys: Iterable[int]) -> None:
        """They are not needed any more; unknown ones are fine."""
        for key in keys:
            self._held.pop(key, None)

    def clear(self) -> None:
        """Nothing is needed any more."""
        self._held.clear()

    def get(self, key: int) -> list[Tensor] | None:
        """The bytes held under this number, piece by piece; None if there are none."""
        return self._held.get(key)


class _Rank:
    """A rank that fetches."""

    def __init__(self, payloads: Payloads, connection: Connection) -> None:
        self._payloads, self._connection = payloads, connection
        connection.handler = self

    def admit(self, frame: Frame) -> None:
        """See :class:`Handler`."""
        if frame.kind is not Kind.WANT or not 0 < frame.wire_bytes <= _MAX_WANT_BYTES or frame.wire_bytes % 8:
            raise unexpected(frame)

    def handle(self, frame: Frame, body: Tensor) -> None:
        """See :class:`Handler`."""
        parts: list[Tensor] = []
        for key in body.view(torch.int64).tolist():
            held = self._payloads.get(key)
            if held is None:
                self._connection.send(Frame(Kind.PAYLOAD, step=max(key, 0), taken=1))
                return
            parts += held
        self._connection.send(Frame(Kind.PAYLOAD, wire_bytes=sum(part.numel() for part in parts)), parts)

    def lost(self, error: Exception) -> None:
        """See :class:`Handler`. The rank may come again."""


# --- the rank --------------------------------------------------------------------------------------------------------


class Fetcher:
    """Completes a rank's skeletons. One thread fetches; :meth:`close` may come from any."""

    def __init__(self) -> None:
        self._open: dict[Owner, socket.socket] = {}
        self._lock = threading.Lock()
        self._closed = False

    def complete(
        self, frame: Frame, body: Tensor, *, max_bytes: int, lend: Callable[[int], Tensor]
    ) -> tuple[Frame, Tensor]:
        """Fetch what a skeleton lacks, into a slab that ``lend`` gives: the BATCH frame and the slab that the
        controller would have sent. Blocks for as long as the producers take.

        Raises ProducerLostError if one is gone, WireError if one answers something else, ClosedResourceError once
        closed.
        """
        skeleton = read_skeleton(frame, body, max_bytes=max_bytes)
        slab = lend(skeleton.batch.total_bytes)
        for holder, places in skeleton.missing():
            targets = skeleton.targets(slab, places)
            keys = [skeleton.key(place) for place in places]
            try:
                self._fetch(holder, keys, targets)
            except (OSError, KeyError) as error:
                self._forget(holder)
                if self._closed:
                    raise ClosedResourceError from None
                raise _lost(skeleton, holder, places, error) from error
        skeleton.finish(slab)
        batch = skeleton.batch
        return frame._replace(
            kind=Kind.BATCH,
            meta_bytes=batch.meta_bytes,
            meta_crc=batch.meta_crc,
            wire_bytes=batch.wire_bytes,
            total_bytes=batch.total_bytes,
        ), slab

    def close(self) -> None:
        """Wake the thread that fetches, for good. Idempotent."""
        self._closed = True
        with self._lock:
            for sock in self._open.values():
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def hang_up(self) -> None:
        """Close the connections, once nobody fetches any more."""
        for holder in list(self._open):
            self._forget(holder)

    def _forget(self, holder: Owner) -> None:
        with self._lock:
            sock = self._open.pop(holder, None)
        if sock is not None:
            sock.close()

    def _fetch(self, holder: Owner, keys: Sequence[int], targets: Sequence[Tensor]) -> None:
        here = _HERE.get(holder.token)
        if here is not None:
            _copy(here, keys, targets)
            return
        sock = self._connected(holder)
        numbers = torch.tensor(keys, dtype=torch.int64).view(torch.uint8)
        sock.sendall(Frame(Kind.WANT, wire_bytes=numbers.numel()).pack().numpy().tobytes() + numbers.numpy().tobytes())
        words = torch.zeros(FRAME_BYTES // 8, dtype=torch.int64)
        _receive(sock, [words.view(torch.uint8)])
        frame = read_frame(words)
        if frame.kind is not Kind.PAYLOAD:
            raise WireError(f"producer {holder.label} sent a {frame.kind.name} frame instead of a payload")
        if frame.taken:
            raise KeyError(f"it does not have payload {frame.step}")
        if frame.wire_bytes != sum(target.numel() for target in targets):
            raise WireError(
                f"producer {holder.label} sends {frame.wire_bytes} bytes where {sum(t.numel() for t in targets)} were "
                "expected. Install one stream_balancer everywhere"
            )
        _receive(sock, targets)

    def _connected(self, holder: Owner) -> socket.socket:
        sock = self._open.get(holder)
        if sock is None:
            sock = socket.create_connection((holder.host, holder.port), timeout=_CONNECT_S)
            keep_alive(sock)
            with self._lock:
                self._open[holder] = sock
            if self._closed:
                raise ClosedResourceError
            try:
                join_over(sock, Joining(holder.token.encode(), JoinFetcher()))
            except (ValueError, WireError) as error:
                raise ConnectionRefusedError(f"somebody else listens where it did: {error}") from None
        return sock


def _copy(here: Payloads, keys: Sequence[int], targets: Sequence[Tensor]) -> None:
    parts: list[Tensor] = []
    for key in keys:
        held = here.get(key)
        if held is None:
            raise KeyError(f"it does not have payload {key}")
        parts += held
    if [part.numel() for part in parts] != [target.numel() for target in targets]:
        raise WireError("a producer in this process holds a payload of another size than was described")
    for part, target in zip(parts, targets, strict=True):
        target.copy_(part)


def _receive(sock: socket.socket, targets: Iterable[Tensor]) -> None:
    spaces = deque(target.numpy().data for target in targets)
    while spaces:
        count = sock.recvmsg_into(list(islice(spaces, _GATHER)))[0]
        if not count:
            raise ConnectionResetError("connection closed by peer")
        while count:
            space = spaces.popleft()
            if count < len(space):
                spaces.appendleft(space[count:])
            count -= min(count, len(space))


def _lost(skeleton: Skeleton, holder: Owner, places: Sequence[int], error: Exception) -> ProducerLostError:
    name = skeleton.name(places[0])
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return ProducerLostError(
        f"step {skeleton.batch.step} cannot be completed: the tokens of rollout {name!r}{more} were held by producer "
        f"{holder.label}, which is gone: {error}. serve() raises; restart, and give the step up with "
        f"balancer.acknowledge({skeleton.batch.step}) or put the rollouts again",
        step=skeleton.batch.step,
        rollout_id=name,
        place=places[0],
    )
