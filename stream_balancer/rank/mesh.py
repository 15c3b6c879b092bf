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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import anyio
import msgspec
from torch import Tensor

from stream_balancer.errors import ClosedResourceError, EndOfStream, RankLostError, to_raise
from stream_balancer.transport import Asked, Port, Report
from stream_balancer.transport.buffers import BufferPool
from stream_balancer.transport.channel import Channel, Outgoing, Sendable, Source
from stream_balancer.transport.event_loop import InLoop
from stream_balancer.transport.gloo.channel import GlooChannel
from stream_balancer.transport.gloo.torch_dist import join_pair, reach
from stream_balancer.transport.rank_port import Decode, RankPort
from stream_balancer.transport.rank_session import RankSession
from stream_balancer.transport.sockets.joiner import Where
from stream_balancer.types import RankBatch
from stream_balancer.wire.messages import (
    Batch,
    EndBalancer,
    JoinPeer,
    JoinRank,
    PolicyVersion,
    StatisticsRequest,
    StepComplete,
    StepHeld,
    StepReport,
)
from stream_balancer.wire.rank_batch import checksum, decode
from stream_balancer.wire.statistics import reply_to

__all__ = ["LeaderPort", "PeerPort", "Place", "Received", "place_in"]

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


def _channel(
    source: Where, place: Place, side: Literal[0, 1], *, incarnation: int, options: Mapping[str, Any]
) -> GlooChannel:
    """Between a leader (``side`` 0) and the peer at ``place``: they find each other at the controller, once per
    incarnation, however late one of them starts."""
    joiner, link = reach(source, {**options, "shared_memory": False})
    request = JoinPeer(f"{place.rank}/{incarnation}/{place.peer}", side)
    return GlooChannel(
        f"sb-peer{place.rank}.{incarnation}.{place.peer}",
        partial(join_pair, joiner, request, side),
        joiner.cancel,
        link,
        pool=BufferPool(keep=0),
        offer=None if side else 0,
    )


class PeerPort(RankPort):
    """A peer's end: a rank's port whose controller is the leader."""

    def __init__(
        self,
        source: Where,
        place: Place,
        *,
        incarnation: int,
        max_batch_bytes: int,
        decode: Decode = decode,
        pinned: bool = False,
        **options: Any,
    ) -> None:
        """``options``: as for :func:`reach`."""
        channel = _channel(source, place, 1, incarnation=incarnation, options=options)
        request = JoinRank(place.rank, place.dp_size, incarnation, _PEER_DEPTH, max_batch_bytes)
        super().__init__(channel, request, decode=decode, pinned=pinned, linger_s=channel.options.linger_s)
        self.start()

    def next_part(self, step: int) -> RankBatch | StepComplete | None:
        return Port.next_part(self, step)

    def begin(self, step: int, number: int) -> int | None:
        return Port.begin(self, step, number)

    def _explain_close(self, cause: str) -> str:
        return self._explain_loss(cause)  # a leader closes when it is lost itself

    def _explain_loss(self, cause: str) -> str:
        return (
            f"rank {self.rank} lost its leader, the process that receives for its model-parallel peers: {cause}. What "
            "was not acknowledged is held by the balancer. Restart all processes of this rank under a new incarnation"
        )


class Received:
    """What the leader's own port has received and decoded, as it came: to be passed on."""

    def __init__(self, decode: Decode = decode) -> None:
        self._decode = decode
        self._by_step: dict[int, tuple[Batch, Tensor]] = {}

    def decode(self, message: Batch, buffer: Tensor) -> RankBatch:
        """For the leader's own port."""
        self._by_step[message.step] = message, buffer
        return self._decode(message, buffer)

    def pop(self, step: int) -> tuple[Batch, Tensor]:
        """The message and its buffer, once."""
        return self._by_step.pop(step)


class _PeerSession(RankSession):
    """The leader's end of a peer: it passes bytes on. Its "event loop" is the lock of :class:`LeaderPort`."""

    def __init__(self, place: Place, channel: GlooChannel, request: JoinRank, in_loop: InLoop) -> None:
        super().__init__(channel, request, in_loop)
        self._who = f"model-parallel peer {place.peer} of rank {place.rank}"

    def forward(self, step: int, item: Sendable) -> None:
        """As :meth:`send`, a batch that was received."""
        self._use_credit(step)
        self._channel.send(item)

    def _lost(self, cause: str) -> RankLostError:
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


