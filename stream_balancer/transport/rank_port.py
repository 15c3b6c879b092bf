"""A rank's end of the conversation with its controller. Written once, for every channel.

::

    channel's thread   Batch         -> decode -------------------------.
                       PartialBatch  -> PartialReader -> Denominators --+--> BatchQueue ------take-----> trainer
                       ReassignedPart, StepComplete --------------------> ReassignedParts --next_part--> trainer
                       PolicyVersion, StatisticsReply -------------------> RankControl

Batches leave in the order in which they came. A step whose payloads lie elsewhere is held until every rank has fetched
its own and the controller has said what all divide by; a payload that is gone leaves a padding copy of weight 0 in its
place. No socket, no clock; one lock, because the trainer's threads call :meth:`RankPort.take` and ``report``.
:attr:`RankPort.actions` is the table of what may come.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

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
from stream_balancer.transport.batch_queue import Arriving, BatchQueue
from stream_balancer.transport.buffers import BufferPool
from stream_balancer.transport.channel import (
    Channel,
    Outgoing,
    PayloadSource,
    PeerClosed,
    Session,
    State,
    either,
    may_come_back,
    unexpected,
)
from stream_balancer.transport.event_loop import beside_the_loop
from stream_balancer.transport.late_columns import pack_columns
from stream_balancer.transport.partial_reader import PartialReader
from stream_balancer.transport.rank_control import RankControl
from stream_balancer.transport.reassigned_parts import ReassignedParts
from stream_balancer.transport.threads import ThreadEvent
from stream_balancer.types import RankBatch
from stream_balancer.wire.messages import (
    Batch,
    Denominators,
    End,
    JoinRank,
    Message,
    PartialBatch,
    PolicyVersion,
    ReassignedPart,
    Release,
    Released,
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
        self.rank, self.dp_size, self.role = request.rank, request.dp_size, request.role
        if request.role:
            reconnect = None  # the next controller asks for columns again that the last one had
        self._channel, self._decode, self._linger_s = channel, decode, linger_s
        self._pool = BufferPool(keep=request.depth + 1, pinned=pinned)
        self._reader = PartialReader(
            payloads,
            self._pool,
            request.max_batch_bytes,
            thread=f"sb-fetch{request.rank}" if channel.threads else None,
            send=self._send,
            on_error=self._on_unreadable,
        )
        self._queue = BatchQueue(request, rejoins=reconnect is not None)
        self._parts = ReassignedParts()
        self._lock = threading.RLock()
        self._callbacks: list[Callable[[], None]] = []
        self._taken_is_queued = False
        self._reconnect = reconnect
        self._leaving = False  # whoever is lost from now on is not waited for
        self._has_ended = False  # End has come, and all before it
        self._end_due: ThreadEvent | None = None  # it came from a controller that was lost, and must come again
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
            batch = self._queue.take()
            if batch is None:
                end = EndOfStream() if self._has_ended else self._broken
                if end is not None and self._queue.is_empty:
                    raise to_raise(end)
                return None
            # One message for all that is taken until its turn comes: each wakes the controller.
            is_queued, self._taken_is_queued = self._taken_is_queued, True
        if not is_queued:
            self._channel.send(self._taken_so_far)
        return batch

    def next_part(self, step: int) -> RankBatch | StepComplete | None:
        with self._lock:
            found = self._parts.next(step)
            if found is not None:
                return found
            if self._broken is not None:
                raise to_raise(self._broken)
            # a controller that was started again is asked once it has given the step
            if not self._queue.is_known(step) and (question := self._parts.ask(step)) is not None:
                self._channel.send(Outgoing(question))
            return None

    def begin(self, step: int, number: int) -> int | None:
        with self._lock:
            index, spared = self._parts.begin(step, number)
            if spared is not None:
                self._channel.send(Outgoing(spared))
            return index

    def report(self, done: StepReport | StepHeld, columns: Mapping[str, Tensor] | None = None) -> None:
        with self._lock:
            if isinstance(done, StepReport):
                self._parts.done(done.step)
            if self._queue.report(done):
                self._channel.send(Outgoing(done) if columns is None else pack_columns(done, columns))

    def _send(self, message: Message) -> None:
        with self._lock:
            channel = self._channel
        channel.send(Outgoing(message))

    def leave(self) -> None:
        with self._lock:
            self._leaving = True
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
        self._break(ClosedResourceError())
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
            return Outgoing(Taken(self._queue.taken))

    def _break(self, error: Exception) -> None:
        """Nothing comes any more; the first reason counts."""
        with self._lock:
            if not self._queue.is_complete:
                self._queue.drop_incomplete()
                self._has_ended = False  # not all before the end will come
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
        with self._lock:
            self._queue.check(message, total_bytes, sizes)
        return (total_bytes,)

    def allocate(self, size: int) -> Tensor:
        return self._pool.lend(size)

    @property
    def state(self) -> State:
        if self._has_ended:
            return State.OPEN if self._awaits_end else State.ENDING
        return State.OPEN if self._broken is None else State.OVER

    def _on_batch(self, message: Batch, buffers: Sequence[Tensor], _: object) -> None:
        if message.wire_crc and message.wire_crc != checksum(message, buffers[0]):
            raise WireError(f"rank {self.rank}: the checksum of step {message.step} is wrong: damaged on its way")
        with self._lock:
            arriving = None if self._queue.is_known(message.step) else self._queue.expect(message.step)
        if arriving is None:
            self._on_given_again(decode(message, buffers[0]))
        else:
            self._on_whole(arriving, message, buffers[0])

    def _on_given_again(self, batch: RankBatch) -> None:
        """By a controller that was started again: the rank has it, and its trainer hears nothing of it."""
        with self._lock:
            is_taken, report = self._queue.give_again(batch)
            if is_taken:
                self._channel.send(self._taken_so_far)
            if report is not None:
                self.report(report)
        self._notify()

    def _on_partial(self, message: PartialBatch, buffers: Sequence[Tensor], references: Sequence[object]) -> None:
        with self._lock:
            arriving = self._queue.expect(message.step)
        self._reader.read(message, buffers[0], references, partial(self._on_whole, arriving))

    def _on_denominators(self, message: Denominators, *_: object) -> None:
        if not self._reader.agree(message):
            raise unexpected(message, f"while step {message.step} does not wait for it")

    def _on_whole(self, arriving: Arriving, message: Batch, buffer: Tensor) -> None:
        batch = self._decode(message, buffer)
        with self._lock:
            self._queue.enter(arriving, batch)
        self._notify()

    def _on_part(self, message: ReassignedPart, buffers: Sequence[Tensor], _: object) -> None:
        part = self._decode(message, buffers[0])
        with self._lock:
            # of one that is acknowledged: all ranks had met before the other one was lost
            if self._queue.has(message.step) or message.step in self._parts:
                self._parts.add(part)
        self._notify()

    def _on_release(self, message: Release, *_: object) -> None:
        with self._lock:  # sent under it, too: behind what was asked before, and before what is asked later
            has_it = self._queue.has(message.step) or message.step in self._parts
            self._channel.send(Outgoing(self._parts.release(message) if has_it else Released(message.step, 0)))

    def _on_complete(self, message: StepComplete, *_: object) -> None:
        with self._lock:
            self._parts.complete(message)
        self._notify()

    def _on_end(self, *_: object) -> None:
        with self._lock:
            self._has_ended = True
        if self._end_due is not None:
            self._end_due.set()
        self._notify()
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
        (Release, _on_release),
        (PolicyVersion, _on_version),
        (StatisticsReply, _on_statistics),
    ) | {
        (State.OPEN, Batch): _on_batch,
        (State.OPEN, PartialBatch): _on_partial,
        (State.OPEN, End): _on_end,
    }

    def _on_unreadable(self, error: Exception) -> None:
        self._break(error)  # raised by take()
        self._channel.abort()

    def ended(self, error: Exception) -> None:
        if self._rejoin(error):
            return
        if not isinstance(error, RefusedError | ConfigError | WireError | RankLostError | ClosedResourceError):
            cause = str(error) or "it closed"
            is_told = isinstance(error, PeerClosed) and str(error)
            text = self._explain_close(cause) if is_told else self._explain_loss(cause)
            lost = RankLostError(text, rank=self.rank, step=self._queue.working_on, cause=cause)
            lost.__cause__ = error
            error = lost
        self._break(error)
        self.control.fail(error)
        self._reader.stop()

    def _explain_close(self, cause: str) -> str:
        return f"the controller has closed the link to rank {self.rank}: {cause}"

    def _explain_loss(self, cause: str) -> str:
        return (
            f"rank {self.rank} lost its controller: {cause}. What was not acknowledged is held by the balancer, if it "
            "lives. Start the controller again and open a new RankFeed"
        )

    # a controller that is started again

    def _rejoin(self, error: Exception) -> bool:
        """Go on with the next controller, if there will be one. What is in the queue stays there, and what the trainer
        has is not given to it again."""
        with self._lock:
            is_final = self._broken is not None or self._leaving or not self._queue.is_complete
            # the next controller forms other rows, and what is trained on of a step cannot be taken back here
            is_final = is_final or self._queue.is_open
            # the next controller does not know what was reassigned, and would have it trained on twice, or not at all
            if self._reconnect is None or is_final or self._parts.any_reassigned or not may_come_back(error):
                return False
            if self._has_ended:  # the controller may wait for what was reported, and lost on its way
                self._end_due = ThreadEvent()
            self._queue.controller_lost()
            self._taken_is_queued = False
            old, self._channel = self._channel, self._reconnect()
        logger.warning("rank %d waits for its controller to be started again: %s", self.rank, error)
        old.abort()  # without the lock: its threads may wait for that
        self._channel.start(self)
        self.control.repeat()
        return True
