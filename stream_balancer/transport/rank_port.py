"""A rank's end of the conversation with its controller: the queue of batches. Written once, for every channel.

::

    channel's thread   Batch         -> decode -> queue                                     \
    channel's thread   PartialBatch  -> PartialReader  -> PayloadsFetched -> Denominators  -> queue --take--> trainer

Batches leave in the order in which they came. A step whose payloads lie elsewhere is held until every rank has fetched
its own and the controller has said what all divide by; a payload that is gone leaves a padding copy of weight 0 in its
place. No socket, no clock; a lock, because the trainer's threads call :meth:`RankPort.take` and ``report``.
:attr:`RankPort.actions` is the table of what may come.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile

from torch import Tensor

from stream_balancer.errors import (
    ClosedResourceError,
    ConfigError,
    EndOfStream,
    RankLostError,
    RefusedError,
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
    State,
    either,
    may_come_back,
    unexpected,
)
from stream_balancer.transport.event_loop import beside_the_loop
from stream_balancer.transport.given_steps import GivenSteps
from stream_balancer.transport.partial_reader import Fetched, PartialReader
from stream_balancer.transport.rank_control import RankControl
from stream_balancer.transport.threads import ThreadEvent
from stream_balancer.types import RankBatch
from stream_balancer.wire.messages import (
    Batch,
    Denominators,
    End,
    JoinRank,
    Message,
    PartialBatch,
    PartsDone,
    PayloadsFetched,
    PolicyVersion,
    ReassignedPart,
    StatisticsReply,
    StepComplete,
    StepHeld,
    StepReport,
    Taken,
)
from stream_balancer.wire.rank_batch import checksum, decode

__all__ = ["Decode", "RankPort"]

Decode = Callable[[Batch, Tensor], RankBatch]
"""A message and the buffer behind it -> the batch."""

logger = logging.getLogger("stream_balancer.transport")


@dataclass
class _Arriving:
    """A batch in the queue; or the place of one that is not complete."""

    step: int
    batch: RankBatch | None = None
    fetched: Fetched | None = None
    denominators: Denominators | None = None
    by_present: bool = True
    """The present controller has given it, and gets the credit back when it is taken."""


@dataclass
class _Parts:
    """Of a step that the trainer has: what it takes over of lost ranks."""

    arrived: deque[RankBatch] = field(default_factory=deque)
    taken: int = 0
    is_asking: bool = False
    complete: StepComplete | None = None


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
        self._decode, self._linger_s = decode, linger_s
        self._pool = BufferPool(keep=request.depth + 1, pinned=pinned)
        self._reader = PartialReader(
            payloads,
            self._pool,
            request.max_batch_bytes,
            thread=f"sb-fetch{request.rank}" if channel.threads else None,
            on_error=self._on_unreadable,
        )
        self._queue: deque[_Arriving] = deque()
        self._lock = threading.RLock()
        self._end: Exception | None = None
        self._arrived = self._taken = 0
        self._newest_step = -1
        self._taken_is_queued = False
        self._working_on: int | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._reconnect, self._leaving = reconnect, False
        self._end_due: ThreadEvent | None = None  # End has come, from a controller that was lost, and must come again
        self._given = None if reconnect is None else GivenSteps()
        self._parts: dict[int, _Parts] = {}  # by step, from the first question to the acknowledgement
        self._broken: Exception | None = None  # why nothing comes any more, also behind the end
        self.control = RankControl(self._send)

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
            # One message for all that is taken until its turn comes: each wakes the controller.
            is_queued, self._taken_is_queued = self._taken_is_queued, True
        if not is_queued:
            self._channel.send(self._taken_so_far)
        return first.batch

    def next_part(self, step: int) -> RankBatch | StepComplete | None:
        with self._lock:
            parts = self._parts.setdefault(step, _Parts())
            if parts.arrived:
                parts.taken += 1
                return parts.arrived.popleft()
            if parts.complete is not None:
                complete, parts.complete = parts.complete, None
                return complete
            if self._broken is not None:
                raise to_raise(self._broken)
            # a controller that was started again is asked once it has given the step
            if not parts.is_asking and not self._is_known(step):
                parts.is_asking = True
                self._channel.send(Outgoing(PartsDone(step, parts.taken)))
            return None

    def report(self, done: StepReport | StepHeld) -> None:
        with self._lock:
            if isinstance(done, StepReport):
                self._working_on = None
                self._parts.pop(done.step, None)
            if self._given is None or self._given.report(done):
                self._channel.send(Outgoing(done))

    def _send(self, message: Message) -> None:
        with self._lock:
            channel = self._channel
        channel.send(Outgoing(message))

    def leave(self) -> None:
        with self._lock:
            self._leaving = True  # whoever is lost from now on is not waited for
            if self._awaits_end:
                return  # the end closes it: reports are repeated before that
        self._channel.close()

    def close(self) -> None:
        self.control.fail(ClosedResourceError("the feed was closed"))
        self.leave()
        self._reader.stop()  # what it fetches would be thrown away
        if self._awaits_end and not self._channel.threads:
            return
        if self._end_due is not None:
            self._end_due.wait(self._linger_s)
        self._channel.wait_closed(self._linger_s)
        self.abort()

    def abort(self) -> None:
        """Release everything without a word, as if the process were killed; threads have ended when this returns."""
        self._finish(ClosedResourceError())
        self.control.fail(ClosedResourceError("the feed was closed"))
        self._reader.stop()
        self._channel.abort()
        self._reader.join()
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
            if not isinstance(error, EndOfStream):
                self._broken = self._broken or error
        if self._end_due is not None:
            self._end_due.set()
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
        self.action(self.state, message)
        if isinstance(message, ReassignedPart):
            if message.step > self._newest_step:
                raise unexpected(message, f"before step {message.step} itself")
            self._check_sizes(message, total_bytes, sizes)
            return (total_bytes,)
        self._check(message, total_bytes, sizes)
        return (total_bytes,)

    def allocate(self, size: int) -> Tensor:
        return self._pool.lend(size)

    @property
    def state(self) -> State:
        if self._end is None or self._awaits_end:
            return State.OPEN
        return State.ENDING if isinstance(self._end, EndOfStream) else State.OVER

    def _on_batch(self, message: Batch, buffers: Sequence[Tensor], _: object) -> None:
        if message.wire_crc and message.wire_crc != checksum(message, buffers[0]):
            raise WireError(f"rank {self.rank}: the checksum of step {message.step} is wrong: damaged on its way")
        if self._is_known(message.step):
            self._on_given_again(message, buffers[0])
        else:
            arriving, batch = _Arriving(message.step), self._decode(message, buffers[0])
            self._add(arriving)
            self._enter(arriving, batch)

    def _on_partial(self, message: PartialBatch, buffers: Sequence[Tensor], references: Sequence[object]) -> None:
        arriving = _Arriving(message.step)
        self._add(arriving)
        self._reader.read(message, buffers[0], references, partial(self._on_fetched, arriving))

    def _on_denominators(self, message: Denominators, *_: object) -> None:
        with self._lock:
            waiting = [a for a in self._queue if a.step == message.step and a.batch is None and a.denominators is None]
            if not waiting:
                raise unexpected(message, f"while step {message.step} does not wait for it")
            waiting[0].denominators = message
        self._complete(waiting[0])

    def _on_part(self, message: ReassignedPart, buffers: Sequence[Tensor], _: object) -> None:
        part = self._decode(message, buffers[0])
        with self._lock:
            # of one that is acknowledged: all ranks had met before the other one was lost
            has_it = message.step == self._working_on or any(one.step == message.step for one in self._queue)
            if has_it or message.step in self._parts:
                parts = self._parts.setdefault(message.step, _Parts())
                parts.arrived.append(part)
                parts.is_asking, parts.complete = False, None
        self._notify()

    def _on_complete(self, message: StepComplete, *_: object) -> None:
        with self._lock:
            parts = self._parts.get(message.step)
            if parts is not None:
                parts.is_asking, parts.complete = False, message
        self._notify()

    def _on_end(self, *_: object) -> None:
        self._finish(EndOfStream())
        if self._leaving:
            self._channel.close()

    @property
    def _awaits_end(self) -> bool:
        return self._end_due is not None and not self._end_due.is_set()

    def _on_version(self, message: PolicyVersion, *_: object) -> None:
        self.control.version_is(message)
        self._notify()

    def _on_statistics(self, message: StatisticsReply, *_: object) -> None:
        self.control.answered(message)

    # What belongs to the last steps may come behind the end.
    actions = either(
        (Denominators, _on_denominators),
        (ReassignedPart, _on_part),
        (StepComplete, _on_complete),
        (PolicyVersion, _on_version),
        (StatisticsReply, _on_statistics),
    ) | {
        (State.OPEN, Batch): _on_batch,
        (State.OPEN, PartialBatch): _on_partial,
        (State.OPEN, End): _on_end,
    }

    def ended(self, error: Exception) -> None:
        if self._rejoin(error):
            return
        if not isinstance(error, RefusedError | ConfigError | WireError | RankLostError | ClosedResourceError):
            cause = str(error) or "it closed"
            lost = RankLostError(self._explain_loss(cause), rank=self.rank, step=self._working_on, cause=cause)
            lost.__cause__ = error
            error = lost
        self._finish(error)
        self.control.fail(error)
        self._reader.stop()

    def _explain_loss(self, cause: str) -> str:
        return (
            f"rank {self.rank} lost its controller: {cause}. What was not acknowledged is held by the balancer, if it "
            "lives. Start the controller again and open a new RankFeed"
        )

    def _check(self, message: Batch | PartialBatch, total_bytes: int, sizes: Sequence[int]) -> None:
        """Before any allocation: this rank's, of a later step (one may have been given up), against a credit, and not
        larger than was allowed."""
        me, step = f"rank {self.rank}", message.step
        self._check_sizes(message, total_bytes, sizes)
        known = isinstance(message, Batch) and self._is_known(step)
        if self._given is not None and step <= self._newest_step and not known:
            raise self._other_controller(f"step {step} comes after step {self._newest_step}")
        if step <= self._newest_step and not known:
            raise WireError(f"{me}: got step {step} after step {self._newest_step}")
        if self._arrived - self._taken >= self._depth:
            raise WireError(f"{me}: the controller sent step {step} without a credit")

    def _check_sizes(self, message: Batch | PartialBatch, total_bytes: int, sizes: Sequence[int]) -> None:
        me, step = f"rank {self.rank}", message.step
        if not message.rank < message.dp_size:  # both are of the step: ranks may come and go while others stay
            raise WireError(f"{me}: got a batch for rank {message.rank} of {message.dp_size}")
        if total_bytes > self._max_bytes:
            raise WireError(
                f"{me}: step {step} announces {total_bytes} bytes, more than max_batch_bytes ({self._max_bytes}). "
                "Raise max_batch_bytes of RankFeed, or lower batch_size"
            )
        if tuple(sizes) != (message.wire_bytes,) or not 0 < message.meta_bytes <= message.wire_bytes <= total_bytes:
            raise WireError(f"{me}: step {step} announces impossible sizes: {message}, {sizes}")

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
            is_final = self.state is State.OVER or self._leaving or any(one.batch is None for one in self._queue)
            # the next controller does not know what was reassigned, and would have it trained on twice
            is_final = is_final or bool(self._parts)
            if self._given is None or self._reconnect is None or is_final or not may_come_back(error):
                return False
            if self._end is not None:  # the controller may wait for what was reported, and lost on its way
                self._end_due = ThreadEvent()
            self._given.controller_lost()
            for arriving in self._queue:
                # Their credits died with the controller that gave them; the next one gives its own.
                arriving.by_present = False
            self._arrived = self._taken = 0
            self._taken_is_queued = False
            old, self._channel = self._channel, self._reconnect()
        logger.warning("rank %d waits for its controller to be started again: %s", self.rank, error)
        old.abort()  # without the lock: its threads may wait for that
        self._channel.start(self)
        self.control.repeat()
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
        self._notify()

    def _other_controller(self, why: str) -> RankLostError:
        return RankLostError(
            f"rank {self.rank}: its controller was started again without its journal: {why}. What it had accepted is "
            "lost. Start the controller with its journal, or the ranks again too",
            rank=self.rank,
            step=self._working_on,
            cause=why,
        )

    # payloads that lie elsewhere

    def _on_fetched(self, arriving: _Arriving, fetched: Fetched) -> None:
        with self._lock:
            arriving.fetched = fetched
        self._channel.send(Outgoing(PayloadsFetched(arriving.step, fetched.missing)))
        self._complete(arriving)

    def _on_unreadable(self, error: Exception) -> None:
        self._finish(error)  # raised by take()
        self._channel.abort()

    def _complete(self, arriving: _Arriving) -> None:
        """Called once when the payloads are here, and once when the denominators are: the later one completes."""
        with self._lock:
            fetched, denominators = arriving.fetched, arriving.denominators
            if fetched is None or denominators is None:
                return
            arriving.fetched = None
        message, buffer = fetched.complete(denominators, self._pool.lend)
        self._enter(arriving, self._decode(message, buffer))


def _ids(batch: RankBatch) -> tuple[str, ...]:
    return tuple(rollout.rollout_id for rollout in batch.rollouts)