class LeaderPort(Port):
    """The leader's end: what the controller sends, after it has been passed on."""

    def __init__(
        self,
        inner: Port,
        received: Received,
        source: Where,
        place: Place,
        *,
        incarnation: int,
        max_batch_bytes: int,
        **options: Any,
    ) -> None:
        """``inner``: the port to the controller, which decodes with ``received``. ``options``: as for
        :func:`reach`."""
        self.rank, self.dp_size, self.control = inner.rank, inner.dp_size, inner.control
        self._inner, self._received = inner, received
        self._open: deque[_Open] = deque()
        self._leaving = False
        self._version: int | None = None  # that the peers know
        self._lock = threading.RLock()
        self._quiet = threading.Condition(self._lock)
        self._on_way: RankBatch | None = None
        self._on_way_to = 0  # peers that do not have it yet
        self._ready: deque[RankBatch] = deque()
        self._end: Exception | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._sessions: list[_PeerSession] = []
        self._linger_s = 0.0
        request = JoinRank(place.rank, place.dp_size, incarnation, _PEER_DEPTH, max_batch_bytes)
        for peer in range(1, place.num_peers):
            there = place._replace(peer=peer)
            channel = _channel(source, there, 0, incarnation=incarnation, options=options)
            self._linger_s = channel.options.linger_s
            self._sessions.append(_PeerSession(there, channel, request, self._locked))
        inner.subscribe(partial(self._locked, self._pump))
        for session in self._sessions:
            session.subscribe(self._pump)
            session.channel.start(session)

    # Port

    def subscribe(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def take(self) -> RankBatch | None:
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

    def report(self, done: StepReport | StepHeld, columns: Mapping[str, Tensor] | None = None) -> None:
        with self._lock:
            self._note_done(0, done)

    def leave(self) -> None:
        with self._lock:
            self._leaving = True
            self._pump()

    def close(self) -> None:
        """After the end it waits for the peers, who may still be busy with the last batch."""
        with self._lock:
            ended = isinstance(self._end, EndOfStream)
            self._finish(ClosedResourceError())
            if ended:
                self._quiet.wait_for(lambda: not any(session.live for session in self._sessions))
        for session in self._sessions:
            session.channel.close()
        for session in self._sessions:
            session.channel.wait_closed(self._linger_s)
            session.channel.abort()
        self._inner.close()

    async def aclose(self) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.close, limiter=anyio.CapacityLimiter(1))

    # from the links' threads and the inner port's

    def _locked(self, function: Callable[[], object]) -> None:
        with self._lock:
            function()

    def _pump(self) -> None:
        """Pass on what has come, hand out what has arrived everywhere. The lock is held."""
        self._pass_version_on()
        for number, session in enumerate(self._sessions, start=1):
            try:
                while (done := session.report()) is not None:
                    if isinstance(done, PolicyVersion | EndBalancer | StatisticsRequest):
                        self._ask_for(session, done)
                    else:
                        self._note_done(number, done)
            except EndOfStream:
                pass
            except Exception as error:  # noqa: BLE001 - ends this feed, whatever it was
                self._fail(error)
        if self._leaving and not self._open:
            self._inner.leave()
        self._quiet.notify_all()
        if self._on_way is not None and self._on_way_to == 0 and self._end is None:
            self._ready.append(self._on_way)
            self._on_way = None
            self._tell()
        if self._end is None and self._on_way is None and not self._ready:
            self._pass_on()

    def _pass_version_on(self) -> None:
        version = self.control.version
        if version is not None and version != self._version:
            self._version = version
            for session in self._sessions:
                session.notify(PolicyVersion(version))

    def _ask_for(self, session: _PeerSession, asked: Asked) -> None:
        """What a peer sets, ends or asks for, in the name of the rank."""
        if isinstance(asked, PolicyVersion):
            if self.control.version is None or asked.version > self.control.version:
                self.control.set_version(asked.version)
        elif isinstance(asked, EndBalancer):
            self.control.end()
        else:
            number = asked.number
            self.control.ask_statistics(lambda statistics: session.notify(reply_to(number, statistics)))

    def _pass_on(self) -> None:
        if not all(session.credits for session in self._sessions):
            return
        try:
            batch = self._inner.take()
        except EndOfStream as end:
            for session in self._sessions:
                session.end()
            self._finish(end)
            return
        except Exception as error:  # noqa: BLE001 - the controller is lost, or refused us
            self._fail(error)
            return
        if batch is not None:
            processes = range(len(self._sessions) + 1)
            self._open.append(_Open(batch.step, set(processes), set(processes), StepReport(batch.step, 0.0)))
            self._on_way, self._on_way_to = batch, len(self._sessions)
            forwarded = partial(self._forwarded, *self._received.pop(batch.step))
            for session in self._sessions:
                session.forward(batch.step, forwarded)

    def _forwarded(self, message: Batch, buffer: Tensor, _: Channel) -> Outgoing:
        """As it came, with a checksum over all of it. In a channel's thread."""
        sent = buffer[: message.wire_bytes]
        message = msgspec.structs.replace(message, wire_crc=checksum(message, buffer))
        on_sent = partial(self._locked, self._on_delivered)
        return Outgoing(message, [Source(message.wire_bytes, lambda _: iter(()), lambda: [sent], on_sent)])

    def _on_delivered(self) -> None:
        self._on_way_to -= 1
        self._pump()

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
            for session in self._sessions:
                session.channel.close(str(error).split("\n", 1)[0][:200])

    def _finish(self, end: Exception) -> None:
        if self._end is None:
            self._end = end
            self._tell()

    def _tell(self) -> None:
        for callback in self._callbacks:
            callback()
