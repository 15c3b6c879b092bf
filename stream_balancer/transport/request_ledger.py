"""The producer's ledger of requests: which wait here, which are sent, and the one reply to each. No event loop.

::

    Producer --add--> RequestLedger --take--> Put, ..., Cancel --> ProducerSession --take--> attend() --put--> balancer
    Producer <-reply- RequestLedger <-resolve- Accepted, PutRefused <-- ProducerSession <-answer-'

A request is waiting, then sent, then done; it can be cancelled at any time before it is done. Its bytes count against
the controller's ``staged_bytes`` from the moment it is sent until its reply comes, so what the controller stages for a
producer is bounded; what does not fit waits where it was made. A put larger than that travels alone, up to
``max_put_bytes``. Every request that was sent gets exactly one reply, a cancelled one too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Generic, NamedTuple, TypeVar

from stream_balancer.errors import ClosedResourceError, DuplicateRolloutError, RolloutError, WireError
from stream_balancer.transport.requests import Mode, PendingRequest, Request, RequestCancelled

__all__ = ["Limits", "RequestLedger", "ended"]

P = TypeVar("P", bound=PendingRequest)
ENDED = "put() after end(): the balancer takes no more rollouts. Put before calling end()"
ENDED_HERE = "put() after end() of this producer: it puts no more. Put before calling end()"
CLOSED = "put() on a closed producer: close() was called, or its 'with' block was left"


class Limits(NamedTuple):
    """What the controller takes from one producer."""

    staged_bytes: int = 64 * 2**20  # hundreds of long text rollouts
    """Bytes of puts without a reply that may be on their way, or lie at the controller. One larger put travels
    alone."""
    max_put_bytes: int = 2**30
    """Bytes of one put."""

    def check(self) -> Limits:
        """Itself. Raises ValueError if a knob makes no sense."""
        for name, value in self._asdict().items():
            if value < 1:
                raise ValueError(f"{name} must be >= 1, not {value}: no put could ever be sent")
        return self


class RequestLedger(Generic[P]):
    """The requests of one producer that have no reply. Safe to use from any thread."""

    def __init__(self, *, bundle_bytes: float = inf, bundle_puts: float = inf) -> None:
        """:meth:`take` gives at most so many bytes and puts at once, but always one."""
        self._bundle_bytes, self._bundle_puts = bundle_bytes, bundle_puts
        self._lock = threading.Lock()
        self._waiting: dict[P, None] = {}
        self._sent: dict[int, P] = {}
        self._watching: dict[P, None] = {}  # for a policy version
        self._cancelled: list[int] = []
        self._staged = 0
        self._limits: Limits | None = None
        self._next = self._next_payload = 0
        self._end: Callable[[P], Exception | None] | None = None
        self._ended_here = False
        self.version: int | None = None
        """The policy version that the controller has passed on last."""

    @property
    def num_sent(self) -> int:
        """Requests that are sent, and not done."""
        return len(self._sent)

    def sent(self, number: int) -> P:
        """The request of this number. Raises WireError if none waits for a reply."""
        pending = self._sent.get(number)
        if pending is None:
            raise WireError(f"the controller replied to put number {number}, which is not on its way")
        return pending

    def is_sent(self, number: int) -> bool:
        """Whether the request of this number was sent, and is not done."""
        return number in self._sent

    @property
    def has_news(self) -> bool:
        """Whether :meth:`take` may have something to send or to cancel."""
        return bool(self._waiting or self._cancelled)

    @property
    def closed(self) -> bool:
        """No more requests are taken."""
        return self._end is not None

    def open(self, limits: Limits) -> None:
        """The controller has answered how much it takes."""
        self._limits = limits

    def add(self, pending: P) -> None:
        """Enter a request. It may be done at once."""
        with self._lock:
            end = self._end
            if end is None and self._ended_here and pending.request.is_put:
                end = _refuse_after_end
            if end is None:
                waiting = self._watching if pending.request.mode is Mode.VERSION else self._waiting
                waiting[pending] = None
                self._ended_here |= pending.request.mode is Mode.END
        if end is not None:
            pending.resolve(end(pending))
        elif pending.request.mode is Mode.VERSION:
            self._wake_watchers()

    def version_is(self, version: int) -> None:
        """The controller has passed it on."""
        self.version = version
        self._wake_watchers()

    def _wake_watchers(self) -> None:
        with self._lock:
            version = self.version
            if version is None:
                return
            news = [one for one in self._watching if _is_newer(version, than=one.request.later_than)]
            for pending in news:
                del self._watching[pending]
        for pending in news:
            pending.resolve(None, version)

    def take(self) -> tuple[list[P], list[int]]:
        """The next requests to send, in order, as many as the limits allow; then the numbers of those to cancel."""
        taken: list[P] = []
        refused: list[P] = []
        size = 0
        with self._lock:
            limits = self._limits
            if limits is None:
                return [], []
            while self._waiting:
                pending = next(iter(self._waiting))
                if pending.total_bytes > limits.max_put_bytes:
                    refused.append(pending)
                    del self._waiting[pending]
                    continue
                # nothing on its way: send one, however large
                if self._staged and self._staged + pending.wire_bytes > limits.staged_bytes:
                    break
                if taken and (size + pending.wire_bytes > self._bundle_bytes or len(taken) == self._bundle_puts):
                    break
                del self._waiting[pending]
                self._send(pending)
                size += pending.wire_bytes
                taken.append(pending)
            cancelled, self._cancelled = self._cancelled, []
        for pending in refused:
            pending.resolve(_too_large(pending, limits))
        return taken, cancelled

    def _send(self, pending: P) -> None:
        pending.number, self._next = self._next, self._next + 1
        pending.first_payload = self._next_payload
        self._next_payload += len(pending.request.rollouts)
        self._sent[pending.number] = pending
        self._staged += pending.wire_bytes
        if pending.cancelled:  # before a controller that died had replied
            self._cancelled.append(pending.number)

    def cancel(self, pending: P, why: str = "") -> None:
        """Take a request back. If it was sent its reply must come first, else it is done now. ``why``: what it has
        waited for here, if not for room."""
        with self._lock:
            pending.cancelled = True
            # every value is None. One that was sent before may have been accepted: only the controller can say
            here = not pending.sent_before and self._waiting.pop(pending, self) is None
            here = here or self._watching.pop(pending, self) is None
            if pending.number in self._sent:
                self._cancelled.append(pending.number)
        if here:
            pending.resolve(RequestCancelled(why))

    def resolve(self, number: int, error: Exception | None, result: Any = None) -> None:
        """A reply came. Raises WireError if there is no such request."""
        with self._lock:
            pending = self.sent(number)
            del self._sent[number]
            self._staged -= pending.wire_bytes
        if isinstance(error, DuplicateRolloutError) and pending.sent_before:
            error = None  # the first time it was accepted, and the reply lost
        if isinstance(error, RequestCancelled) and not pending.cancelled:
            error = ClosedResourceError("the producer was closed while put() waited; the rollout was not accepted")
        pending.resolve(error, result)

    def resend(self, before: Sequence[P] = ()) -> None:
        """The controller was started again and knows only what it had accepted: what is sent waits again, first.
        ``before``: what is to be asked for before that."""
        with self._lock:
            sent = list(self._sent.values())
            for pending in sent:
                pending.sent_before, pending.number = True, None
            later = [one for one in [*sent, *self._waiting] if not _is_held_slot(one.request)]
            self._waiting = dict.fromkeys([*before, *later])
            self._sent, self._cancelled, self._staged, self._limits = {}, [], 0, None

    def close(self) -> None:
        """No more requests. Those that wait are done, those that are sent are to be cancelled."""
        with self._lock:
            if self._end is None:
                self._end = lambda _: ClosedResourceError(CLOSED)
            end = self._end
            waiting = [*self._waiting, *self._watching]
            self._waiting, self._watching = {}, {}
            self._cancelled += self._sent
        for pending in waiting:
            pending.resolve(end(pending))

    def end(self, error: Callable[[P], Exception | None]) -> None:
        """The connection is over: every request is done with ``error(request)``, later ones too."""
        with self._lock:
            if self._end is None:
                self._end = error
            left = [*self._sent.values(), *self._waiting, *self._watching]
            self._sent, self._waiting, self._watching, self._cancelled = {}, {}, {}, []
            self._staged = 0
        for pending in left:
            pending.resolve(error(pending))


def ended(pending: PendingRequest) -> Exception | None:
    """What becomes of a request once the balancer takes no more: to end was what it asked for, or it is too late."""
    return None if pending.request.mode is Mode.END else ClosedResourceError(ENDED)


def _refuse_after_end(_: PendingRequest) -> Exception:
    return ClosedResourceError(ENDED_HERE)


def _is_held_slot(request: Request) -> bool:
    """Whether it asks for a slot again that was lost with its connection."""
    return request.mode is Mode.RESERVE and request.slot is not None


def _is_newer(version: int, *, than: int | None) -> bool:
    return than is None or version > than


def _too_large(pending: PendingRequest, limits: Limits) -> RolloutError:
    return RolloutError(
        f"put of rollout {pending.request.rollouts[0].rollout_id!r} takes {pending.total_bytes} bytes, more than the "
        f"controller's max_put_bytes ({limits.max_put_bytes}). Raise max_put_bytes of the transport, or put less at "
        "once"
    )
