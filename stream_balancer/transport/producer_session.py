"""The controller's end of a producer, over any channel: puts in, one reply each out.

::

    open     Put, PutGroup        their numbers rise, their bytes fit staged_bytes: to be taken, then answered
             DeclareGroup         as a put without bytes
             Cancel               of a number that was sent: to be taken; the put's reply comes all the same
             answer, end          Accepted (many in one message), PutRefused; End
    any      ended                the producer closed, or was lost: EndOfStream, BrokenResourceError

``admit`` and ``receive`` run in the channel's thread and decode there; what a user of the session calls belongs to the
event loop, and ``in_loop`` leads from the one to the other. Any other message is a WireError, which ends the channel.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import anyio
from torch import Tensor

from stream_balancer.core.groups import GroupSize, closed
from stream_balancer.errors import BrokenResourceError, EndOfStream, RolloutError, WireError, to_raise
from stream_balancer.transport.channel import Channel, Outgoing, PeerClosed, Session, unexpected
from stream_balancer.transport.event_loop import InLoop
from stream_balancer.transport.put_ledger import Limits, Mode, reason_of
from stream_balancer.types import Rollout
from stream_balancer.wire.messages import (
    MAX_ENTRIES,
    MAX_TEXT,
    Accepted,
    Cancel,
    DeclareGroup,
    DropPayloads,
    End,
    JoinProducer,
    Message,
    Put,
    PutGroup,
    PutRefused,
    RolloutHeader,
)
from stream_balancer.wire.partial_share import Lease
from stream_balancer.wire.rollouts import check_header, decode_kept, decode_rollout

__all__ = ["Offer", "ProducerSession"]

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


class ProducerSession(Session):
    """One producer."""

    def __init__(
        self, channel: Channel, request: JoinProducer, limits: Limits, in_loop: InLoop, *, linger_s: float = 5.0
    ) -> None:
        """``in_loop`` calls a function in the event loop soon, and in order; where the channel lives in that loop, at
        once. To be given to ``channel.start``."""
        self.name = request.label
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
        self._arrived: deque[Offer | Cancel] = deque()
        # in the loop
        self._inbox: deque[Offer | Cancel] = deque()
        self._taken: dict[int, Offer] = {}  # without a reply
        self._error: Exception | None = None
        self._gone = anyio.Event()
        self._ended = False
        self._callback: Callable[[], object] = lambda: None
        self._at_once: Callable[[Offer], object] | None = None

    # the controller's side; in the event loop

    @property
    def live(self) -> bool:
        """False once the producer has closed or was lost."""
        return self._error is None

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

    def take(self) -> Offer | Cancel | None:
        """The next event; None if there is none. Raises BrokenResourceError once the producer is lost, EndOfStream
        once it has closed."""
        if self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Offer):
                self._taken[item.number] = item
            return item
        if self._error is not None:
            raise to_raise(self._error)
        return None

    def answer(self, number: int, error: Exception | None) -> None:
        """The reply to a put: accepted, or why not. The first one counts. Never blocks."""
        self._taken.pop(number, None)
        with self._lock:
            size = self._sizes.pop(number, None)
            if size is None:
                return
            self._staged -= size
            if error is None:
                self._accepted.append(number)
                if len(self._accepted) % MAX_ENTRIES != 1:
                    return  # the message that is already queued will hold it
        if error is None:
            self._channel.send(self._take_accepted)
        else:
            reason, text = reason_of(error)
            text = text.encode(errors="replace").decode()[:MAX_TEXT]
            self._channel.send(Outgoing(PutRefused(number, reason, text)))

    def end(self) -> None:
        """Notify the producer that nothing is taken any more. Never blocks."""
        if not self._ended:
            self._ended = True
            self._channel.send(Outgoing(End()))

    @property
    def keeps_payloads(self) -> bool:
        """Whether this producer still keeps payloads that are needed."""
        return bool(self._kept)

    async def aclose(self) -> None:
        """Release the connection; after :meth:`end`, wait a moment for the producer to close it."""
        with anyio.CancelScope(shield=True):
            if self._ended:
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

    def receive(self, message: Message, buffers: Sequence[Tensor], references: Sequence[object]) -> None:
        if isinstance(message, (Put, PutGroup)):
            self._next = message.number + 1  # one that has joined again goes on counting
            size = sum(buffer.numel() for buffer in buffers)
            with self._lock:
                self._sizes[message.number] = size
                self._staged += size
            self._deliver(self._read(message, buffers))
        elif isinstance(message, DeclareGroup) and message.number >= self._next:
            self._next = message.number + 1
            with self._lock:
                self._sizes[message.number] = 0
            mode = Mode.ABANDON if message.fate == "abandoned" else Mode.DECLARE
            declared = GroupSize(message.group_id, message.size if message.fate == "expected" else None)
            self._deliver(Offer(message.number, mode, (), declared=declared))
        elif isinstance(message, Cancel) and message.number < self._next:
            self._deliver(message)
        else:
            raise unexpected(message, f"put number {self._next} is expected")

    def _read(self, message: Put | PutGroup, buffers: Sequence[Tensor]) -> Offer:
        rollouts, refusal = [], None
        for header, buffer in zip(_headers(message), buffers, strict=True):
            try:
                rollouts.append(self._rollout(header, buffer))
            except RolloutError as error:
                refusal = refusal or str(error)
        if isinstance(message, PutGroup):
            declared = closed(rollouts[0].group_id) if rollouts and message.complete else None
            return Offer(message.number, Mode.GROUP, tuple(rollouts), refusal, declared)
        return Offer(message.number, Mode.PUT if message.wait else Mode.NOWAIT, tuple(rollouts), refusal)

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

    def ended(self, error: Exception) -> None:
        if isinstance(error, PeerClosed):
            self._in_loop(lambda: self._fail(EndOfStream()))
            return
        if isinstance(error, WireError):
            logger.warning("the connection to producer %s was closed: %s", self.name, error)
        lost = BrokenResourceError(f"producer {self.name} was lost: {error}")
        self._in_loop(lambda: self._fail(lost))

    def _deliver(self, item: Offer | Cancel) -> None:
        """To the loop, in one call with what else comes meanwhile."""
        self._arrived.append(item)
        if len(self._arrived) == 1:
            self._in_loop(self._take_arrived)

    # in the loop, on behalf of that thread

    def _take_arrived(self) -> None:
        while self._arrived:
            item = self._arrived.popleft()
            if self._error is not None:
                continue
            at_once = None if self._channel.threads else self._at_once
            if at_once is not None and isinstance(item, Offer) and item.mode is Mode.NOWAIT:
                at_once(item)
            else:
                self._inbox.append(item)
        self._callback()

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
            self._gone.set()
            self._callback()


def _headers(message: Put | PutGroup) -> Sequence[RolloutHeader]:
    return (message.rollout,) if isinstance(message, Put) else message.rollouts
