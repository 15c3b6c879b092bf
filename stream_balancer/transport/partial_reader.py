"""What a rank does with a batch whose payloads lie elsewhere: it reads them, beside whatever else comes.

::

    PartialBatch --> read_skeleton --> PayloadSource.read --> Fetched --(denominators)--> Batch and buffer, as any other

Not here: which batch waits for what, and when all ranks have agreed on the denominators (:mod:`.rank_port`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import NamedTuple

from torch import Tensor

from stream_balancer.errors import ClosedResourceError
from stream_balancer.transport.buffers import BufferPool
from stream_balancer.transport.channel import PayloadSource
from stream_balancer.wire.messages import Batch, Denominators, MissingRollout, PartialBatch
from stream_balancer.wire.partial_batch import Skeleton, read_skeleton

__all__ = ["Fetched", "PartialReader"]


class Fetched(NamedTuple):
    """A batch with all the payloads that there are."""

    skeleton: Skeleton
    buffer: Tensor
    """``[total_bytes]`` uint8."""
    missing: tuple[MissingRollout, ...]
    """Rollouts whose payload is gone."""

    def complete(self, denominators: Denominators, lend: Callable[[int], Tensor]) -> tuple[Batch, Tensor]:
        """The message and the buffer of what is to be trained on. Once."""
        return self.skeleton.amend(self.buffer, [one.index for one in self.missing], denominators, lend)


class PartialReader:
    """Reads payloads, one batch after the other: in a thread of its own, or, for a channel that has none, at once."""

    def __init__(
        self,
        payloads: PayloadSource | None,
        pool: BufferPool,
        max_bytes: int,
        *,
        thread: str | None,
        on_error: Callable[[Exception], object],
    ) -> None:
        """``pool``: where batches are put together. ``max_bytes``: of one. ``thread``: its name; None: there is none.
        ``on_error``: what reading raises goes there, and nothing is read any more."""
        self._payloads, self._pool, self._max_bytes = payloads, pool, max_bytes
        self._thread_name, self._on_error = thread, on_error
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def read(
        self,
        message: PartialBatch,
        body: Tensor,
        references: Sequence[object],
        then: Callable[[Fetched], None],
    ) -> None:
        """Read what did not come along, and call ``then`` with all of it."""
        if self._thread_name is None:
            then(self._read(message, body, references))
            return
        if self._thread is None:  # most ranks never need it
            self._thread = threading.Thread(target=self._run, name=self._thread_name, daemon=True)
            self._thread.start()
        self._jobs.put(lambda: then(self._read(message, body, references)))

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

    def _read(self, message: PartialBatch, body: Tensor, references: Sequence[object]) -> Fetched:
        skeleton = read_skeleton(message, body, max_bytes=self._max_bytes, num_references=len(references))
        # One buffer of the size of the whole batch, into which every payload is read at its place: nothing is moved
        # once it has come.
        buffer = self._pool.lend(skeleton.batch.total_bytes)
        wanted = skeleton.wanted(buffer, references)
        gone: Mapping[int, str] = dict.fromkeys(range(len(wanted)), "this rank cannot fetch payloads")
        if self._payloads is not None and wanted:
            gone = self._payloads.read(wanted)
        missing = tuple(
            MissingRollout(wanted[i].place, skeleton.name(wanted[i].place), wanted[i].owner.label, gone[i])
            for i in sorted(gone)
        )
        skeleton.finish(buffer)
        return Fetched(skeleton, buffer, missing)
