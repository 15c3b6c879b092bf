"""Batches on an accelerator: each buffer is copied while the step before is still running.

::

    reader thread   buffer arrives in pinned memory --> copy and widening on a side stream --> event
    trainer         next(feed): its stream waits for the event, the host does not
    pinned buffer     returns to the pool once its event is over: a copy may still read it when the batch is handed out

And how long work took there: an accelerator's own clock, since the host only enqueues it.

Whatever ``torch.accelerator`` knows will do. Not here: what a buffer is (``wire``), when it arrives (``transport``).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from stream_balancer.types import RankBatch
from stream_balancer.wire import rank_batch as wire
from stream_balancer.wire.messages import Batch

__all__ = ["Event", "Pace", "Stopwatch", "Streams", "Uploader", "stopwatch_on"]


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """True once everything before it is done."""
        ...


class Streams(Protocol):
    """What an :class:`Uploader` asks of an accelerator."""

    def side(self) -> AbstractContextManager[None]:
        """Work enqueued inside runs on the side stream."""
        ...

    def record(self) -> Event:
        """A point after all that is enqueued on the side stream."""
        ...

    def wait(self, event: Event) -> None:
        """Work that the calling thread enqueues from now on runs after ``event``."""
        ...

    def keep(self, tensor: Tensor) -> None:
        """``tensor`` was made on the side stream and is now used on the caller's: not to be reused before that."""
        ...


class _AcceleratorStreams:
    """Over ``torch.accelerator``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.Stream(device=device)

    @contextmanager
    def side(self) -> Iterator[None]:
        before = torch.accelerator.current_stream(self._device)
        torch.accelerator.set_stream(self._side)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def record(self) -> Event:
        return self._side.record_event()

    def wait(self, event: Any) -> None:
        torch.accelerator.current_stream(self._device).wait_event(event)

    def keep(self, tensor: Tensor) -> None:
        tensor.record_stream(torch.accelerator.current_stream(self._device))


class Uploader:
    """Decodes buffers into batches on a device. Safe to use from the reader's and the trainer's thread."""

    def __init__(self, device: torch.device, streams: Streams | None = None) -> None:
        self._device = device
        self._streams = _AcceleratorStreams(device) if streams is None else streams
        self._lock = threading.Lock()
        # step -> of each of its parts the end of its copy, and the buffer on the device
        self._arrived: dict[int, list[tuple[Event, Tensor]]] = {}
        self._reading: deque[tuple[Event, Tensor]] = deque()  # buffers on the host that copies may still read

    def decode(self, message: Batch, buffer: Tensor) -> RankBatch:
        """The batch in ``buffer``, on the device; nothing has been waited for. See :func:`wire.decode`."""
        self._release()
        with self._streams.side():
            there = torch.empty(buffer.numel(), dtype=torch.uint8, device=self._device)

            def copy(here: Tensor) -> Tensor:
                there[: message.wire_bytes].copy_(here[: message.wire_bytes], non_blocking=True)
                return there

            batch = wire.decode(message, buffer, on_device=copy)
            event = self._streams.record()
        with self._lock:
            self._arrived.setdefault(batch.step, []).append((event, there))
            self._reading.append((event, buffer))
        return batch

    def hand_over(self, batch: RankBatch) -> None:
        """The calling thread's stream is going to use ``batch``: order it behind the copy. May be interrupted and
        repeated."""
        self._release()
        # all of the step that has come: a part of it that is used later is then behind its copy, too
        while copied := self._arrived.get(batch.step):
            event, there = copied[0]
            self._streams.wait(event)
            self._streams.keep(there)
            with self._lock:
                if len(copied) == 1:
                    self._arrived.pop(batch.step, None)
                else:
                    del copied[0]

    def _release(self) -> None:
        with self._lock:
            while self._reading and self._reading[0][0].query():
                self._reading.popleft()


class Stopwatch(Protocol):
    """Times a ``with`` block."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def seconds(self) -> float:
        """What the block took; on an accelerator this waits until it is over."""
        ...


def stopwatch_on(device: torch.device) -> Stopwatch:
    """For work that runs on ``device``."""
    return _HostStopwatch() if device.type == "cpu" else _AcceleratorStopwatch(device)


class _HostStopwatch:
    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._took = time.perf_counter() - self._began

    def seconds(self) -> float:
        return self._took


class _AcceleratorStopwatch:
    """Two events in the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._began = torch.Event(device, enable_timing=True)
        self._ended = torch.Event(device, enable_timing=True)

    def __enter__(self) -> None:
        self._began.record()

    def __exit__(self, *_: object) -> None:
        self._ended.record()

    def seconds(self) -> float:
        self._ended.synchronize()
        return float(self._began.elapsed_time(self._ended)) / 1e3


class Pace:
    """Keeps the host at most one micro-batch ahead of the device that it enqueues them for: what is begun cannot be
    moved to another rank, so no more than that is to be begun."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ends: deque[torch.Event] = deque()

    def keep(self) -> None:
        """Another one is going to be begun: wait for the end of the last but one before it."""
        if self._device.type == "cpu":
            return
        end = torch.Event(self._device)
        end.record()
        self._ends.append(end)
        while len(self._ends) > 1:
            self._ends.popleft().synchronize()

    def finish(self) -> None:
        """Wait for all that was enqueued."""
        while self._ends:
            self._ends.popleft().synchronize()
