"""Model-parallel ranks: one process of each DP rank receives, its TP, CP and PP peers get the same bytes from it.

::

    controller ==> leader of DP rank 0 --> peer 1, peer 2, ...      one pair each, frames as in ``wire``
               ==> leader of DP rank 1 --> peer 1, peer 2, ...

The leader hands a batch to its own trainer once every peer has it, so that nobody can change bytes that are still on
their way; a batch is acknowledged to the controller once every process has acknowledged it. Peers check step, sizes,
description and a checksum over all bytes. A process of the group that goes away is noticed by the leader, and through
it by the others, as on every other link: no wait expires, none hangs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import anyio
from torch import Tensor
from torch._C._distributed_c10d import Store

from stream_balancer.errors import ClosedResourceError, EndOfStream, RankLostError, to_raise
from stream_balancer.transport import Port, Report
from stream_balancer.transport.buffers import SlabPool
from stream_balancer.transport.gloo.endpoint import Pair
from stream_balancer.transport.gloo.joiner import Joiner
from stream_balancer.transport.gloo.links import CHUNK_BYTES, ControllerLink, Decode, PortBase, chunks
from stream_balancer.transport.gloo.torch_dist import join_pair
from stream_balancer.types import RankBatch
from stream_balancer.wire.messages import JoinPeer, StepHeld, StepReport
from stream_balancer.wire.share import Frame, Kind, checksum, decode, slab_of

__all__ = ["LeaderPort", "PeerPort", "Place", "place_in"]

_PEER_DEPTH = 2  # batches that may lie ready at a peer: it must be able to fall behind its leader by a little


class Place(NamedTuple):
    """Where a process stands."""

    rank: int
    """DP rank."""
    dp_size: int
    peer: int
    """Number within its DP rank; 0 leads."""
    num_peers: int
    """Processes of this DP rank."""


def place_in(mesh: Any, dp_dim: str | Sequence[str]) -> Place:
    """This process's place in a DeviceMesh. ``dp_dim``: the dimension, or dimensions (HSDP: replicate, shard), along
    which data differs; along all others it is the same. Raises ValueError for a dimension the mesh has not."""
    names: tuple[str, ...] = mesh.mesh_dim_names or ()
    along = (dp_dim,) if isinstance(dp_dim, str) else tuple(dp_dim)
    if not along or not set(along) <= set(names):
        raise ValueError(f"dp_dim={dp_dim!r} names dimensions of the mesh, which are {names}")
    at: list[int] | None = mesh.get_coordinate()
    if at is None:
        raise ValueError("this process is not part of the mesh: only its members iterate a RankFeed over it")
    coordinates = [
        (name in along, here, mesh.size(dim)) for dim, (name, here) in enumerate(zip(names, at, strict=True))
    ]
    rank, dp_size = _flatten([(here, size) for is_data, here, size in coordinates if is_data])
    peer, num_peers = _flatten([(here, size) for is_data, here, size in coordinates if not is_data])
    return Place(rank, dp_size, peer, num_peers)


def _flatten(dims: list[tuple[int, int]]) -> tuple[int, int]:
    """Coordinate and size of several dimensions taken as one, the first varying slowest."""
    at, total = 0, 1
    for here, size in dims:
        at, total = at * size + here, total * size
    return at, total


class _Meeting:
    """How a leader (0) and one of its peers (1) find each other: at the controller, once per incarnation."""

    def __init__(
        self, source: Store | str, name: str, token: str | None, place: Place, incarnation: int, me: Literal[0, 1]
    ) -> None:
        self._joiner = Joiner(source, name=name, token=token)
        self._request = JoinPeer(f"{place.rank}/{incarnation}/{place.peer}", me)

    def pair(self, host: str | None = None) -> Pair:
        """Wait for the other one, however late it starts. Raises ClosedResourceError once cancelled."""
        return join_pair(self._joiner, self._request, self._request.side, host)

    def cancel(self) -> None:
        """Make a waiting :meth:`pair` raise. From any thread."""
        self._joiner.cancel()


class PeerPort(PortBase):
    """A peer's end: a rank's port whose controller is the leader."""

    def __init__(
        self,
        source: Store | str,
        place: Place,
        *,
        incarnation: int,
        max_batch_bytes: int,
        decode: Decode = decode,
        pinned: bool = False,
        host: str | None = None,
        name: str = "stream_balancer",
        token: str | None = None,
        keepalive_s: float = 10.0,
        linger_s: float = 5.0,
    ) -> None:
        super().__init__(
            rank=place.rank,
            dp_size=place.dp_size,
            incarnation=incarnation,
            depth=_PEER_DEPTH,
            max_batch_bytes=max_batch_bytes,
            decode=decode,
            pinned=pinned,
            shared_memory=False,
            keepalive_s=keepalive_s,
            linger_s=linger_s,
        )
        self._host = host
        self._meeting = _Meeting(source, name, token, place, incarnation, 1)
        self._start()

    def _connect(self) -> Pair:
        return self._meeting.pair(self._host)

    def _cancel_connect(self) -> None:
        self._meeting.cancel()

    def _explain_loss(self, cause: str) -> str:
        return (
            f"rank {self.rank} lost its leader, the process that receives for its model-parallel peers: {cause}. What "
            "was not acknowledged is held by the balancer. Restart all processes of this rank under a new incarnation"
        )


class _PeerLink(ControllerLink):
    """The leader's end. Its "event loop" is the lock of :class:`LeaderPort`."""

    def __init__(self, place: Place, meeting: _Meeting, **options: Any) -> None:
        super().__init__(
            rank=place.rank,
            depth=_PEER_DEPTH,
            connect=lambda: meeting.pair(options["host"]),
            cancel_connect=meeting.cancel,
            settled=lambda _: None,
            pool=SlabPool(keep=0),
            narrow=False,
            shared_memory=False,
            **{key: value for key, value in options.items() if key != "host"},
        )
        self._who = f"model-parallel peer {place.peer} of rank {place.rank}"
        self._trailers: deque[int] = deque()  # numbers of the frames behind batches that have not been seen yet
        self.delivered = 0
        """Batches that have arrived there."""

    def _send_share(self, share: RankBatch) -> None:
        pair = self._pair
        if pair is None:
            return
        frame, slab = slab_of(share)
        pieces = chunks(slab, CHUNK_BYTES, frame.wire_bytes)
        sum_of_all = checksum(frame, slab)
        self._send_frame(frame._replace(chunk_bytes=CHUNK_BYTES, slab=0))
        works = [pair.send(piece) for piece in pieces]
        self._trailers.append(self._sent + 1)
        self._send_frame(Frame(Kind.TRAILER, step=frame.step, meta_crc=sum_of_all), works, slab)

    def _note(self, buffer: Tensor) -> Frame:
        frame = super()._note(buffer)
        while self._trailers and self._trailers[0] <= frame.seen:
            self._trailers.popleft()
            self.delivered += 1
            self._in_loop(self._changed_in_loop)
        return frame

    def _rank_lost(self, cause: str) -> RankLostError:
        return RankLostError(
            f"{self._who} was lost: {cause}. What was not acknowledged is held by the balancer. Restart all processes "
            "of this rank under a new incarnation",
            rank=self.rank,
            step=self._last_step,
            cause=f"{self._who}: {cause}",
        )


