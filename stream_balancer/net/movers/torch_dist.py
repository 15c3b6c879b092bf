"""Bytes by torch.distributed: gloo's send and recv in a group of two.

Three facts about gloo shape this:

* A receive shorter than its send aborts the process. So sizes come first, on the authenticated connection, and both
  ends cut runs into the same pieces.
* A transfer that is cut in the middle never wakes. A receive that has no bytes yet is woken at once by the peer's death.
  So a one-byte tail follows every payload, and only the tail is waited for; pieces are looked at once it is here.
* A wait that expires breaks the pair. So no wait expires, and to break the pair on purpose one is made to.

::

    either    note address            gloo's own address, over the connection: the store of the group
              proof -> <- proof       the first message on the pair, each way, is an HMAC over both addresses
    either    note ready              the other may send by this way from now on
    receiver  note seen n             the sender may let go of payload n
"""

from __future__ import annotations

import hmac
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stream_balancer.errors import WireError
from stream_balancer.net.movers import note
from stream_balancer.net.pool import Memory

if TYPE_CHECKING:
    from stream_balancer.net.connection import Connection, Payload
    from stream_balancer.net.messages import Envelope

__all__ = ["TorchDist", "available"]

_log = logging.getLogger(__name__)
_CHUNK = 8 * 2**20
_FOR_EVER = timedelta(days=3650)
_TAG, _SPARE_TAG = 1, 7
_BUILD_S, _PROOF_S = 2.0, 10.0
_devices: dict[str, Any] = {}


def available() -> bool:
    try:
        import torch.distributed as dist
    except ImportError:
        return False
    return dist.is_available() and dist.is_gloo_available()


class _Sent(NamedTuple):
    """What must live until the other end has it: gloo's own operations keep nothing."""

    payload: Payload
    staging: list[Any]
    works: list[Any]
    sent: Callable[[], object] | None


