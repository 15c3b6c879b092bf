"""Batches on an accelerator: each Work is copied while the step before is still running.

::

    I/O thread    bytes arrive in pinned memory --> copy on a side stream --> event
    trainer       takes a micro-batch: its stream waits for the event, the host does not
    pinned bytes  return to the pool once their event is over: a copy may still read them when they are handed out

And how long work took there: an accelerator's own clock, since the host only enqueues it. Whatever
``torch.accelerator`` knows will do.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from stream_balancer.wire.payload import Memory


def pinned(num_bytes: int) -> Memory:
    """Memory that an accelerator reads by itself."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()


class Streams:
    """Accelerator as an :class:`Uploader` needs it: a side stream, over ``torch.accelerator``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.Stream(device=device)

    @contextmanager
    def side(self) -> Iterator[None]:
        """Work enqueued inside runs on the side stream."""
        # set back afterwards: the stream of a thread is the thread's own business
        before = torch.accelerator.current_stream(self._device)
        torch.accelerator.set_stream(self._side)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def record(self) -> torch.Event:
        """A point after all that is enqueued on the side stream."""
        return self._side.record_event()

    def wait(self, event: torch.Event) -> None:
        """Work that the calling thread enqueues from now on runs after ``event``."""
        torch.accelerator.current_stream(self._device).wait_event(event)

    def keep(self, tensor: Tensor) -> None:
        """``tensor`` was made on the side stream and is now used on the caller's: not to be reused before that."""
        # else torch's allocator gives its memory away once the side stream is through with it
        tensor.record_stream(torch.accelerator.current_stream(self._device))


class Uploader:
    """Copies what arrives, in the I/O thread; what was copied is handed over in the trainer's."""

    def __init__(self, device: torch.device, streams: Streams | None = None) -> None:
        self._device, self._streams = device, streams or Streams(device)
        self._reading: deque[tuple[torch.Event, Tensor]] = deque()

    def copy(self, here: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Begin a copy to the device: nothing has been waited for. With what orders the calling thread's stream behind
        it: called where it is going to be used, any number of times."""
        streams = self._streams
        with streams.side():
            # non_blocking: the host goes on
            there = here.to(self._device, non_blocking=True, copy=True)
            event = streams.record()
        # Its memory must not return to the pool before that. Copies are over in the order of their stream.
        while self._reading and self._reading[0][0].query():
            self._reading.popleft()
        self._reading.append((event, here))

        def hand_over() -> None:
            streams.wait(event)
            streams.keep(there)

        return there, hand_over


class Stopwatch:
    """Times a ``with`` block of work on ``device``; an accelerator's own clock counts there."""

    def __init__(self, device: torch.device) -> None:
        self._events = None
        if device.type != "cpu":
            self._events = [torch.Event(device, enable_timing=True) for _ in range(2)]
        self._seconds = 0.0

    def __enter__(self) -> None:
        if self._events is None:
            self._seconds = -time.perf_counter()
        else:
            self._events[0].record()

    def __exit__(self, *_: object) -> None:
        if self._events is None:
            self._seconds += time.perf_counter()
        else:
            self._events[1].record()

    def seconds(self) -> float:
        """Seconds that the block took; on an accelerator this waits until it is over."""
        if self._events is None:
            return self._seconds
        # only its own end: work behind it may run on
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3