@dataclass
class _Open:
    """A batch that some process of this rank has not acknowledged."""

    step: int
    missing: set[int]
    busy: set[int]
    """Processes that are not through with it."""
    done: StepReport
    """The slowest's figures."""


def _slowest(one: StepReport, other: StepReport) -> StepReport:
    """Of two processes of a rank, which share its work: what it took the slower, as far as each has timed it."""
    timed = [done.compute_s for done in (one, other) if done.compute_s is not None]
    return StepReport(
        one.step,
        seconds=max(one.seconds, other.seconds),
        compute_s=max(timed, default=None),
        waited_s=max(one.waited_s, other.waited_s),
    )


class LeaderPort:
    """The leader's end: what the controller sends, after it has been passed on."""

    def __init__(
        self,
        inner: Port,
        source: Store | str,
        place: Place,
        *,
        incarnation: int,
        max_batch_bytes: int,
        decode: Decode | None,
        host: str | None = None,
        name: str = "stream_balancer",
        token: str | None = None,
        keepalive_s: float = 10.0,
        linger_s: float = 5.0,
    ) -> None:
        """``decode``: how this process wants the batches it keeps, if not as ``inner`` gives them."""
        self.rank, self.dp_size = inner.rank, inner.dp_size
        self._inner = inner
        self._decode = decode
        self._open: deque[_Open] = deque()
        self._leaving = False
        self._lock = threading.RLock()
        self._quiet = threading.Condition(self._lock)
        self._forwarded = 0
        self._on_way: RankBatch | None = None
        self._ready: deque[RankBatch] = deque()
        self._end: Exception | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._links = [
            _PeerLink(
                there := place._replace(peer=peer),
                _Meeting(source, name, token, there, incarnation, 0),
                incarnation=incarnation,
                max_bytes=max_batch_bytes,
                in_loop=self._locked,
                keepalive_s=keepalive_s,
                linger_s=linger_s,
                host=host,
            )
            for peer in range(1, place.num_peers)
        ]
        inner.subscribe(partial(self._locked, self._pump))
        for link in self._links:
            link.subscribe(self._pump)
            link._start()

    # Port

    def subscribe(self, callback: Callable[[], None]) -> None:
        """See :class:`Port`."""
        self._callbacks.append(callback)

    def take(self) -> RankBatch | None:
        """See :class:`Port`."""
        with self._lock:
            if not self._ready:
                self._pump()
            if self._ready:
                batch = self._ready.popleft()
                self._pump()
                return batch
            if self._end is not None:
                raise to_raise(self._end)
            return None

    def report(self, done: StepReport | StepHeld) -> None:
        """See :class:`Port`."""
        with self._lock:
            self._note_done(0, done)

    def leave(self) -> None:
        """See :class:`Port`."""
        with self._lock:
            self._leaving = True
            self._pump()

    def close(self) -> None:
        """See :class:`Port`. After the end it waits for the peers, who may still be busy with the last batch."""
        with self._lock:
            ended = isinstance(self._end, EndOfStream)
            self._finish(ClosedResourceError())
            if ended:
                self._quiet.wait_for(lambda: not any(link.live for link in self._links))
        for link in self._links:
            link._shut()
        self._inner.close()

    async def aclose(self) -> None:
        """See :class:`Port`."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.close, limiter=anyio.CapacityLimiter(1))

    # from the links' threads and the inner port's

    def _locked(self, function: Callable[[], object]) -> None:
        with self._lock:
            function()

    def _pump(self) -> None:
        """Pass on what has come, hand out what has arrived everywhere. The lock is held."""
        for number, link in enumerate(self._links, start=1):
            try:
                while (done := link.report()) is not None:
                    self._note_done(number, done)
            except EndOfStream:
                pass
            except Exception as error:  # noqa: BLE001 - ends this feed, whatever it was
                self._fail(error)
        if self._leaving and not self._open:
            self._inner.leave()
        self._quiet.notify_all()
        if self._on_way is not None and all(link.delivered == self._forwarded for link in self._links):
            self._ready.append(self._on_way)
            self._on_way = None
            self._tell()
        if self._end is None and self._on_way is None and not self._ready:
            self._pass_on()

    def _pass_on(self) -> None:
        if not all(link.credits for link in self._links):
            return
        try:
            batch = self._inner.take()
        except EndOfStream as end:
            for link in self._links:
                link.end()
            self._finish(end)
            return
        except Exception as error:  # noqa: BLE001 - the controller is lost, or refused us
            self._fail(error)
            return
        if batch is not None:
            for link in self._links:
                link.send(batch)
            processes = range(len(self._links) + 1)
            self._open.append(_Open(batch.step, set(processes), set(processes), StepReport(batch.step, 0.0)))
            self._forwarded += 1
            self._on_way = batch if self._decode is None else self._decode(*slab_of(batch))

    def _note_done(self, process: int, done: Report) -> None:
        for entry in self._open:
            if entry.step == done.step and isinstance(done, StepHeld):
                entry.busy.discard(process)
                if not entry.busy:
                    self._inner.report(done)
            elif entry.step == done.step and isinstance(done, StepReport):
                entry.missing.discard(process)
                entry.done = _slowest(entry.done, done)
        while self._open and not self._open[0].missing:
            self._inner.report(self._open.popleft().done)

    def _fail(self, error: Exception) -> None:
        """End here, and let the peers know at once."""
        if self._end is None:
            self._finish(error)
            for link in self._links:
                link._break()

    def _finish(self, end: Exception) -> None:
        if self._end is None:
            self._end = end
            self._tell()

    def _tell(self) -> None:
        for callback in self._callbacks:
            callback()