class TorchDist:
    """One end. Threads: one of gloo's for all pairs of the process, and one here where bytes arrive."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.ready = False
        self._me = 1 if connection.handshake.joins else 0
        self._group: Any = None
        self._addresses: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._arrivals: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waiter: threading.Thread | None = None
        self._ledger: deque[_Sent] = deque()
        self._seen = 0
        self._closed = False
        self._idle: list[Any] = []

    def begin(self) -> None:
        threading.Thread(target=self._build, name="stream_balancer-pair", daemon=True).start()

    # meeting

    def _build(self) -> None:
        """gloo's constructor blocks until both ends are there, so it has a thread; on the way the socket is used."""
        try:
            import torch
            import torch.distributed as dist

            kind: Any = dist.ProcessGroupGloo
            store = _exchange(self)
            options = kind._Options()
            options._timeout, options._threads = timedelta(seconds=_BUILD_S), 1
            host = self._connection.local
            device = _devices.get(host) or _devices.setdefault(host, kind.create_device(hostname=host))
            options._devices = [device]
            group = kind(store, self._me, 2, options)
            self._store = store  # the group keeps its C++ half only
            mine, theirs = (self._proof(side, store) for side in (self._me, 1 - self._me))
            out = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
            got = torch.zeros(32, dtype=torch.uint8)
            works = [group.send([out], 1 - self._me, _TAG), group.recv([got], 1 - self._me, _TAG)]
            works[1].wait(timedelta(seconds=_PROOF_S))
            works[0].wait(timedelta(seconds=_PROOF_S))
            if not hmac.compare_digest(got.numpy().tobytes(), theirs):
                raise WireError("somebody else has connected to the pair")
            self._group = group
        except Exception as error:  # noqa: BLE001 - then it is not used
            _log.warning("no gloo pair, bytes go by the socket: %s", str(error).split("\n", 1)[0])
            return
        note(self._connection, "torch_dist", b"R")

    def _proof(self, side: int, store: Any) -> bytes:
        text = b"|".join((b"pair", bytes([side]), store.found[0], store.found[1]))
        return hmac.digest(self._connection.handshake.token, text, "sha256")

    def note(self, body: bytes) -> None:
        kind, rest = body[:1], body[1:]
        if kind == b"A":
            self._addresses.put(rest)
        elif kind == b"R":
            self.ready = True
        elif (
            kind == b"S"
            and len(rest) == 8
            and self._seen < int.from_bytes(rest, "little") <= self._seen + len(self._ledger)
        ):
            while self._seen < int.from_bytes(rest, "little"):
                self._seen += 1
                one = self._ledger.popleft()
                self._idle += one.staging
                del self._idle[:-8]
                if one.sent is not None:
                    one.sent()
        else:
            raise WireError("a note that gloo does not know")

    # sending

    def send(self, payload: Payload, sent: Callable[[], object] | None, go: Callable[[Sequence[int]], None]) -> None:
        if self._group is None:  # the other end is ready, and this one is about to be
            self._connection.io.after(0.001, lambda: self.send(payload, sent, go))
            return
        entry = _Sent(payload, [], [], sent)
        self._ledger.append(entry)
        # Where it lies in one piece nothing is packed, and a cut costs a round trip.
        chunk = payload.total if len(payload.pieces) == 1 else _CHUNK
        go((chunk,))
        self._connection.io.work(lambda: self._post(payload, entry, chunk))

    def _post(self, payload: Payload, entry: _Sent, chunk: int) -> None:
        """In the thread that packs: one piece is packed while the one before is sent."""
        import torch

        sources = deque(np.frombuffer(piece, dtype=np.uint8) for piece in payload.pieces if memoryview(piece).nbytes)
        works = entry.works
        try:
            for _, size in _pieces(payload.runs, chunk):
                if sources[0].size >= size:  # lies in one piece: sent from there
                    whole = sources[0][:size]
                    sources[0] = sources[0][size:]
                else:
                    staging = self._staging()
                    whole = staging[:size]
                    at = 0
                    while at < size:
                        count = min(size - at, sources[0].size)
                        whole[at : at + count] = sources[0][:count]
                        sources[0] = sources[0][count:]
                        at += count
                        if not sources[0].size:
                            sources.popleft()
                    entry.staging.append(staging)
                if sources and not sources[0].size:
                    sources.popleft()
                works.append(self._group.send([torch.from_numpy(whole)], 1 - self._me, _TAG))
            works.append(self._group.send([torch.zeros(1, dtype=torch.uint8)], 1 - self._me, _TAG))
        except RuntimeError as error:
            self._broken(error)

    def _staging(self) -> Memory:
        try:
            return self._idle.pop()
        except IndexError:
            return np.empty(_CHUNK, dtype=np.uint8)

    # receiving

    def receive(self, envelope: Envelope, ready: Callable[[Memory], None]) -> None:
        import torch

        if self._group is None or len(envelope.where) != 1 or envelope.where[0] < min(_CHUNK, envelope.total):
            raise WireError("the pair was used before it was ready, or in pieces that are too small")
        memory = self._connection.pool.take(envelope.total)
        tail = torch.zeros(1, dtype=torch.uint8)
        whole = torch.from_numpy(memory)
        try:
            works = [
                self._group.recv([whole[offset : offset + size]], 1 - self._me, _TAG)
                for offset, size in _pieces(envelope.runs, envelope.where[0])
            ]
            works.append(self._group.recv([tail], 1 - self._me, _TAG))
        except RuntimeError as error:
            self._broken(error)
            return
        if self._waiter is None:
            self._waiter = threading.Thread(target=self._wait, name="stream_balancer-gloo", daemon=True)
            self._waiter.start()
        self._arrivals.put((works, tail, memory, ready))

    def _wait(self) -> None:
        number = 0
        while (one := self._arrivals.get()) is not None:
            works, _tail, memory, ready = one
            try:
                for work in reversed(works):  # the tail first
                    work.wait(_FOR_EVER)
            except RuntimeError as error:
                self._broken(error)
                self._abandoned = one  # gloo may still know this memory
                return
            number += 1
            note(self._connection, "torch_dist", b"S" + number.to_bytes(8, "little"))
            self._connection.io.do(lambda ready=ready, memory=memory: ready(memory))
            del one, works, memory, ready

    # the end

    def _broken(self, error: Exception) -> None:
        text = str(error).split("\n", 1)[0][:200]
        self._connection.io.do(lambda: self._connection.fail(ConnectionResetError(f"gloo: {text}")))

    def close(self) -> None:
        """Wakes whoever waits in gloo: a wait that expires breaks the pair."""
        if self._closed:
            return
        self._closed = True
        self._addresses.put(None)
        self._arrivals.put(None)
        group = self._group
        if group is not None:
            self._connection.io.work(lambda: _poison(group, 1 - self._me))


def _poison(group: Any, peer: int) -> None:
    import torch

    try:
        group.recv([torch.zeros(1)], peer, _SPARE_TAG).wait(timedelta(milliseconds=1))
    except RuntimeError:
        pass


def _pieces(runs: Sequence[int], chunk: int) -> Iterator[tuple[int, int]]:
    for offset, size in zip(runs[::2], runs[1::2], strict=True):
        for at in range(offset, offset + size, chunk):
            yield at, min(chunk, offset + size - at)


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
