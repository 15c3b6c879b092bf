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
    receiver  note seen               the sender may let go of its oldest payload
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
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stream_balancer.errors import WireError
from stream_balancer.net.movers.common import Mover

if TYPE_CHECKING:
    from stream_balancer.net.connection import Connection
    from stream_balancer.net.messages import Envelope
    from stream_balancer.wire.payload import Memory, Payload

_PIECE_BYTES = 8 * 2**20
"""Sent at a time: smaller ones cost more round trips, larger ones leave gloo idle while the first is packed."""
_MOST_STAGED_BYTES = 2**28
"""On their way, of one connection. A payload that would be beyond it goes by the socket, from where it lies."""
_FOR_EVER = timedelta(days=3650)
_TAG, _SPARE_TAG = 1, 7
_BUILD_S, _PROOF_S = 2.0, 10.0
_devices: dict[str, Any] = {}


def _pieces(runs: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Place and size of what is sent at a time. The same at both ends."""
    for at, size in zip(runs[::2], runs[1::2], strict=True):
        for begin in range(at, at + size, _PIECE_BYTES):
            yield begin, min(_PIECE_BYTES, at + size - begin)


class _Transfer(NamedTuple):
    """Objects that must live until all bytes are there: gloo's own operations keep nothing."""

    memory: Memory
    works: list[Any]
    tensors: list[Any]


class TorchDist(Mover):
    """An end of the mover. Threads: one of gloo's for all pairs of the process, and one here where bytes arrive."""

    name, number = "torch_dist", 2

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        # ranks of the group of two: the acceptor is 0
        self._me = 1 if connection.handshake.joins else 0
        self._store: Any = None
        self._group: Any = None
        # None in it ends the wait: the connection is over
        self._addresses: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._arrivals: queue.SimpleQueue[tuple[_Transfer, Callable[[Memory], None]] | None] = queue.SimpleQueue()
        self._waits = self._closed = False
        self._on_their_way: deque[_Transfer] = deque()
        self._abandoned: object = None

    @staticmethod
    def available() -> bool:
        try:
            import torch.distributed as dist
        except ImportError:
            return False
        return dist.is_available() and dist.is_gloo_available()

    def begin(self) -> None:
        # gloo's constructor blocks until both ends are there
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
                self._warn(error)
            return
        self._group = group
        if self._closed:
            self._poison()
        self._tell(b"R")

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
        if body[:1] == b"A":
            self._addresses.put(body[1:])
        elif body == b"R":
            self.ready = True
        elif body == b"S" and self._on_their_way:
            self._on_their_way.popleft()
        else:
            raise WireError("a note that makes no sense for torch_dist")

    # sending

    def send(self, payload: Payload, go: Callable[[Sequence[int]], None]) -> bool:
        staged = sum(one.memory.size for one in self._on_their_way)
        if self._group is None or staged + payload.size > _MOST_STAGED_BYTES:
            return False
        # taken here, as the pool belongs to the I/O thread, and not touched where nothing must be packed
        one = _Transfer(self._connection.pool.take(payload.size), [], [])
        # the order of sending is the order in which the other end says seen
        self._on_their_way.append(one)
        # the message leaves first: the other end posts its receives while this one packs
        go(())
        self._pack(partial(self._post, payload, one))
        return True

    def _post(self, payload: Payload, one: _Transfer) -> None:
        """In the thread that packs. What lies in one piece is sent from there."""
        import torch

        parts = deque(np.frombuffer(piece, dtype=np.uint8) for piece in payload.views())
        source, packed = (one.memory, 0) if len(parts) != 1 else (parts[0], payload.size)
        done = 0
        for _, size in _pieces(payload.runs):
            # while the pieces before it are on their way
            while packed < done + size:
                part = parts.popleft()
                source[packed : packed + part.size] = part
                packed += part.size
            # by its address: torch warns of memory that must not be written to, which it does not do
            piece = (ctypes.c_uint8 * size).from_address(source.ctypes.data + done)
            tensor = torch.frombuffer(piece, dtype=torch.uint8)
            one.tensors.append((tensor, source))
            one.works.append(self._group.send([tensor], 1 - self._me, _TAG))
            done += size
        # the tail that the receiver waits for
        one.works.append(self._group.send([torch.zeros(1, dtype=torch.uint8)], 1 - self._me, _TAG))

    # receiving

    def receive(self, envelope: Envelope, ready: Callable[[Memory], None]) -> None:
        """Post what is to come, and wait for its tail elsewhere."""
        import torch

        if self._group is None:
            raise WireError("the pair was used before it was ready")
        one = _Transfer(self._connection.pool.take(envelope.total), [], [])
        whole = torch.from_numpy(one.memory)
        one.tensors.extend(whole[at : at + size] for at, size in _pieces(envelope.runs))
        one.tensors.append(torch.zeros(1, dtype=torch.uint8))
        try:
            one.works.extend(self._group.recv([tensor], 1 - self._me, _TAG) for tensor in one.tensors)
        except RuntimeError as error:
            self._broken(error)
            return
        if not self._waits:
            self._waits = True
            self._start(self._wait, "stream_balancer-gloo")
        # in order, since gloo matches by order within a tag
        self._arrivals.put((one, ready))

    def _wait(self) -> None:
        while (arrival := self._arrivals.get()) is not None:
            one, ready = arrival
            try:
                # the tail first
                for work in reversed(one.works):
                    work.wait(_FOR_EVER)
            except RuntimeError as error:
                self._broken(error)
                # gloo may still know this memory
                self._abandoned = one
                return
            self._tell(b"S")
            self._connection.io.do(partial(ready, one.memory))
            # waiting for the next must not keep its memory alive
            del arrival, one, ready, work

    # the end

    def _broken(self, error: Exception) -> None:
        failure = ConnectionResetError(f"gloo: {str(error).split(chr(10), 1)[0][:200]}")
        self._connection.io.do(partial(self._connection.fail, failure))

    def close(self) -> None:
        """Wakes whoever waits in gloo."""
        self._closed, self.ready = True, False
        self._addresses.put(None)
        self._arrivals.put(None)
        if self._group is not None:
            self._connection.io.work(self._poison)

    def _poison(self) -> None:
        """A wait that expires breaks the pair."""
        import torch

        with suppress(RuntimeError):
            # on a tag that nobody sends on, so it is sure to expire
            self._group.recv([torch.zeros(1)], 1 - self._me, _SPARE_TAG).wait(timedelta(milliseconds=1))


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
            mover._tell(b"A" + bytes(value))

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
