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
from collections import deque
from collections.abc import Callable, Sequence

import anyio
from torch import Tensor

from stream_balancer.errors import BrokenResourceError, EndOfStream, WireError, to_raise
from stream_balancer.transport.channel import Channel, Outgoing, PeerClosed, Session, State, either
from stream_balancer.transport.event_loop import InLoop
from stream_balancer.transport.leases import Leases
from stream_balancer.transport.offers import Item, Offer, RequestMessage, headers_of, offer_of
from stream_balancer.transport.replies import reason_of
from stream_balancer.transport.request_ledger import Limits
from stream_balancer.transport.requests import Mode
from stream_balancer.transport.unanswered import Unanswered
from stream_balancer.wire.messages import (
    MAX_ENTRIES,
    MAX_TEXT,
    Accepted,
    Admitted,
    Cancel,
    DeclareGroup,
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
    StatisticsReply,
    StatisticsRequest,
)
from stream_balancer.wire.rollouts import check_header

__all__ = ["ProducerSession"]

logger = logging.getLogger("stream_balancer.transport")


class ProducerSession(Session):
    """The connection to one producer: what it asks, in the order of its numbers, and one reply to each."""

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
        self._channel, self._in_loop, self._linger_s = channel, in_loop, linger_s
        self._leases = Leases(request.owner, limits.max_put_bytes, channel)
        self._unanswered = Unanswered(limits)
        self._lock = threading.Lock()  # of the next two, which the loop and the channel's thread share
        self._accepted: list[int] = []  # to be sent
        self._version: int | None = None  # to be sent
        self._arrived: deque[Item] = deque()  # from the channel's thread, on its way into the loop
        self._is_on_its_way = False
        # in the loop
        self._inbox: deque[Item] = deque()
        self._taken: dict[int, Offer] = {}  # without a reply
        self._state = State.OPEN
        self._error: Exception = EndOfStream()  # why it is over
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
        return self._unanswered.settle(number)

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
        return bool(self._leases)

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
        headers, expected = headers_of(message), self._unanswered.next_number
        if message.number < expected or len(headers) != len(sizes):
            raise WireError(
                f"expected put number {expected} or later and a buffer for each rollout, got {message}"[:500]
            )
        self._unanswered.check_room(sizes)
        for header, size in zip(headers, sizes, strict=True):
            check_header(header, size)
            self._leases.check(header)
        return sizes

    def _on_request(self, message: RequestMessage, buffers: Sequence[Tensor], _: object) -> None:
        self._unanswered.add(message, message.number, sum(map(Tensor.numel, buffers)))
        self._deliver(offer_of(message, buffers, self._leases))

    def _on_cancel(self, message: Cancel, *_: object) -> None:
        self._unanswered.check_sent(message, message.number)
        self._deliver(message)

    def _on_release(self, message: ReleaseSlot, *_: object) -> None:
        self._deliver(message)

    def _deliver(self, item: Item) -> None:
        """One call into the loop for all that comes until that runs."""
        self._arrived.append(item)
        if not self._is_on_its_way:
            self._is_on_its_way = True
            self._in_loop(self._take_in_arrived)

    actions = either(
        (Put, _on_request),
        (PutGroup, _on_request),
        (DeclareGroup, _on_request),
        (Reserve, _on_request),
        (EndInput, _on_request),
        (StatisticsRequest, _on_request),
        (Cancel, _on_cancel),
        (ReleaseSlot, _on_release),
    )

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

    def _take_in_arrived(self) -> None:
        # First of all: whoever sees it set has appended before this, and whoever does not queues another call.
        self._is_on_its_way = False
        if self._state is State.OVER:
            self._arrived.clear()
            return
        at_once = None if self._channel.threads else self._at_once
        while self._arrived:
            item = self._arrived.popleft()
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
