"""The controller's end of a producer, over any channel: puts in, one reply each out.

::

    Put, PutGroup, DeclareGroup, Cancel   --take--> puts     their numbers rise, their bytes fit staged_bytes
    Reserve, EndInput, StatisticsRequest  --take--> requests, numbered and answered as puts are
    ReleaseSlot                           --take--> places that are not needed
    Accepted, PutRefused, End             <-answer, end--    one reply to each put, to a cancelled one too
    Admitted, StatisticsReply             <-admit_slot, send_statistics--   as such a reply
    PolicyVersion                         <-push_version--   the newest

``admit`` and ``receive`` run in the channel's thread and decode there; what a user of the session calls belongs to the
event loop, and ``in_loop`` leads from the one to the other.
:attr:`ProducerSession.actions` is the table of what may come; the rest is a WireError, which ends the channel.
"""

from __future__ import annotations

import logging
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import anyio
from torch import Tensor

from stream_balancer.core.groups import GroupSize, closed
from stream_balancer.errors import BrokenResourceError, EndOfStream, RolloutError, WireError, to_raise
from stream_balancer.transport.channel import Channel, Outgoing, PeerClosed, Session, State, either, unexpected
from stream_balancer.transport.event_loop import InLoop
from stream_balancer.transport.put_ledger import Limits, Mode, reason_of
from stream_balancer.types import Rollout
from stream_balancer.wire.messages import (
    MAX_ENTRIES,
    MAX_TEXT,
    Accepted,
    Admitted,
    Cancel,
    DeclareGroup,
    DropPayloads,
    End,
    EndInput,
    JoinProducer,
    Message,
    PolicyVersion,
    Put,
    PutGroup,
    PutRefused,
    ReleaseSlot,
    Reserve,
    RolloutHeader,
    StatisticsReply,
    StatisticsRequest,
)
from stream_balancer.wire.partial_batch import Lease
from stream_balancer.wire.rollouts import check_header, decode_kept, decode_rollout

__all__ = ["Item", "Offer", "ProducerSession"]

logger = logging.getLogger("stream_balancer.transport")


class Offer(NamedTuple):
    """A put that has arrived at the controller."""

    number: int
    mode: Mode
    rollouts: tuple[Rollout, ...]
    refusal: str | None = None
    """Why it cannot be put: one of its rollouts is none. The connection is in order. (Text: an error would keep the
    frames it went through alive.)"""
    declared: GroupSize | None = None
    """Of its group, with or without rollouts."""
    slot: int | None = None
    """The slot it is put in."""
    reserve: Reserve | None = None
    """What is asked for, if that is a slot."""


Item: TypeAlias = Offer | Cancel | ReleaseSlot


