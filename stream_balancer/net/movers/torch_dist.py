"""Bytes by torch.distributed: send and recv of a gloo group of two.

Three facts about gloo shape this:

* A receive shorter than its send aborts the process. So sizes come first, on the authenticated connection, and both
  ends cut runs into the same pieces.
* A transfer that is cut in the middle never wakes. A receive that has no bytes yet is woken at once by the peer's
  death. So a one-byte tail follows every payload, and only the tail is waited for; pieces are looked at once it is
  here.
* A wait that expires breaks the pair. So no wait expires, and to break the pair on purpose one is made to.

::

    either    note address            gloo's own address, over the connection: the store of the group
              proof -> <- proof       the first message on the pair, each way, is an HMAC over both addresses
    either    note ready              the other may send by this way from now on
    receiver  note seen n             the sender may let go of n payloads
"""

from __future__ import annotations

import ctypes
import hmac
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stream_balancer.errors import WireError
from stream_balancer.net.movers.common import note, pack, warn

if TYPE_CHECKING:
    from stream_balancer.net.connection import Connection
    from stream_balancer.net.messages import Envelope
    from stream_balancer.net.pool import Memory
    from stream_balancer.wire.payload import Payload

__all__ = ["TorchDist", "available"]

_CHUNK = 8 * 2**20
_MOST_STAGED_BYTES = 2**28
"""Copies of one connection. A payload that would be beyond it goes by the socket, from where it lies."""
_KEEP_CHUNKS = 8
_FOR_EVER = timedelta(days=3650)
_TAG, _SPARE_TAG = 1, 7
_BUILD_S, _PROOF_S = 2.0, 10.0
_devices: dict[str, Any] = {}


def available() -> bool:
    """Gloo is there."""
    try:
        import torch.distributed as dist
    except ImportError:
        return False
    return dist.is_available() and dist.is_gloo_available()


class _Sent(NamedTuple):
    """Objects that must live until the other end has them: gloo's own operations keep nothing."""

    payload: Payload
    staged_bytes: int
    staging: list[Memory]
    works: list[Any]
    sent: Callable[[], object] | None


class _Arrival(NamedTuple):
    works: list[Any]
    tail: Any
    memory: Memory
    ready: Callable[[Memory], None]


