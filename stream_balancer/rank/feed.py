"""The rank's side: an iterator over this rank's shares, with its tensors on the device. Plain loop or ``async for``.

::

    for batch in sb.RankFeed("tcp://127.0.0.1:29400", rank=3, dp_size=8):
        for mb in batch.micro_batches: ...

Asking for the next batch acknowledges the one before; leaving the loop early does not. A trainer that commits less
often says so itself::

    for batch in sb.RankFeed(..., auto_ack=False):
        accumulate(batch)
        if time_to_step(batch):
            optimizer.step()
            batch.ack()             # this one and every one before it

What is not acknowledged is delivered again, in the same plan, after a reconnect or a restart.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, cast

import anyio
import torch

from stream_balancer.errors import AlreadyInUseError, ClosedResourceError, EndOfStream
from stream_balancer.rank.acknowledgements import Taken
from stream_balancer.rank.device import Uploader, stopwatch_on
from stream_balancer.transport import Port
from stream_balancer.transport.event_loop import loop_caller
from stream_balancer.transport.rank_port import Decode
from stream_balancer.transport.threads import Errand, OfOneProcess, ThreadEvent, refuse_in_event_loop
from stream_balancer.types import RankBatch

__all__ = ["RankFeed"]

DEFAULT_MAX_BATCH_BYTES = 4 * 2**30  # one rank's share; far above text, below what would take a trainer's host memory
_LEADERS_OPTIONS = ("shared_memory", "connect_timeout_s", "rejoin")  # between leader and controller only


class RankFeed(OfOneProcess):
    """Iterates over one rank's shares, in step order, each exactly once. ``for`` and ``async for`` (asyncio, trio).

    Tensors of a batch stay valid for as long as you hold them: their memory is reused only when the last of them is
    gone. Keep none beyond the step if you want the feed to stay within ``depth + 1`` batches of memory.

    When the last batch is acknowledged the iteration ends; with ``auto_ack=False`` it ends when the last batch was
    given, and the feed takes its leave with the last ``batch.ack()``.

    Raises, from the iteration: RankLostError if the controller went away, AlreadyInUseError if this rank is already
    connected or two threads iterate one feed, ValueError if the controller balances for another number of ranks or has
    another token, or if there is no such host, WireError if something else listens there, ClosedResourceError after
    :meth:`close`.
    """

    _in_another_process = "make it where the rank trains: RankFeed(address, rank=..., dp_size=...)"

    def __init__(
        self,
        source: Any = None,
        *,
        rank: int | None = None,
        dp_size: int | None = None,
        depth: int = 2,
        auto_ack: bool = True,
        mesh: Any = None,
        dp_dim: str | Sequence[str] = "dp",
        device: str | torch.device = "cpu",
        max_batch_bytes: int = DEFAULT_MAX_BATCH_BYTES,
        incarnation: int | None = None,
        **options: Any,
    ) -> None:
        """Connect in the background; returns at once.

        ``source``: ``"tcp://host:port"`` of a controller, a c10d Store, None for the store, rank and world size of the
        initialised torch.distributed world, or a :class:`~stream_balancer.transport.Port`. ``depth``: batches
        that may lie ready besides the one in use. ``auto_ack``: asking for the next batch acknowledges the last one;
        otherwise :meth:`RankBatch.ack` does, and what is not acknowledged does not hold up the next batches.
        ``mesh``: a DeviceMesh in place of ``rank`` and ``dp_size``; processes that differ only along dimensions other
        than ``dp_dim`` (tensor, context, pipeline parallel) get the same batches, and all of them iterate.
        ``dp_dim`` may name several dimensions (HSDP). ``device``: where batches are wanted; copies run beside the
        step before. ``incarnation``: how often this rank was started before (default:
        TORCHELASTIC_RESTART_COUNT, else 0). ``options``: ``token`` (as the transport's; default: the environment's
        ``STREAM_BALANCER_TOKEN``), ``connect_timeout_s`` (for the first connection; by default it is tried for ever,
        with a warning now and then), ``host``, ``name``, ``keepalive_s``, ``linger_s`` of the transport, ``rejoin``:
        the controller has a journal, and whoever watches over it starts it again under the same address, or in the same
        store. Then the loss of the controller raises nothing: the feed waits for the next one, with a warning, and no
        step that it gave is given twice (default: only over Ray, where the balancer's actor has a journal).
        """
        if depth < 1:
            raise ValueError(f"depth must be >= 1, not {depth}: with no room for a batch none could ever be sent")
        device = torch.device(device)
        self._device = device
        self._uploader = None if device.type == "cpu" else Uploader(device)
        if incarnation is None:
            incarnation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        options |= {"incarnation": incarnation, "max_batch_bytes": max_batch_bytes}
        if hasattr(source, "take"):
            self._port = _given_port(source, mesh, self._uploader)
        elif mesh is None:
            self._port = _open_port(source, rank, dp_size, depth, self._uploader, options)
        elif rank is not None or dp_size is not None:
            raise ValueError("give RankFeed either mesh= or rank= and dp_size=: the mesh says both")
        else:
            self._port = _open_in_mesh(source, mesh, dp_dim, depth, self._uploader, options)
        self._wake: Callable[[], object] | None = None
        self._errand: Errand[RankBatch] | None = None
        self._busy = threading.Lock()
        self._auto_ack = auto_ack
        self._taken = Taken(self._port)
        self._closed = False
        self._asked_at: float | None = None
        self._port.subscribe(self._on_news)

    @property
    def rank(self) -> int:
        """This DP rank."""
        return self._port.rank

    @property
    def dp_size(self) -> int:
        """DP ranks that take part."""
        return self._port.dp_size

    @property
    def auto_ack(self) -> bool:
        """Whether asking for the next batch acknowledges the last one."""
        return self._auto_ack

    @property
    def waiting_s(self) -> float:
        """Seconds the trainer has now waited for the next batch; 0.0 while it has one in hand."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else time.monotonic() - asked_at

    def acknowledge_through(self, step: int) -> None:
        """Acknowledge ``step`` and every one before it: :meth:`RankBatch.ack` for code that kept the number only. From
        any thread, never blocks, idempotent. Raises ClosedResourceError if the feed was closed before."""
        self._taken.acknowledge(step)

    def close(self) -> None:
        """Leave: the controller is told, threads end. A batch that was not acknowledged will be delivered again.
        Idempotent."""
        self._closed = True
        self._taken.close()
        self._port.close()
        self._on_news()

    @contextmanager
    def timed(self, device: str | torch.device | None = None) -> Iterator[None]:
        """Time what this rank computes by itself for the batch in hand: forward and backward, before it waits for the
        other ranks in a collective. Several times in a batch add up.

        A ``CalibratedCost`` learns from these seconds, and ``statistics()`` takes the measured idle time from them;
        without them a step counts from taking the batch to asking for the next, in which all ranks look alike once
        they have met. With DDP, that means micro-batches under ``no_sync()``. ``device``: where the work runs, if it
        is not the feed's; on an accelerator its own clock counts, and is read when the batch is acknowledged.
        """
        stopwatch = stopwatch_on(self._device if device is None else torch.device(device))
        with stopwatch:
            yield
        self._taken.computed(stopwatch.seconds)

    def add_compute_s(self, seconds: float) -> None:
        """As :meth:`timed`, for a trainer that has the seconds from a clock of its own. Raises ValueError unless they
        are a finite number >= 0."""
        if not 0 <= seconds < math.inf:
            raise ValueError(f"add_compute_s() takes seconds >= 0, not {seconds!r}")
        self._taken.computed(lambda: seconds)

    async def aclose(self) -> None:
        """:meth:`close`, without blocking the event loop."""
        self._closed = True
        self._taken.close()
        await self._port.aclose()
        self._on_news()

    def __iter__(self) -> Iterator[RankBatch]:
        return self

    def __next__(self) -> RankBatch:
        """The next share. Blocks until there is one; Ctrl-C ends the wait, and the share comes from the next call."""
        # Taking a share and acknowledging the last one change the port, which an interrupt must not cut in two. See
        # _calls for why the result cannot get lost.
        refuse_in_event_loop("`for` over a RankFeed", "There, use `async for`")
        errand = self._errand
        if errand is None or errand.taken:
            errand = self._errand = Errand(self._next)
        elif errand.thread != threading.get_ident():
            raise AlreadyInUseError(_TWO_ITERATE)
        errand.wait()
        error = errand.error
        if error is not None:
            errand.error, errand.taken = None, True
            try:
                raise error
            finally:
                del error  # it refers to this frame
        if self._uploader is not None:
            self._uploader.hand_over(cast("RankBatch", errand.result))
        batch, errand.result, errand.taken = errand.result, None, True
        return batch  # type: ignore[return-value]  # a call here would be a step to be interrupted at

    def _next(self) -> RankBatch:
        with self._asking():
            while True:
                arrival = ThreadEvent()
                self._wake = arrival.set
                try:
                    batch = self._take()
                    if batch is not None:
                        return batch
                    arrival.wait()
                except EndOfStream:
                    if self._taken.end():
                        self.close()
                    raise StopIteration from None
                finally:
                    self._wake = None

    def __aiter__(self) -> AsyncIterator[RankBatch]:
        return self

    async def __anext__(self) -> RankBatch:
        """As ``next()``, without blocking the event loop. If cancelled, no share was taken."""
        await anyio.lowlevel.checkpoint()
        with self._asking():
            in_loop = loop_caller()
            while True:
                arrival = anyio.Event()
                self._wake = lambda: in_loop(arrival.set)  # noqa: B023 - each round's own event
                try:
                    batch = self._take()
                    if batch is not None:
                        if self._uploader is not None:
                            self._uploader.hand_over(batch)
                        return batch
                    await arrival.wait()
                except EndOfStream:
                    if self._taken.end():
                        await self.aclose()
                    raise StopAsyncIteration from None
                finally:
                    self._wake = None

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """The trainer waits for the next batch: it is done with the one it has."""
        with _Busy(self._busy):
            self._asked_at = time.monotonic()
            self._taken.done(self._asked_at, acknowledge=self._auto_ack)
            try:
                yield
            finally:
                self._asked_at = None

    def _leave(self) -> None:
        """No more will come: close gracefully once all is acknowledged, so that the last acknowledgement arrives
        though the process may end now."""
        if self._taken.end():
            self._port.leave()

    def _take(self) -> RankBatch | None:
        if self._closed:
            raise ClosedResourceError
        batch = self._port.take()
        if batch is None:
            return None
        asked_at, now = self._asked_at, time.monotonic()
        return self._taken.add(batch, now, 0.0 if asked_at is None else now - asked_at)

    def _on_news(self) -> None:
        wake = self._wake
        if wake is not None:
            wake()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


_TWO_ITERATE = "two threads or tasks iterate one RankFeed. Each batch goes to one of them: let one iterate"


class _Busy:
    """Refuses a second user instead of making it wait."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise AlreadyInUseError(_TWO_ITERATE)

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _given_port(port: Any, mesh: Any, uploader: Uploader | None) -> Port:
    if mesh is not None or uploader is not None:
        raise ValueError(
            "mesh= and device= need the address of a controller or a store, not a port that is open already"
        )
    return cast("Port", port)


def _open_port(
    source: Any,
    rank: int | None,
    dp_size: int | None,
    depth: int,
    uploader: Uploader | None,
    options: dict[str, Any],
    decode: Decode | None = None,
) -> Port:
    from stream_balancer.transport.gloo import torch_dist
    from stream_balancer.transport.sockets.payloads import Fetcher

    if source is None:
        source, world_rank, world_size = torch_dist.current_world()
        rank = world_rank if rank is None else rank
        dp_size = world_size if dp_size is None else dp_size
    if rank is None or dp_size is None:
        raise ValueError(
            "RankFeed needs rank= and dp_size=, or mesh=, unless it runs inside an initialised torch.distributed world"
        )
    if not 0 <= rank < dp_size:
        raise ValueError(f"rank must be in [0, dp_size): rank={rank}, dp_size={dp_size}")
    options = {**options, **_decoding(uploader)} | ({} if decode is None else {"decode": decode})
    if hasattr(source, "open_rank_port"):
        return cast("Port", source.open_rank_port(rank=rank, dp_size=dp_size, depth=depth, **options))
    if uploader is not None:
        options["shared_memory"] = False  # an accelerator does not read it by itself
    options["payloads"] = Fetcher()
    return torch_dist.open_port(source, rank=rank, dp_size=dp_size, depth=depth, **options)


def _open_in_mesh(
    source: Any, mesh: Any, dp_dim: str | Sequence[str], depth: int, uploader: Uploader | None, options: dict[str, Any]
) -> Port:
    from stream_balancer.rank import mesh as _mesh
    from stream_balancer.transport.gloo import torch_dist

    place = _mesh.place_in(mesh, dp_dim)
    if source is None:
        source = torch_dist.current_world()[0]
    if place.num_peers == 1:
        return _open_port(source, place.rank, place.dp_size, depth, uploader, options)
    among = {key: value for key, value in options.items() if key not in _LEADERS_OPTIONS}
    meeting = source.peer_lookup() if hasattr(source, "peer_lookup") else source
    if place.peer > 0:
        return _mesh.PeerPort(meeting, place, **_decoding(uploader), **among)
    received = _mesh.Received(**({} if uploader is None else {"decode": uploader.decode}))
    inner = _open_port(source, place.rank, place.dp_size, max(depth - 1, 1), uploader, options, received.decode)
    return _mesh.LeaderPort(inner, received, meeting, place, **among)


def _decoding(uploader: Uploader | None) -> dict[str, Any]:
    """An accelerator reads pinned memory by itself."""
    return {} if uploader is None else {"decode": uploader.decode, "pinned": True}
