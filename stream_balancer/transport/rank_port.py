"""A rank's end of the conversation with its controller: the queue of batches. Written once, for every channel.

::

    channel's thread   Batch         -> decode -> queue                                     \
    channel's thread   PartialBatch  -> fetching thread -> PayloadsFetched -> Denominators  -> queue --take--> trainer

Batches leave in the order in which they came. A step whose payloads lie elsewhere is held until every rank has fetched
its own and the controller has said what all divide by; a payload that is gone leaves a padding copy of weight 0 in its
place. No socket, no clock; a lock, because the trainer's threads call :meth:`RankPort.take` and ``report``.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from queue import SimpleQueue

from torch import Tensor

from stream_balancer.errors import (
    AlreadyInUseError,
    ClosedResourceError,
    EndOfStream,
    RankLostError,
    WireError,
    to_raise,
)
from stream_balancer.transport import Port
from stream_balancer.transport.buffers import BufferPool
from stream_balancer.transport.channel import (
    Channel,
    Outgoing,
    PayloadSource,
    Session,
    may_come_back,
    unexpected,
)
from stream_balancer.transport.event_loop import beside_the_loop
from stream_balancer.transport.given_steps import GivenSteps
from stream_balancer.types import RankBatch
from stream_balancer.wire.messages import (
    Batch,
    Denominators,
    End,
    JoinRank,
    Message,
    MissingRollout,
    PartialBatch,
    PayloadsFetched,
    StepHeld,
    StepReport,
    Taken,
)
from stream_balancer.wire.partial_share import Skeleton, read_skeleton
from stream_balancer.wire.share import checksum, decode

__all__ = ["Decode", "RankPort"]

Decode = Callable[[Batch, Tensor], RankBatch]
"""A message and the buffer behind it -> the batch."""

logger = logging.getLogger("stream_balancer.transport")


@dataclass
class _Arriving:
    """A batch in the queue; or the place of one that is not complete."""

    step: int
    batch: RankBatch | None = None
    fetched: tuple[Skeleton, Tensor, Sequence[int]] | None = None
    """The description, the buffer, and the indices of the rollouts that are missing."""
    denominators: Denominators | None = None
    by_present: bool = True
    """The present controller has given it, and gets the credit back when it is taken."""


class RankPort(Session, Port):
    """One rank's port. Its methods may be called from any thread, if the channel has threads."""

    def __init__(
        self,
        channel: Channel,
        request: JoinRank,
        *,
        decode: Decode = decode,
        pinned: bool = False,
        payloads: PayloadSource | None = None,
        linger_s: float = 5.0,
        reconnect: Callable[[], Channel] | None = None,
    ) -> None:
        """``request``: as the rank has joined. ``decode``: how batches are wanted. ``pinned``: receive into memory that
        an accelerator reads by itself. ``payloads``: reads what does not come with its batch. ``linger_s``: how long
        :meth:`close` waits for the controller's answer. ``reconnect``: a controller that is lost is started again, from
        its journal: go on with it through this channel. None: its loss ends this port."""
        self.rank, self.dp_size = request.rank, request.dp_size
        self._channel, self._depth, self._max_bytes = channel, request.depth, request.max_batch_bytes
        self._decode, self._payloads, self._linger_s = decode, payloads, linger_s
        self._pool = BufferPool(keep=request.depth + 1, pinned=pinned)
        self._queue: deque[_Arriving] = deque()
        self._lock = threading.RLock()
        self._end: Exception | None = None
        self._arrived = self._taken = 0
        self._newest_step = -1
        self._taken_is_queued = False
        self._working_on: int | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._to_fetch: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._fetching: threading.Thread | None = None
        self._reconnect, self._leaving = reconnect, False
        self._given = None if reconnect is None else GivenSteps()

    def start(self) -> None:
        """Begin to receive."""
        self._channel.start(self)

    # Port: from any thread

    def subscribe(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def take(self) -> RankBatch | None:
        with self._lock:
            first = self._queue[0] if self._queue else None
            if first is None and self._end is not None:
                raise to_raise(self._end)
            if first is None or first.batch is None:
                return None
            self._queue.popleft()
            self._taken += first.by_present
            self._working_on = first.step
            is_queued, self._taken_is_queued = self._taken_is_queued, True
        if not is_queued:
            self._channel.send(self._taken_so_far)
        return first.batch

    def report(self, done: StepReport | StepHeld) -> None:
        if isinstance(done, StepReport):
            self._working_on = None
        with self._lock:
            if self._given is None or self._given.report(done):
                self._channel.send(Outgoing(done))

    def leave(self) -> None:
        with self._lock:
            self._leaving = True
        self._channel.close()

    def close(self) -> None:
        with self._lock:
            self._leaving = True  # whoever is lost from now on is not waited for
        self._stop_fetching()  # what it fetches would be thrown away
        self._channel.close()
        self._channel.wait_closed(self._linger_s)
        self.abort()

    def abort(self) -> None:
        """Release everything without a word, as if the process were killed; threads have ended when this returns."""
        self._finish(ClosedResourceError())
        self._stop_fetching()
        self._channel.abort()
        if self._fetching is not None and self._fetching is not threading.current_thread():
            self._fetching.join()
        with self._lock:
            self._queue.clear()

    async def aclose(self) -> None:
        await beside_the_loop(self.close, threads=self._channel.threads)

    def _taken_so_far(self, _: Channel) -> Outgoing:
        """When its turn comes, for all that was taken by then: each message may wake the controller."""
        with self._lock:
            self._taken_is_queued = False
            return Outgoing(Taken(self._taken))

    def _finish(self, error: Exception) -> None:
        with self._lock:
            if not isinstance(error, EndOfStream) and any(arriving.batch is None for arriving in self._queue):
                # What is not complete will not be, nor can what is behind it be trained on.
                self._queue = deque(takewhile(lambda arriving: arriving.batch is not None, self._queue))
                self._end = None if isinstance(self._end, EndOfStream) else self._end
            self._end = self._end or error
        self._notify()

    def _notify(self) -> None:
        for callback in self._callbacks:
            callback()

    # Receiver: in the channel's thread

    def admit(self, message: Message, sizes: Sequence[int]) -> Sequence[int]:
        if isinstance(message, Batch):
            total_bytes = message.total_bytes
        elif isinstance(message, PartialBatch):
            total_bytes = message.wire_bytes
        else:
            return super().admit(message, sizes)
        self._check(message, total_bytes, sizes)
        return (total_bytes,)

    def allocate(self, size: int) -> Tensor:
        return self._pool.lend(size)

    def receive(self, message: Message, buffers: Sequence[Tensor], references: Sequence[object]) -> None:
        if isinstance(message, Batch):
            if message.wire_crc and message.wire_crc != checksum(message, buffers[0]):
                raise WireError(f"rank {self.rank}: the checksum of step {message.step} is wrong: damaged on its way")
            if self._is_known(message.step):
                self._on_given_again(message, buffers[0])
            else:
                arriving, batch = _Arriving(message.step), self._decode(message, buffers[0])
                self._add(arriving)
                self._enter(arriving, batch)
        elif isinstance(message, PartialBatch):
            arriving = _Arriving(message.step)
            self._add(arriving)
            self._fetch(lambda: self._fetch_now(arriving, message, buffers[0], references))
        elif isinstance(message, Denominators):
            self._agree(message)
        elif isinstance(message, End):
            self._finish(EndOfStream())
        else:
            raise unexpected(message, "a rank trains")

    def ended(self, error: Exception) -> None:
        if self._rejoin(error):
            return
        if not isinstance(error, AlreadyInUseError | ValueError | WireError | RankLostError | ClosedResourceError):
            cause = str(error) or "it closed"
            lost = RankLostError(self._explain_loss(cause), rank=self.rank, step=self._working_on, cause=cause)
            lost.__cause__ = error
            error = lost
        self._finish(error)
        self._stop_fetching()

    def _explain_loss(self, cause: str) -> str:
        return (
            f"rank {self.rank} lost its controller: {cause}. What was not acknowledged is held by the balancer, if it "
            "lives. Start the controller again and open a new RankFeed"
        )

    def _check(self, message: Batch | PartialBatch, total_bytes: int, sizes: Sequence[int]) -> None:
        """Before any allocation: this rank's, of a later step (one may have been given up), against a credit, and not
        larger than was allowed."""
        me, step = f"rank {self.rank}", message.step
        if (message.rank, message.dp_size) != (self.rank, self.dp_size):
            raise WireError(
                f"got a batch for rank {message.rank} of {message.dp_size}, but this is {me} of {self.dp_size}"
            )
        known = isinstance(message, Batch) and self._is_known(step)
        if self._given is not None and step <= self._newest_step and not known:
            raise self._other_controller(f"step {step} comes after step {self._newest_step}")
        if (step <= self._newest_step and not known) or self._end is not None:
            after = "the end" if self._end is not None else f"step {self._newest_step}"
            raise WireError(f"{me}: got step {step} after {after}")
        if total_bytes > self._max_bytes:
            raise WireError(
                f"{me}: step {step} announces {total_bytes} bytes, more than max_batch_bytes ({self._max_bytes}). "
                "Raise max_batch_bytes of RankFeed, or lower batch_size"
            )
        if tuple(sizes) != (message.wire_bytes,) or not 0 < message.meta_bytes <= message.wire_bytes <= total_bytes:
            raise WireError(f"{me}: step {step} announces impossible sizes: {message}, {sizes}")
        if self._arrived - self._taken >= self._depth:
            raise WireError(f"{me}: the controller sent step {step} without a credit")

    def _add(self, arriving: _Arriving) -> None:
        with self._lock:
            self._arrived += 1
            self._newest_step = arriving.step
            self._queue.append(arriving)
            if self._given is not None:
                self._given.add(arriving.step)

    def _enter(self, arriving: _Arriving, batch: RankBatch) -> None:
        """It is complete."""
        with self._lock:
            arriving.batch = batch
            if self._given is not None:
                self._given.complete(arriving.step, _ids(batch))
        self._notify()

    # a controller that is started again

    def _rejoin(self, error: Exception) -> bool:
        """Go on with the next controller, if there will be one. What is in the queue stays there, and what the trainer
        has is not given to it again."""
        with self._lock:
            is_final = self._end is not None or self._leaving or any(one.batch is None for one in self._queue)
            if self._given is None or self._reconnect is None or is_final or not may_come_back(error):
                return False
            self._given.controller_lost()
            for arriving in self._queue:
                arriving.by_present = False
            self._arrived = self._taken = 0
            self._taken_is_queued = False
            old, self._channel = self._channel, self._reconnect()
        logger.warning("rank %d waits for its controller to be started again: %s", self.rank, error)
        old.abort()  # without the lock: its threads may wait for that
        self._channel.start(self)
        return True

    def _is_known(self, step: int) -> bool:
        with self._lock:
            return self._given is not None and self._given.is_known(step)

    def _on_given_again(self, message: Batch, buffer: Tensor) -> None:
        with self._lock:
            assert self._given is not None
            try:
                report = self._given.add_again(message.step, _ids(decode(message, buffer)))
            except ValueError as error:
                raise self._other_controller(str(error)) from None
            self._arrived += 1
            waiting = [arriving for arriving in self._queue if arriving.step == message.step]
            for arriving in waiting:
                arriving.by_present = True
            if not waiting:
                self._taken += 1
                self._channel.send(self._taken_so_far)
            if report is not None:
                self.report(report)

    def _other_controller(self, why: str) -> RankLostError:
        return RankLostError(
            f"rank {self.rank}: its controller was started again without its journal: {why}. What it had accepted is "
            "lost. Start the controller with its journal, or the ranks again too",
            rank=self.rank,
            step=self._working_on,
            cause=why,
        )

    # payloads that lie elsewhere

    def _fetch(self, fetch: Callable[[], None]) -> None:
        if not self._channel.threads:
            fetch()
            return
        if self._fetching is None:
            self._fetching = threading.Thread(target=self._fetch_all, name=f"sb-fetch{self.rank}", daemon=True)
            self._fetching.start()
        self._to_fetch.put(fetch)

    def _fetch_all(self) -> None:
        """In a thread of its own: the channel's goes on reading meanwhile."""
        while (fetch := self._to_fetch.get()) is not None:
            try:
                fetch()
            except ClosedResourceError:
                return
            except Exception as error:  # noqa: BLE001 - raised by take()
                self._finish(error)
                self._channel.abort()
                return
            del fetch  # waiting for the next must not keep it alive

    def _fetch_now(
        self, arriving: _Arriving, message: PartialBatch, body: Tensor, references: Sequence[object]
    ) -> None:
        skeleton = read_skeleton(message, body, max_bytes=self._max_bytes, num_references=len(references))
        buffer = self._pool.lend(skeleton.batch.total_bytes)
        wanted = skeleton.wanted(buffer, references)
        gone: Mapping[int, str] = dict.fromkeys(range(len(wanted)), "this rank cannot fetch payloads")
        if self._payloads is not None and wanted:
            gone = self._payloads.read(wanted)
        missing = [
            MissingRollout(wanted[i].place, skeleton.name(wanted[i].place), wanted[i].owner.label, gone[i])
            for i in sorted(gone)
        ]
        skeleton.finish(buffer)
        with self._lock:
            arriving.fetched = skeleton, buffer, [one.index for one in missing]
        self._channel.send(Outgoing(PayloadsFetched(message.step, tuple(missing))))
        self._complete(arriving)

    def _agree(self, message: Denominators) -> None:
        with self._lock:
            waiting = [a for a in self._queue if a.step == message.step and a.batch is None and a.denominators is None]
            if not waiting:
                raise unexpected(message, f"step {message.step} does not wait for it")
            waiting[0].denominators = message
        self._complete(waiting[0])

    def _complete(self, arriving: _Arriving) -> None:
        """Called once when the payloads are here, and once when the denominators are: the later one completes."""
        with self._lock:
            fetched, denominators = arriving.fetched, arriving.denominators
            if fetched is None or denominators is None:
                return
            arriving.fetched = None
        skeleton, buffer, missing = fetched
        message, buffer = skeleton.amend(buffer, missing, denominators, self._pool.lend)
        self._enter(arriving, self._decode(message, buffer))

    def _stop_fetching(self) -> None:
        if self._payloads is not None:
            self._payloads.close()
        self._to_fetch.put(None)


def _ids(batch: RankBatch) -> tuple[str, ...]:
    return tuple(rollout.rollout_id for rollout in batch.rollouts)
