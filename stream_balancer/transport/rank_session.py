"""The controller's end of the conversation with one rank: credits, reports, the end. Written once, for every channel.

A session does not know which kind of channel it talks through. ``admit``, ``receive``, ``ended`` and ``stalled`` run in
the channel's thread, and hop into the event loop for whatever changes here; all else is called there. No socket, no
clock, no task.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
from torch import Tensor

from stream_balancer.core.staleness import next_version
from stream_balancer.errors import (
    ClosedResourceError,
    EndOfStream,
    RankLostError,
    RefusedError,
    WireError,
    WouldBlock,
    rank_name,
    to_raise,
)
from stream_balancer.transport import Asked, Link, Report
from stream_balancer.transport.channel import Channel, Outgoing, PeerClosed, Session, Source, State, either, unexpected
from stream_balancer.transport.event_loop import InLoop, beside_the_loop
from stream_balancer.transport.late_columns import check_columns, read_columns
from stream_balancer.types import RankBatch
from stream_balancer.wire.messages import (
    MAX_TEXT,
    Denominators,
    End,
    EndBalancer,
    JoinRank,
    Message,
    PartsDone,
    PayloadsFetched,
    PolicyVersion,
    ReassignedPart,
    Release,
    Released,
    StatisticsReply,
    StatisticsRequest,
    StepColumns,
    StepComplete,
    StepHeld,
    StepReport,
    Taken,
)
from stream_balancer.wire.partial_batch import encode_skeleton, is_remote
from stream_balancer.wire.rank_batch import encode

__all__ = ["RankSession"]

logger = logging.getLogger("stream_balancer.transport")


class RankSession(Session, Link):
    """One incarnation of a rank, as the controller sees it."""

    def __init__(self, channel: Channel, request: JoinRank, in_loop: InLoop) -> None:
        """``request``: what the rank asked for, judged by :class:`~stream_balancer.transport.admission.Admission`.
        ``in_loop`` runs a function in the event loop, in order; with a channel that has no threads, at once."""
        self.rank, self.incarnation, self.role = request.rank, request.incarnation, request.role
        self._feed_id = request.feed_id
        self._who = rank_name(request.rank, request.role)
        self._num_tokens: dict[int, int] = {}  # of steps whose columns it has not given
        self.stalled_s = 0.0
        """Seconds without a sign of life, once the channel reports a stall; 0.0 while all is well."""
        self._channel, self._in_loop = channel, in_loop
        self._depth, self._max_bytes = request.depth, request.max_batch_bytes
        self._sent = self._taken = 0
        self._last_step: int | None = None
        self._reports: deque[Report | Asked] = deque()
        self._state = State.OPEN
        self._error: Exception = ClosedResourceError()  # why it is over
        self._callbacks: list[Callable[[], None]] = []

    # Link: in the event loop

    @property
    def credits(self) -> int:
        """Batches the rank has room for now; 0 once lost or ended."""
        return self._depth - (self._sent - self._taken) if self._state is State.OPEN else 0

    @property
    def state(self) -> State:
        return self._state

    @property
    def live(self) -> bool:
        """False once lost or closed."""
        return self._state is not State.OVER

    @property
    def channel(self) -> Channel:
        """What it talks through."""
        return self._channel

    def is_of(self, request: JoinRank) -> bool:
        """Whether it is a former connection of the feed that asks: the network broke, and only the rank knows yet."""
        return bool(self._feed_id) and self._feed_id == request.feed_id

    def subscribe(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def send(self, batch: RankBatch, *, confirm: bool = False) -> None:
        self._use_credit(batch.step)
        if self.role:
            self._num_tokens[batch.step] = batch.num_tokens
        # Packed when its turn comes, in the channel's thread: whether memory is shared is known then, and the event
        # loop copies no token.
        pack = pack_partial if confirm or is_remote(batch) else pack_whole
        self._channel.send(partial(pack, batch, self._max_bytes))

    def _use_credit(self, step: int) -> None:
        if self._state is State.OVER:
            raise to_raise(self._error)
        if self._state is State.ENDING:
            raise ClosedResourceError
        if self.credits == 0:
            raise WouldBlock
        self._sent, self._last_step = self._sent + 1, step

    def reassign(self, part: RankBatch) -> None:
        if self._state is State.OVER:
            raise to_raise(self._error)
        self._channel.send(partial(pack_part, part, self._max_bytes))

    def complete(self, message: StepComplete) -> None:
        self._channel.send(Outgoing(message))

    def denominators(self, message: Denominators) -> None:
        self._channel.send(Outgoing(message))

    def notify(self, message: PolicyVersion | StatisticsReply | Release) -> None:
        self._channel.send(Outgoing(message))

    def report(self) -> Report | Asked | None:
        if self._reports:
            return self._reports.popleft()
        if self._state is State.OVER:
            raise to_raise(self._error)
        return None

    def end(self) -> None:
        if self._state is State.OPEN:
            self._state = State.ENDING
            self._channel.send(Outgoing(End()))

    def supersede(self, incarnation: int) -> None:
        """A newer incarnation of the rank has come, or this one again: this connection is over."""
        again = incarnation == self.incarnation
        cause = "the rank has connected again" if again else f"superseded by incarnation {incarnation}"
        self._fail(self._lost(cause))
        self._channel.close(cause)

    def close(self, error: RankLostError) -> None:
        if self._state is not State.OVER:
            self._fail(error)
            self._channel.close(str(error).encode(errors="replace").decode()[:MAX_TEXT])

    async def aclose(self) -> None:
        self._fail(ClosedResourceError())
        await beside_the_loop(self._channel.abort, threads=self._channel.threads)

    def _take_in(self, message: Taken | Report | Asked) -> None:
        # Whatever it sends is a sign of life.
        if self.stalled_s:
            self._on_stalled(0.0)
        if isinstance(message, Taken):
            self._taken = message.total
        elif self._state is not State.OVER:
            self._reports.append(message)
        self._notify()

    def _on_ended(self, error: Exception) -> None:
        if isinstance(error, PeerClosed):
            self._fail(EndOfStream() if self._state is State.ENDING else self._lost("the rank closed its feed"))
        elif isinstance(error, WireError):
            self._fail(self._lost(f"it broke the protocol: {error}"), error)
        elif isinstance(error, RefusedError):
            self._fail(self._lost(f"it refused what it was sent: {error}"), error)
        elif isinstance(error, OSError):
            self._fail(self._lost(str(error)), error)
        else:  # a batch that could not be packed: its own error says which rollout
            self._fail(error)

    def _on_stalled(self, seconds: float) -> None:
        if seconds and not self.stalled_s:
            logger.warning(
                "%s has given no sign of life for %.1f s: it is stopped, or the network stalls. Waiting",
                self._who,
                seconds,
            )
        elif self.stalled_s and not seconds:
            logger.warning("%s answers again after %.1f s", self._who, self.stalled_s)
        self.stalled_s = seconds
        self._notify()

    def _fail(self, error: Exception, cause: Exception | None = None) -> None:
        if self._state is not State.OVER:
            error.__cause__ = cause
            self._error, self._state = error, State.OVER
            self._notify()

    def _notify(self) -> None:
        for callback in self._callbacks:
            callback()

    def _lost(self, cause: str) -> RankLostError:
        step = self._last_step
        doing = "nothing had been sent to it" if step is None else f"the last step sent to it was {step}"
        return RankLostError(
            f"{self._who} (incarnation {self.incarnation}) was lost: {cause}; {doing}. What it has not "
            "acknowledged is still held. Restart the rank under a new incarnation, or give serve() a rejoin_timeout_s",
            rank=self.rank,
            step=step,
            cause=cause,
        )

    # Receiver: in the channel's thread

    def admit(self, message: Message, sizes: Sequence[int]) -> Sequence[int]:
        if not isinstance(message, StepColumns):
            return super().admit(message, sizes)
        num_tokens = self._num_tokens.get(message.step)
        if num_tokens is None:
            raise unexpected(message, f"for step {message.step}, whose columns are not asked for")
        check_columns(message, sizes, num_tokens)
        return sizes

    def _on_taken(self, message: Taken, *_: object) -> None:
        if not self._taken <= message.total <= self._sent:
            raise WireError(f"{message.total} batches taken, where {self._taken} were and {self._sent} were sent")
        self._in_loop(partial(self._take_in, message))

    def _on_done(self, message: StepReport | StepHeld, *_: object) -> None:
        check_report(message)
        if self.role and isinstance(message, StepReport):
            raise unexpected(message, "from a rank with a role, which gives columns")
        self._in_loop(partial(self._take_in, message))

    def _on_columns(self, message: StepColumns, buffers: Sequence[Tensor], _: object) -> None:
        check_report(message)
        del self._num_tokens[message.step]
        self._in_loop(partial(self._take_in, read_columns(message, buffers)))

    def _on_fetched(self, message: PayloadsFetched, *_: object) -> None:
        self._in_loop(partial(self._take_in, message))

    def _on_asks_or_spares(self, message: PartsDone | Released, *_: object) -> None:
        self._in_loop(partial(self._take_in, message))

    def _on_asked(self, message: EndBalancer | StatisticsRequest, *_: object) -> None:
        self._in_loop(partial(self._take_in, message))

    def _on_version(self, message: PolicyVersion, *_: object) -> None:
        try:
            next_version(None, message.version)
        except ValueError as error:
            raise WireError(str(error)) from None
        self._in_loop(partial(self._take_in, message))

    actions = either(
        (Taken, _on_taken),
        (StepReport, _on_done),
        (StepColumns, _on_columns),
        (StepHeld, _on_done),
        (PayloadsFetched, _on_fetched),
        (PartsDone, _on_asks_or_spares),
        (Released, _on_asks_or_spares),
        (PolicyVersion, _on_version),
        (EndBalancer, _on_asked),
        (StatisticsRequest, _on_asked),
    )

    def ended(self, error: Exception) -> None:
        self._in_loop(partial(self._on_ended, error))

    def stalled(self, seconds: float) -> None:
        self._in_loop(partial(self._on_stalled, seconds))


def check_report(report: StepReport | StepColumns | StepHeld) -> None:
    """Raise WireError for seconds that no clock gives: a rank's timing must not spoil what is learnt from all."""
    if not all(0.0 <= s < math.inf for s in (report.seconds, report.compute_s or 0.0, report.waited_s)):
        raise WireError(f"a report of impossible durations: {report}")


def pack_whole(batch: RankBatch, max_bytes: int, channel: Channel) -> Outgoing:
    """A rank batch, for :meth:`Channel.send`. Raises RolloutError or ValueError, naming the rollout or the step."""
    encoded = encode(batch, max_bytes=max_bytes, narrow=channel.narrow)
    return Outgoing(encoded.message, [Source(encoded.message.wire_bytes, encoded.fill)])


def pack_part(part: RankBatch, max_bytes: int, channel: Channel) -> Outgoing:
    """What another rank owed, for one that takes it over. Raises like :func:`pack_whole`."""
    whole = pack_whole(part, max_bytes, channel)
    return whole._replace(message=ReassignedPart(**msgspec.structs.asdict(whole.message)))


def pack_partial(batch: RankBatch, max_bytes: int, channel: Channel) -> Outgoing:
    """A rank batch some of whose payloads lie elsewhere, or that waits for what its step divides by."""
    encoded = encode_skeleton(batch, max_bytes=max_bytes)
    return Outgoing(encoded.message, [Source(encoded.message.wire_bytes, encoded.fill)], encoded.references)
