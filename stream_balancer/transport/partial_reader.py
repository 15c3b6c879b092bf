"""What a rank does with a batch whose payloads lie elsewhere: it reads them, beside whatever else comes.

::

    PartialBatch --> read_skeleton --> PayloadSource.read --> PayloadsFetched --> controller
                                                                                  |  once all ranks have fetched
    as any other <-- Batch and buffer <-------- Denominators <--------------------'

Not here: the order in which batches leave (:mod:`.batch_queue`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple, TypeAlias

from torch import Tensor

from stream_balancer.errors import ClosedResourceError
from stream_balancer.transport.buffers import BufferPool
from stream_balancer.transport.channel import PayloadSource
from stream_balancer.wire.messages import Batch, Denominators, MissingRollout, PartialBatch, PayloadsFetched
from stream_balancer.wire.partial_batch import Skeleton, read_skeleton

__all__ = ["PartialReader"]

Whole: TypeAlias = Callable[[Batch, Tensor], object]
"""Called with the message and the buffer of a batch that is complete."""


class _Fetched(NamedTuple):
    """A batch with all the payloads that there are."""

    skeleton: Skeleton
    buffer: Tensor
    """``[total_bytes]`` uint8."""
    missing: tuple[MissingRollout, ...]
    """Rollouts whose payload is gone."""


@dataclass(eq=False)
class _Open:
    """A batch that is not complete."""

    then: Whole
    fetched: _Fetched | None = None
    denominators: Denominators | None = None


class PartialReader:
    """Reads payloads, one batch after the other: in a thread of its own, or, for a channel that has none, at once."""

    def __init__(
        self,
        payloads: PayloadSource | None,
        pool: BufferPool,
        max_bytes: int,
        *,
        thread: str | None,
        send: Callable[[PayloadsFetched], object],
        on_error: Callable[[Exception], object],
    ) -> None:
        """``pool``: where batches are put together. ``max_bytes``: of one. ``thread``: its name; None: there is none.
        ``send``: to the controller. ``on_error``: what reading raises goes there, and nothing is read any more."""
        self._payloads, self._pool, self._max_bytes = payloads, pool, max_bytes
        self._thread_name, self._send, self._on_error = thread, send, on_error
        self._lock = threading.Lock()
        self._open: dict[int, _Open] = {}  # by step
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def read(self, message: PartialBatch, body: Tensor, references: Sequence[object], then: Whole) -> None:
        """Read what did not come along, and say so; ``then`` is called once :meth:`agree` was, too."""
        with self._lock:
            self._open[message.step] = _Open(then)
        if self._thread_name is None:
            self._fetch(message, body, references)
            return
        if self._thread is None:  # most ranks never need it
            self._thread = threading.Thread(target=self._run, name=self._thread_name, daemon=True)
            self._thread.start()
        self._jobs.put(lambda: self._fetch(message, body, references))

    def agree(self, denominators: Denominators) -> bool:
        """All ranks divide by these. False if no batch of that step waits for them."""
        with self._lock:
            one = self._open.get(denominators.step)
            if one is None or one.denominators is not None:
                return False
            one.denominators = denominators
        self._complete(denominators.step)
        return True

    def stop(self) -> None:
        """Read nothing more; a read that is under way raises ClosedResourceError."""
        if self._payloads is not None:
            self._payloads.close()
        self._jobs.put(None)

    def join(self) -> None:
        """Return once the thread has ended; :meth:`stop` comes before."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except ClosedResourceError:
                return
            except Exception as error:  # noqa: BLE001 - whatever a peer's bytes may raise: the rank hears of it
                self._on_error(error)
                return
            del job  # waiting for the next must not keep its buffers alive

    def _fetch(self, message: PartialBatch, body: Tensor, references: Sequence[object]) -> None:
        fetched = self._read(message, body, references)
        with self._lock:
            self._open[message.step].fetched = fetched
        self._send(PayloadsFetched(message.step, fetched.missing))
        self._complete(message.step)

    def _complete(self, step: int) -> None:
        """Called once when the payloads are here, and once when the denominators are: the later one completes."""
        with self._lock:
            one = self._open.get(step)
            if one is None or one.fetched is None or one.denominators is None:
                return
            del self._open[step]
        skeleton, buffer, missing = one.fetched
        one.then(*skeleton.amend(buffer, [gone.index for gone in missing], one.denominators, self._pool.lend))

    def _read(self, message: PartialBatch, body: Tensor, references: Sequence[object]) -> _Fetched:
        skeleton = read_skeleton(message, body, max_bytes=self._max_bytes, num_references=len(references))
        # One buffer of the size of the whole batch, into which every payload is read at its place: nothing is moved
        # once it has come.
        buffer = self._pool.lend(skeleton.batch.total_bytes)
        wanted = skeleton.wanted(buffer, references)
        gone: Mapping[int, str] = dict.fromkeys(range(len(wanted)), "this rank cannot fetch payloads")
        if self._payloads is not None and wanted:
            gone = self._payloads.read(wanted)
        causes = skeleton.gone | {wanted[index].place: cause for index, cause in gone.items()}
        missing = tuple(
            MissingRollout(place, skeleton.name(place), skeleton.owner(place).label, causes[place])
            for place in sorted(causes)
        )
        skeleton.finish(buffer)
        return _Fetched(skeleton, buffer, missing)
