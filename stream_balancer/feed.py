"""The rank's side: an iterator over this rank's shares, with its tensors on the device. Plain loop or ``async for``.

::

    for batch in sb.RankFeed("tcp://127.0.0.1:29400", rank=3, dp_size=8):
        for mb in batch.micro_batches: ...

Asking for the next batch acknowledges the one before; leaving the loop early does not.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, Self, cast

import anyio
import torch
from torch import Tensor

from stream_balancer.errors import AlreadyInUseError, ClosedResourceError, EndOfStream
from stream_balancer.transport import RankPort
from stream_balancer.transport._loop import loop_caller
from stream_balancer.types import RankBatch

__all__ = ["RankFeed"]

DEFAULT_MAX_BATCH_BYTES = 4 * 2**30  # one rank's share; far above text, below what would take a trainer's host memory


class RankFeed:
    """Iterates over one rank's shares, in step order, each exactly once. ``for`` and ``async for`` (asyncio, trio).

    Tensors of a batch stay valid for as long as you hold them: their memory is reused only when the last of them is
    gone. Keep none beyond the step if you want the feed to stay within ``depth + 1`` batches of memory.

    Raises, from the iteration: RankLostError if the controller went away, AlreadyInUseError if this rank is already
    connected or two threads iterate one feed, ValueError if the controller balances for another number of ranks,
    WireError if it does not speak this protocol, ClosedResourceError after :meth:`close`.
    """

    def __init__(
        self,
        source: Any = None,
        *,
        rank: int | None = None,
        dp_size: int | None = None,
        depth: int = 2,
        device: str | torch.device = "cpu",
        max_batch_bytes: int = DEFAULT_MAX_BATCH_BYTES,
        incarnation: int | None = None,
        **options: Any,
    ) -> None:
        """Connect in the background; returns at once.

        ``source``: ``"tcp://host:port"`` of a controller, a c10d Store, None for the store, rank and world size of the
        initialised torch.distributed world, or a :class:`~stream_balancer.transport.RankPort`. ``depth``: batches
        that may lie ready besides the one in use. ``incarnation``: how often this rank was started before (default:
        TORCHELASTIC_RESTART_COUNT, else 0). ``options``: ``host``, ``name``, ``connect_timeout_s``, ``keepalive_s``,
        ``linger_s`` of the transport.
        """
        if depth < 1:
            raise ValueError(f"depth must be >= 1, not {depth}: with no room for a batch none could ever be sent")
        self._port = _open_port(source, rank, dp_size, depth, device, max_batch_bytes, incarnation, options)
        self._news = threading.Condition()
        self._version = 0
        self._busy = threading.Lock()
        self._current: tuple[int, float] | None = None  # step and when it was taken
        self._closed = False
        self._port.subscribe(self._on_news)

    @property
    def rank(self) -> int:
        """This DP rank."""
        return self._port.rank

    @property
    def dp_size(self) -> int:
        """DP ranks that take part."""
        return self._port.dp_size

    def acknowledge(self) -> None:
        """Say that the current batch is done, without asking for the next: before a checkpoint, or a ``break``.
        Idempotent."""
        if self._current is not None:
            step, taken_at = self._current
            self._current = None
            self._port.report(step, time.monotonic() - taken_at)

    def close(self) -> None:
        """Leave: the controller is told, threads end. A batch that was not acknowledged will be delivered again.
        Idempotent."""
        self._closed = True
        self._port.close()
        self._on_news()

    async def aclose(self) -> None:
        """:meth:`close`, without blocking the event loop."""
        self._closed = True
        await self._port.aclose()
        self._on_news()

    def __iter__(self) -> Iterator[RankBatch]:
        return self

    def __next__(self) -> RankBatch:
        """The next share. Blocks until there is one; Ctrl-C ends the wait. Acknowledges the share before."""
        with self._one_at_a_time():
            self.acknowledge()
            while True:
                version = self._version
                try:
                    batch = self._take()
                except EndOfStream:
                    self.close()
                    raise StopIteration from None
                if batch is not None:
                    return batch
                with self._news:
                    self._news.wait_for(lambda before=version: self._version != before)  # type: ignore[misc]

    def __aiter__(self) -> AsyncIterator[RankBatch]:
        return self

    async def __anext__(self) -> RankBatch:
        """As ``next()``, without blocking the event loop. If cancelled, no share was taken."""
        await anyio.lowlevel.checkpoint()
        with self._one_at_a_time():
            self.acknowledge()
            in_loop = loop_caller()
            while True:
                arrival = anyio.Event()
                self._wake = lambda: in_loop(arrival.set)  # noqa: B023 - each round's own event
                try:
                    batch = self._take()
                    if batch is not None:
                        return batch
                    await arrival.wait()
                except EndOfStream:
                    await self.aclose()
                    raise StopAsyncIteration from None
                finally:
                    self._wake = None

    _wake: Any = None

    def _take(self) -> RankBatch | None:
        if self._closed:
            raise ClosedResourceError
        batch = self._port.take()
        if batch is not None:
            self._current = (batch.step, time.monotonic())
        return batch

    def _on_news(self) -> None:
        with self._news:
            self._version += 1
            self._news.notify_all()
        wake = self._wake
        if wake is not None:
            wake()

    def _one_at_a_time(self) -> _Busy:
        return _Busy(self._busy)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class _Busy:
    """Refuses a second user instead of making it wait."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise AlreadyInUseError(
                "two threads or tasks iterate one RankFeed. Each batch goes to one of them: let one iterate"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _open_port(
    source: Any,
    rank: int | None,
    dp_size: int | None,
    depth: int,
    device: str | torch.device,
    max_batch_bytes: int,
    incarnation: int | None,
    options: dict[str, Any],
) -> RankPort:
    if hasattr(source, "take"):
        return cast("RankPort", source)
    from stream_balancer.transport import torch_dist

    if source is None:
        source, world_rank, world_size = torch_dist.current_world()
        rank = world_rank if rank is None else rank
        dp_size = world_size if dp_size is None else dp_size
    if rank is None or dp_size is None:
        raise ValueError(
            "RankFeed needs rank= and dp_size= unless it runs inside an initialised torch.distributed world"
        )
    if not 0 <= rank < dp_size:
        raise ValueError(f"rank must be in [0, dp_size): rank={rank}, dp_size={dp_size}")
    if incarnation is None:
        incarnation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return torch_dist.GlooPort(
        source,
        rank=rank,
        dp_size=dp_size,
        incarnation=incarnation,
        depth=depth,
        max_batch_bytes=max_batch_bytes,
        on_device=_mover(torch.device(device)),
        **options,
    )


def _mover(device: torch.device) -> Any:
    if device.type == "cpu":
        return None

    def move(slab: Tensor) -> Tensor:
        return slab.to(device)

    return move