class TorchDist:
    """An end of the mover. Threads: one of gloo's for all pairs of the process, and one here where bytes arrive."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.ready = False
        # ranks of the group of two: the acceptor is 0
        self._me = 1 if connection.handshake.joins else 0
        self._store: Any = None
        self._group: Any = None
        # None in it ends the wait: the connection is over
        self._addresses: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._arrivals: queue.SimpleQueue[_Arrival | None] = queue.SimpleQueue()
        self._waits = False
        self._on_their_way: deque[_Sent] = deque()
        self._staged_bytes = 0
        self._abandoned: _Arrival | None = None
        self._idle: list[Memory] = []
        self._closed = False

    def begin(self) -> None:
        """Build the pair. Gloo's constructor blocks until both ends are there."""
        self._start(self._build, "stream_balancer-pair")

    def _start(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        helpers = self._connection.io.helpers
        # each connection brings some: those that have ended must not pile up
        helpers[:] = [one for one in helpers if one.is_alive()]
        helpers.append(thread)
        thread.start()

    # meeting

    def _build(self) -> None:
        try:
            # a group keeps the C++ half of its store only
            self._store = _exchange(self)
            group = _group_of_two(self._store, self._me, self._connection.local)
            self._prove(group)
        except Exception as error:  # noqa: BLE001 - then it is not used
            if not self._closed:
                warn("torch_dist", error)
            return
        self._group = group
        if self._closed:
            _poison(group, 1 - self._me)
        note(self._connection, "torch_dist", b"R")

    def _prove(self, group: Any) -> None:
        """Proof that the peer at gloo's port is the one at the other end of the connection."""
        import torch

        mine, theirs = (self._proof(side) for side in (self._me, 1 - self._me))
        # a bytearray, because torch warns of memory that it may not write to
        out = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        got = torch.zeros(len(theirs), dtype=torch.uint8)
        # the receive is posted first: both ends send, and neither waits for the other
        works = [group.recv([got], 1 - self._me, _TAG), group.send([out], 1 - self._me, _TAG)]
        for work in works:
            work.wait(timedelta(seconds=_PROOF_S))
        if not hmac.compare_digest(got.numpy().tobytes(), theirs):
            raise WireError("somebody else has connected to the pair")

    def _proof(self, side: int) -> bytes:
        # over both addresses, so that it proves this pair and no other
        text = b"|".join((b"pair", bytes([side]), self._store.found[0], self._store.found[1]))
        return hmac.digest(self._connection.handshake.token, text, "sha256")

    def note(self, body: bytes) -> None:
        """Raises WireError for one that makes no sense."""
        kind, rest = body[:1], body[1:]
        if kind == b"A":
            self._addresses.put(rest)
        elif kind == b"R" and not rest:
            self.ready = True
        elif kind == b"S" and not rest and self._on_their_way:
            self._seen(self._on_their_way.popleft())
        else:
            raise WireError("a note that makes no sense for torch_dist")

    def _seen(self, one: _Sent) -> None:
        self._staged_bytes -= one.staged_bytes
        self._idle += one.staging
        del self._idle[_KEEP_CHUNKS:]
        if one.sent is not None:
            one.sent()

    # sending

    def send(
        self, payload: Payload, sent: Callable[[], object] | None, go: Callable[[Sequence[int]], None]
    ) -> bool:  # fmt: skip
        """Where it lies in one piece it is sent from there, uncut: a cut costs a round trip."""
        whole = len(payload.pieces) == 1
        staged_bytes = 0 if whole else payload.size
        if self._group is None or self._staged_bytes + staged_bytes > _MOST_STAGED_BYTES:
            return False
        self._staged_bytes += staged_bytes
        one = _Sent(payload, staged_bytes, [], [], sent)
        # the order of sending is the order in which the other end says seen
        self._on_their_way.append(one)
        chunk = payload.total if whole else _CHUNK
        # the message leaves first: the other end posts its receives while the first piece is packed
        go((chunk,))
        pack(self._connection, lambda: self._post(one, chunk))
        return True

    def _post(self, one: _Sent, chunk: int) -> None:
        """In the thread that packs: a piece is packed while the one before is sent."""
        import torch

        sources = deque(np.frombuffer(piece, dtype=np.uint8) for piece in one.payload.views())
        for _, size in _pieces(one.payload.runs, chunk):
            part = self._next_part(sources, size, one)
            # By its address: torch warns of memory that must not be written to, which it does not do.
            tensor = torch.frombuffer((ctypes.c_uint8 * size).from_address(part.ctypes.data), dtype=torch.uint8)
            one.works.append(self._group.send([tensor], 1 - self._me, _TAG))
        # the tail that the receiver waits for
        one.works.append(self._group.send([torch.zeros(1, dtype=torch.uint8)], 1 - self._me, _TAG))

    def _next_part(self, sources: deque[Memory], size: int, one: _Sent) -> Memory:
        """The next so many bytes, in one piece."""
        while not sources[0].size:
            sources.popleft()
        if sources[0].size >= size:
            part, sources[0] = sources[0][:size], sources[0][size:]
            return part
        staging = self._staging()
        one.staging.append(staging)
        at = 0
        while at < size:
            count = min(size - at, sources[0].size)
            staging[at : at + count] = sources[0][:count]
            sources[0] = sources[0][count:]
            at += count
            if not sources[0].size:
                sources.popleft()
        return staging[:size]

    def _staging(self) -> Memory:
        # the I/O thread gives them back
        with suppress(IndexError):
            return self._idle.pop()
        return np.empty(_CHUNK, dtype=np.uint8)

    # receiving

    def receive(self, envelope: Envelope, ready: Callable[[Memory], None]) -> None:
        """Post what is to come, and wait for its tail elsewhere. Raises WireError for what makes no sense."""
        import torch

        # pieces that are too small would have a peer post a receive for each byte
        if self._group is None or len(envelope.where) != 1 or envelope.where[0] < min(_CHUNK, envelope.total):
            raise WireError("the pair was used before it was ready, or in pieces that are too small")
        memory = self._connection.pool.take(envelope.total)
        whole, tail = torch.from_numpy(memory), torch.zeros(1, dtype=torch.uint8)
        try:
            works = [
                self._group.recv([whole[offset : offset + size]], 1 - self._me, _TAG)
                for offset, size in _pieces(envelope.runs, envelope.where[0])
            ]
            works.append(self._group.recv([tail], 1 - self._me, _TAG))
        except RuntimeError as error:
            self._broken(error)
            return
        if not self._waits:
            self._waits = True
            self._start(self._wait, "stream_balancer-gloo")
        # in order, since gloo matches by order within a tag
        self._arrivals.put(_Arrival(works, tail, memory, ready))

    def _wait(self) -> None:
        while (one := self._arrivals.get()) is not None:
            try:
                # the tail first
                for work in reversed(one.works):
                    work.wait(_FOR_EVER)
            except RuntimeError as error:
                self._broken(error)
                # gloo may still know this memory
                self._abandoned = one
                return
            note(self._connection, "torch_dist", b"S")
            self._connection.io.do(_deliver(one))
            del one, work

    # the end

    def _broken(self, error: Exception) -> None:
        failure = ConnectionResetError(f"gloo: {str(error).split(chr(10), 1)[0][:200]}")
        self._connection.io.do(lambda: self._connection.fail(failure))

    def close(self) -> None:
        """Wakes whoever waits in gloo."""
        self._closed, self.ready = True, False
        self._addresses.put(None)
        self._arrivals.put(None)
        group = self._group
        if group is not None:
            self._connection.io.work(lambda: _poison(group, 1 - self._me))


def _deliver(one: _Arrival) -> Callable[[], None]:
    return lambda: one.ready(one.memory)


def _poison(group: Any, peer: int) -> None:
    """A wait that expires breaks the pair."""
    import torch

    with suppress(RuntimeError):
        # on a tag that nobody sends on, so it is sure to expire
        group.recv([torch.zeros(1)], peer, _SPARE_TAG).wait(timedelta(milliseconds=1))


def _pieces(runs: Sequence[int], chunk: int) -> Iterator[tuple[int, int]]:
    for offset, size in zip(runs[::2], runs[1::2], strict=True):
        for at in range(offset, offset + size, chunk):
            yield at, min(chunk, offset + size - at)


def _group_of_two(store: Any, me: int, host: str) -> Any:
    import torch.distributed as dist

    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    options._timeout, options._threads = timedelta(seconds=_BUILD_S), 1
    # one device for each address of this machine: each has a thread
    device = _devices.get(host) or _devices.setdefault(host, kind.create_device(hostname=host))
    options._devices = [device]
    return kind(store, me, 2, options)


def _exchange(mover: TorchDist) -> Any:
    """As much of a c10d store as gloo uses: each end sets its address, and waits for the other's."""
    from torch._C._distributed_c10d import Store

    class Exchange(Store):
        def __init__(self) -> None:
            super().__init__()
            self.found: dict[int, bytes] = {}

        def set(self, key: str, value: Any) -> None:
            self.found[mover._me] = bytes(value)
            note(mover._connection, "torch_dist", b"A" + bytes(value))

        def wait(self, keys: list[str], timeout: timedelta = _FOR_EVER) -> None:
            for key in keys:
                self.get(key)

        def get(self, key: str) -> bytes:
            side = int(key.rpartition("/")[2])
            if side not in self.found:
                address = mover._addresses.get(timeout=_PROOF_S)
                if address is None:
                    raise RuntimeError("the connection is over")
                self.found[side] = address
            return self.found[side]

    return Exchange()