class ProducerSession(Session):
    """One producer."""

    def __init__(
        self, channel: Channel, request: JoinProducer, limits: Limits, in_loop: InLoop, *, linger_s: float = 5.0
    ) -> None:
        """``in_loop`` calls a function in the event loop soon, and in order; where the channel lives in that loop, at
        once. To be given to ``channel.start``."""
        self.name = request.label
        self.producer_id = request.producer_id or secrets.token_bytes(8)
        """The same for every connection of this producer."""
        self.owner = request.owner
        """Where ranks fetch the payloads that this producer keeps; None if it keeps none."""
        self._channel, self._limits, self._in_loop, self._linger_s = channel, limits, in_loop, linger_s
        self._next = 0
        self._kept: set[int] = set()  # payloads the producer must keep
        self._dropped: deque[int] = deque()
        self._drop_is_queued = False
        self._lock = threading.Lock()  # of the next three, which the loop and the channel's thread share
        self._sizes: dict[int, int] = {}  # bytes of puts without a reply
        self._staged = 0
        self._accepted: list[int] = []
        # in the loop
        self._inbox: deque[Item] = deque()
        self._taken: dict[int, Offer] = {}  # without a reply
        self._state = State.OPEN
        self._error: Exception = EndOfStream()  # why it is over
        self._version: int | None = None  # to be sent
        self._gone = anyio.Event()
        self._callback: Callable[[], object] = lambda: None
        self._at_once: Callable[[Offer], object] | None = None

    # the controller's side; in the event loop

    @property
    def state(self) -> State:
        return self._state

    @property
    def live(self) -> bool:
        """False once the producer has closed or was lost."""
        return self._state is not State.OVER

    def subscribe(
        self, callback: Callable[[], object] = lambda: None, at_once: Callable[[Offer], object] | None = None
    ) -> None:
        """``callback()`` is called in the loop, perhaps in no task, when :meth:`take` has something new. Offers that
        the last subscriber left unanswered come again. ``at_once``: who puts without waiting in this same loop can be
        answered only here and now. Without arguments: nobody takes any more."""
        self._callback, self._at_once = callback, at_once
        # in front, and in their order: they came before what waits
        self._inbox.extendleft(reversed(self._taken.values()))
        self._taken.clear()

    def take(self) -> Item | None:
        """The next event; None if there is none. Raises BrokenResourceError once the producer is lost, EndOfStream
        once it has closed."""
        if self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Offer):
                self._taken[item.number] = item
            return item
        if self._state is State.OVER:
            raise to_raise(self._error)
        return None

    def answer(self, number: int, error: Exception | None) -> None:
        """The reply to a put: accepted, or why not. The first one counts. Never blocks."""
        if not self._settle(number):
            return
        if error is None:
            with self._lock:
                self._accepted.append(number)
                is_queued = len(self._accepted) % MAX_ENTRIES != 1  # the message that will hold it
            if not is_queued:
                self._channel.send(self._take_accepted)
        else:
            reason, text = reason_of(error)
            text = text.encode(errors="replace").decode()[:MAX_TEXT]
            self._channel.send(Outgoing(PutRefused(number, reason, text)))

    def admit_slot(self, number: int, version: int) -> None:
        """The reply to a :class:`Reserve`: they may begin, at this version. Never blocks."""
        if self._settle(number):
            self._channel.send(Outgoing(Admitted(number, version)))

    def send_statistics(self, reply: StatisticsReply) -> None:
        """The reply to a :class:`StatisticsRequest`. Never blocks."""
        if self._settle(reply.number):
            self._channel.send(Outgoing(reply))

    def push_version(self, version: int) -> None:
        """The policy version in force; only the newest is sent. Never blocks."""
        with self._lock:
            is_queued, self._version = self._version is not None, version
        if not is_queued:
            self._channel.send(self._take_version)

    def _settle(self, number: int) -> bool:
        """It has its reply. False if it had one before."""
        self._taken.pop(number, None)
        with self._lock:
            size = self._sizes.pop(number, None)
            self._staged -= size or 0
        return size is not None

    def supersede(self) -> None:
        """The producer has connected again: this connection is over."""
        self._fail(BrokenResourceError(f"producer {self.name} has connected again"))

    def end(self) -> None:
        """Notify the producer that nothing is taken any more. Never blocks."""
        if self._state is State.OPEN:
            self._state = State.ENDING
            self._channel.send(Outgoing(End()))

    @property
    def keeps_payloads(self) -> bool:
        """Whether this producer still keeps payloads that are needed."""
        return bool(self._kept)

    async def aclose(self) -> None:
        """Release the connection; after :meth:`end`, wait a moment for the producer to close it."""
        with anyio.CancelScope(shield=True):
            if self._state is State.ENDING:
                with anyio.move_on_after(self._linger_s):
                    await self._gone.wait()
            self._fail(BrokenResourceError(f"the connection to producer {self.name} was closed here"))
            self._channel.abort()

    # in the channel's thread

    def admit(self, message: Message, sizes: Sequence[int]) -> Sequence[int]:
        if not isinstance(message, (Put, PutGroup)):
            return super().admit(message, sizes)
        headers = _headers(message)
        if message.number < self._next or len(headers) != len(sizes):
            raise WireError(
                f"expected put number {self._next} or later and a buffer for each rollout, got {message}"[:500]
            )
        with self._lock:
            staged = self._staged
        # one put may be larger than all that may be staged: it travels alone, or it never could
        bound = self._limits.staged_bytes - staged if staged else max(self._limits)
        if sum(sizes) > bound:
            raise WireError(
                f"it announces {sum(sizes)} bytes, but may stage {bound} now. Install one stream_balancer everywhere"
            )
        for header, size in zip(headers, sizes, strict=True):
            check_header(header, size)
            self._check_kept(header)
        return sizes

    def _check_kept(self, header: RolloutHeader) -> None:
        key = header.payload
        if key is not None and (
            self.owner is None or key in self._kept or header.total_bytes > self._limits.max_put_bytes
        ):
            raise WireError(f"it offers to keep payload {key} of {header.total_bytes} bytes, which it may not")

    def _on_put(self, message: Put | PutGroup, buffers: Sequence[Tensor], _: object) -> None:
        self._count(message, sum(buffer.numel() for buffer in buffers))
        self._deliver(self._read(message, buffers))

    def _on_declared(self, message: DeclareGroup, *_: object) -> None:
        self._count(message)
        mode = Mode.ABANDON if message.fate == "abandoned" else Mode.DECLARE
        declared = GroupSize(message.group_id, message.size if message.fate == "expected" else None)
        self._deliver(Offer(message.number, mode, (), declared=declared))

    def _on_reserve(self, message: Reserve, *_: object) -> None:
        self._count(message)
        self._deliver(Offer(message.number, Mode.RESERVE, (), reserve=message))

    def _on_end_input(self, message: EndInput, *_: object) -> None:
        self._count(message)
        self._deliver(Offer(message.number, Mode.END, ()))

    def _on_statistics(self, message: StatisticsRequest, *_: object) -> None:
        self._count(message)
        self._deliver(Offer(message.number, Mode.STATISTICS, ()))

    def _on_cancel(self, message: Cancel, *_: object) -> None:
        if message.number >= self._next:
            raise unexpected(message, f"while put number {self._next} is expected")
        self._deliver(message)

    def _on_release(self, message: ReleaseSlot, *_: object) -> None:
        self._deliver(message)

    def _count(
        self, message: Put | PutGroup | DeclareGroup | Reserve | EndInput | StatisticsRequest, size: int = 0
    ) -> None:
        """It is on its way until its reply."""
        if message.number < self._next:
            raise unexpected(message, f"while put number {self._next} is expected")
        self._next = message.number + 1  # one that has joined again goes on counting
        with self._lock:
            self._sizes[message.number] = size
            self._staged += size

    def _deliver(self, item: Item) -> None:
        self._in_loop(partial(self._take_in, item))

    actions = either(
        (Put, _on_put),
        (PutGroup, _on_put),
        (DeclareGroup, _on_declared),
        (Reserve, _on_reserve),
        (EndInput, _on_end_input),
        (StatisticsRequest, _on_statistics),
        (Cancel, _on_cancel),
        (ReleaseSlot, _on_release),
    )

    def _read(self, message: Put | PutGroup, buffers: Sequence[Tensor]) -> Offer:
        rollouts, refusal = [], None
        for header, buffer in zip(_headers(message), buffers, strict=True):
            try:
                rollouts.append(self._rollout(header, buffer))
            except RolloutError as error:
                refusal = refusal or str(error)
        if isinstance(message, PutGroup):
            declared = closed(rollouts[0].group_id) if rollouts and message.complete else None
            return Offer(message.number, Mode.GROUP, tuple(rollouts), refusal, declared, message.slot)
        mode = Mode.PUT if message.wait else Mode.NOWAIT
        return Offer(message.number, mode, tuple(rollouts), refusal, slot=message.slot)

    def _rollout(self, header: RolloutHeader, buffer: Tensor) -> Rollout:
        if header.payload is None or self.owner is None:
            return decode_rollout(header, buffer)
        self._check_kept(header)  # again: one group may name a payload twice
        lease = Lease()
        self._kept.add(header.payload)
        weakref.finalize(lease, self._on_released, header.payload).atexit = False
        return decode_kept(header, buffer, self.owner, lease)

    def _on_released(self, key: int) -> None:
        """Runs wherever the last reference to a rollout dies, perhaps inside a garbage collection: takes no lock."""
        self._kept.discard(key)
        self._dropped.append(key)
        if not self._drop_is_queued:
            self._drop_is_queued = True
            self._channel.send(self._take_dropped)

    def _take_dropped(self, channel: Channel) -> Outgoing | None:
        # First of all: whoever sees it set has appended before this, and whoever does not queues another call. To look
        # whether the own key is the only one would not do: two threads that append at the same time both see two.
        self._drop_is_queued = False
        keys: list[int] = []
        while self._dropped and len(keys) < MAX_ENTRIES:
            keys.append(self._dropped.popleft())
        if self._dropped:
            channel.send(self._take_dropped)
        return Outgoing(DropPayloads(tuple(keys))) if keys else None

    def _take_accepted(self, channel: Channel) -> Outgoing:
        with self._lock:
            numbers, self._accepted = self._accepted[:MAX_ENTRIES], self._accepted[MAX_ENTRIES:]
        return Outgoing(Accepted(tuple(numbers)))

    def _take_version(self, _: Channel) -> Outgoing | None:
        with self._lock:
            version, self._version = self._version, None
        return None if version is None else Outgoing(PolicyVersion(version))

    def ended(self, error: Exception) -> None:
        if isinstance(error, PeerClosed):
            self._in_loop(lambda: self._fail(EndOfStream()))
            return
        if isinstance(error, WireError):
            logger.warning("the connection to producer %s was closed: %s", self.name, error)
        lost = BrokenResourceError(f"producer {self.name} was lost: {error}")
        self._in_loop(lambda: self._fail(lost))

    # in the loop, on behalf of that thread

    def _take_in(self, item: Item) -> None:
        if self._state is State.OVER:
            return
        at_once = None if self._channel.threads else self._at_once
        if at_once is not None and isinstance(item, Offer) and item.mode is Mode.NOWAIT:
            at_once(item)
        else:
            self._inbox.append(item)
        self._callback()

    def _fail(self, error: Exception) -> None:
        if self._state is not State.OVER:
            self._error, self._state = error, State.OVER
            self._gone.set()
            self._callback()


def _headers(message: Put | PutGroup) -> Sequence[RolloutHeader]:
    return (message.rollout,) if isinstance(message, Put) else message.rollouts
