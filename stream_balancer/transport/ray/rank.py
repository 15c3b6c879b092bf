"""In a trainer: the rank's end, for ``RankFeed``. It fetches what a share needs from the object store."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import ray
from numpy.typing import NDArray
from torch import Tensor

from stream_balancer.errors import AlreadyInUseError, ClosedResourceError, EndOfStream, RankLostError, to_raise
from stream_balancer.transport.buffers import SlabPool
from stream_balancer.transport.ray.channel import Caller, Message
from stream_balancer.transport.ray.object_store import Share, complete, frame_of
from stream_balancer.types import RankBatch
from stream_balancer.wire.messages import StepHeld, StepReport
from stream_balancer.wire.share import Frame, decode

__all__ = ["RayPort"]

_MAX_DONE = 1000  # steps that a rank may have acknowledged in vain, far above what is in flight

logger = logging.getLogger("stream_balancer.transport")


class RayPort:
    """The rank's end. Its thread fetches what shares need; other methods may be called from any thread."""

    def __init__(
        self,
        actor: Any,
        *,
        rank: int,
        dp_size: int,
        depth: int = 2,
        incarnation: int = 0,
        max_batch_bytes: int = 4 * 2**30,
        linger_s: float = 5.0,
        decode: Callable[[Frame, Tensor], RankBatch] = decode,
        pinned: bool = False,
    ) -> None:
        """``actor``: a handle of the actor that hosts the balancer."""
        self.rank = rank
        self.dp_size = dp_size
        self._linger_s = linger_s
        self._decode = decode
        self._pool = SlabPool(depth + 2, pinned=pinned)
        self._queue: deque[RankBatch] = deque()
        self._end: Exception | None = None
        self._closed = False
        self._left = False
        self._callback: Callable[[], None] = lambda: None
        self._arrivals: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._restarts = False
        self._progress = _Progress()
        self._actor = actor
        self._hello = ("rank", rank, dp_size, incarnation, depth, max_batch_bytes)
        self._caller = self._connected()
        self._thread = threading.Thread(target=self._run, name=f"sb-ray-rank-{rank}", daemon=True)
        self._thread.start()

    def _connected(self) -> Caller:
        caller = Caller(self._actor, on_message=self._arrivals.put, on_lost=self._on_lost)
        caller.open(*self._hello)
        return caller

    def subscribe(self, callback: Callable[[], None]) -> None:
        """See :class:`~stream_balancer.transport.Port`."""
        self._callback = callback

    def take(self) -> RankBatch | None:
        """See :class:`~stream_balancer.transport.Port`."""
        if self._closed:
            raise ClosedResourceError
        if self._queue:
            batch = self._queue.popleft()
            if self._progress.taken(batch.step):
                self._caller.send(("taken",))
            return batch
        if self._end is not None:
            raise to_raise(self._end)
        return None

    def report(self, done: StepReport | StepHeld) -> None:
        """See :class:`~stream_balancer.transport.Port`."""
        if isinstance(done, StepHeld):
            self._caller.send(("held", done.step))
        elif self._progress.done(done):
            self._caller.send(_report(done))

    def leave(self) -> None:
        """See :class:`~stream_balancer.transport.Port`."""
        if not self._left:
            self._left = True
            self._caller.send(("bye",))

    def close(self) -> None:
        """See :class:`~stream_balancer.transport.Port`."""
        self._closed = True
        self.leave()
        self._caller.ended.wait(self._linger_s)
        self._arrivals.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._queue.clear()

    async def aclose(self) -> None:
        """See :class:`~stream_balancer.transport.Port`."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.close, limiter=anyio.CapacityLimiter(1))

    def kill(self) -> None:
        """Be gone without a word, as a killed process."""
        self._closed = self._left = True
        self._caller.break_off()
        self._arrivals.put(None)

    # in the thread

    def _run(self) -> None:
        while (message := self._arrivals.get()) is not None:
            try:
                self._handle(message)
            except Exception as error:  # noqa: BLE001 - told by take()
                self._finish(error)
            del message  # it would keep objects of the store alive while this waits
            self._callback()

    def _handle(self, message: Message) -> None:
        match message:
            case ("share", *fields):
                self._receive(Share(*fields))
            case ("welcome", bool(restarts)):
                self._restarts = restarts
            case ("restart", str(cause)):
                logger.warning("rank %d waits for its controller to be started again: %s", self.rank, cause)
                self._progress.restart()
                self._caller = self._connected()
            case ("end",):
                self._finish(EndOfStream())
            case ("lost", str(cause)):
                self._finish(self._lost(cause))
            case ("refused", str(kind), str(text)):
                refusals: dict[str, type[Exception]] = {
                    "ValueError": ValueError,
                    "AlreadyInUseError": AlreadyInUseError,
                }
                self._finish(refusals[kind](text) if kind in refusals else self._lost(text))

    def _receive(self, share: Share) -> None:
        step = frame_of(share.described).step
        is_new, answers = self._progress.arrived(step)
        if answers:
            self._caller.send(*answers)
        if is_new:
            self._queue.append(self._complete(share))

    def _complete(self, share: Share) -> RankBatch:
        frame, slab, lost = complete(share, fetch=_fetch, lend=self._pool.lend)
        if lost:
            names = ", ".join(f"{one.rollout_id!r} (put by {one.holder})" for one in lost[:5])
            logger.warning(
                "rank %d, step %d: %d rollouts are gone and take no part: %s", self.rank, frame.step, len(lost), names
            )
            self._caller.send(("lacks", frame.step, [tuple(one) for one in lost]))
        return self._decode(frame, slab)

    def _on_lost(self, cause: str, for_good: bool) -> None:
        self._arrivals.put(("restart" if self._restarts and not for_good else "lost", cause))

    def _lost(self, cause: str) -> RankLostError:
        message = f"rank {self.rank} lost its controller: {cause}. Start the controller again and open a new RankFeed"
        return RankLostError(message, rank=self.rank, cause=cause)

    def _finish(self, error: Exception) -> None:
        if self._end is None:
            self._end = error


def _report(done: StepReport) -> Message:
    return ("done", done.step, done.seconds, done.compute_s, done.waited_s)


class _Progress:
    """What a rank knows of its steps, should the controller be started again and deliver some of them again: each is
    trained on once. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queued: set[int] = set()
        self._newest = self._newest_done = -1
        self._here: set[int] = set()  # delivered by the present controller, and not done
        self._done: dict[int, StepReport] = {}

    def arrived(self, step: int) -> tuple[bool, list[Message]]:
        """Whether it is new; and what to say at once about one that is not."""
        with self._lock:
            self._here.add(step)
            if step > self._newest:
                self._newest = step
                self._queued.add(step)
                return True, []
            answers: list[Message] = [] if step in self._queued else [("taken",)]
            if step <= self._newest_done:
                self._here.discard(step)
                answers.append(_report(self._done.get(step, StepReport(step, 0.0))))
            return False, answers

    def taken(self, step: int) -> bool:
        """Whether the controller waits to hear it."""
        with self._lock:
            self._queued.discard(step)
            return step in self._here

    def done(self, done: StepReport) -> bool:
        """Whether the controller waits to hear it; else it is told when it delivers the step again."""
        with self._lock:
            self._newest_done = done.step
            self._done[done.step] = done
            if len(self._done) > _MAX_DONE:
                self._done.pop(next(iter(self._done)))
            told = done.step in self._here
            self._here.discard(done.step)
            return told

    def restart(self) -> None:
        """The present controller is a new one."""
        with self._lock:
            self._here.clear()


def _fetch(objects: Sequence[Any]) -> list[NDArray[np.uint8] | Exception]:
    """The arrays, as they lie in the store; or why one is gone."""
    try:
        return list(ray.get(list(objects)))
    except ray.exceptions.RayError:
        found: list[NDArray[np.uint8] | Exception] = []
        for one in objects:
            try:
                found.append(ray.get(one))
            except ray.exceptions.RayError as error:
                found.append(error)
        return found
