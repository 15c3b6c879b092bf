"""The producer's ledger of pending puts: which wait here, which are sent, and the one reply to each. No event loop.

::

    Producer --add--> PutLedger --take--> Put, ..., Cancel --> ProducerSession --take--> attend() --put--> balancer
    Producer <-reply- PutLedger <-resolve- Accepted, PutRefused <-- ProducerSession <-answer-'

A pending put is waiting, then sent, then done; it can be cancelled at any time before it is done. Its bytes count
against the controller's ``staged_bytes`` from the moment it is sent until its reply comes, so what the controller
stages for a producer is bounded; what does not fit waits where it was made. A put larger than that travels alone, up to
``max_put_bytes``. Every put that was sent gets exactly one reply, a cancelled one too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from enum import IntEnum
from math import inf
from typing import Generic, Literal, NamedTuple, TypeAlias, TypeVar, get_args

from stream_balancer.core.groups import GroupSize
from stream_balancer.errors import (
    BrokenResourceError,
    ClosedResourceError,
    DuplicateRolloutError,
    JournalError,
    RolloutError,
    WireError,
    WouldBlock,
)
from stream_balancer.types import Rollout

__all__ = ["Limits", "Mode", "PendingPut", "PutCancelled", "PutLedger", "error_of", "reason_of"]

P = TypeVar("P", bound="PendingPut")
ENDED = "put() after end(): the balancer takes no more rollouts. Put before calling end()"
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


class Mode(IntEnum):
    """How rollouts are put."""

    PUT = 0
    GROUP = 1
    NOWAIT = 2
    DECLARE = 3
    """None: how many a group has."""
    ABANDON = 4
    """None: a group is not wanted."""


class PutCancelled(Exception):  # noqa: N818 - a reply, not a fault
    """The reply to a put that was cancelled before it was accepted."""


Reason: TypeAlias = Literal["cancelled", "rollout", "duplicate", "ended", "full", "type", "value", "journal", "other"]
_ERRORS: dict[Reason, type[Exception]] = {
    "cancelled": PutCancelled,
    "rollout": RolloutError,
    "duplicate": DuplicateRolloutError,
    "ended": ClosedResourceError,
    "full": WouldBlock,
    "type": TypeError,
    "value": ValueError,
    "journal": JournalError,
}


def reason_of(error: Exception) -> tuple[Reason, str]:
    """(reason, text) of an error, for the wire."""
    for reason, kind in _ERRORS.items():
        if type(error) is kind:
            return reason, str(error)
    return "other", f"the controller's put failed: {type(error).__name__}: {error}"


def error_of(reason: Reason, text: str) -> Exception:
    """The error of a refusal, as the balancer raised it."""
    if reason not in get_args(Reason):
        raise WireError(f"the controller refused a put for an unknown reason: {reason}")
    kind = _ERRORS.get(reason, BrokenResourceError)
    return kind(text) if text else kind()


class PendingPut:
    """A put without a reply yet."""

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        mode: Mode,
        callback: Callable[[], object],
        *,
        declared: GroupSize | None = None,
        put_bytes: int = 0,
        size: int = 0,
    ) -> None:
        """``callback()`` is called, in any thread, once there is a reply."""
        self.rollouts = tuple(rollouts)
        self.mode = mode
        self.declared = declared
        """Of their group, with or without rollouts."""
        self.put_bytes = put_bytes
        """Bytes of the whole put, wherever its payloads are."""
        self.size = size
        """Bytes that travel to the controller."""
        self.first_payload = 0
        """Number of its first rollout among all this producer sent; the others follow. Set once sent."""
        self.number: int | None = None
        """Set once sent."""
        self.cancelled = False
        self.sent_before = False
        """To a controller that died before it replied."""
        self.done = False
        self.error: Exception | None = None
        """None = accepted, once ``done``."""
        self._callback = callback

    @property
    def payloads(self) -> range:
        """Numbers of its rollouts among all this producer sent."""
        return range(self.first_payload, self.first_payload + len(self.rollouts))

    @property
    def what(self) -> str:
        """For errors: ``put() of rollout 'a'``."""
        if self.declared is not None and not self.rollouts:
            return f"what was declared of group {self.declared.group_id!r}"
        return f"put() of rollout {', '.join(repr(r.rollout_id) for r in self.rollouts[:3])}"

    def resolve(self, error: Exception | None) -> None:
        """The reply; the first one counts. From any thread."""
        if not self.done:
            self.error = error
            self.done = True
            self._callback()

    def lost(self, cause: str) -> BrokenResourceError:
        """What to raise when the controller is gone."""
        fate = (
            "it had not been sent, so it was not accepted"
            if self.number is None and not self.sent_before
            else "whether it was accepted is not known"
        )
        return BrokenResourceError(
            f"the controller was lost while {self.what} waited: {cause}; {fate}. Connect again and put it again: a "
            "DuplicateRolloutError then means that the first put was accepted"
        )


class PutLedger(Generic[P]):
    """The pending puts of one producer. Safe to use from any thread."""

    def __init__(self, *, bundle_bytes: float = inf, bundle_puts: float = inf) -> None:
        """:meth:`take` gives at most so many bytes and puts at once, but always one."""
        self._bundle_bytes, self._bundle_puts = bundle_bytes, bundle_puts
        self._lock = threading.Lock()
        self._waiting: dict[P, None] = {}
        self._sent: dict[int, P] = {}
        self._cancelled: list[int] = []
        self._staged = 0
        self._limits: Limits | None = None
        self._next = self._next_payload = 0
        self._end: Callable[[P], Exception] | None = None

    @property
    def num_sent(self) -> int:
        """Puts that are sent, and not done."""
        return len(self._sent)

    def is_sent(self, number: int) -> bool:
        """Whether the put of this number was sent, and is not done."""
        return number in self._sent

    @property
    def closed(self) -> bool:
        """No more puts are taken."""
        return self._end is not None

    def open(self, limits: Limits) -> None:
        """The controller has answered how much it takes."""
        self._limits = limits

    def add(self, put: P) -> None:
        """Enter a put. It may be done at once."""
        with self._lock:
            end = self._end
            if end is None:
                self._waiting[put] = None
        if end is not None:
            put.resolve(end(put))

    def take(self) -> tuple[list[P], list[int]]:
        """The next puts to send, in order, as many as the limits allow; then the numbers of those to cancel."""
        taken: list[P] = []
        refused: list[P] = []
        size = 0
        with self._lock:
            limits = self._limits
            if limits is None:
                return [], []
            while self._waiting:
                put = next(iter(self._waiting))
                if put.put_bytes > limits.max_put_bytes:
                    refused.append(put)
                    del self._waiting[put]
                    continue
                if self._staged and self._staged + put.size > limits.staged_bytes:  # always one, however large
                    break
                if taken and (size + put.size > self._bundle_bytes or len(taken) == self._bundle_puts):
                    break
                del self._waiting[put]
                self._send(put)
                size += put.size
                taken.append(put)
            cancelled, self._cancelled = self._cancelled, []
        for put in refused:
            put.resolve(
                RolloutError(
                    f"put of rollout {put.rollouts[0].rollout_id!r} takes {put.put_bytes} bytes, more than the "
                    f"controller's max_put_bytes ({limits.max_put_bytes}). Raise max_put_bytes of the transport, or "
                    "put less at once"
                )
            )
        return taken, cancelled

    def _send(self, put: P) -> None:
        put.number, self._next = self._next, self._next + 1
        put.first_payload = self._next_payload
        self._next_payload += len(put.rollouts)
        self._sent[put.number] = put
        self._staged += put.size
        if put.cancelled:  # before a controller that died had replied
            self._cancelled.append(put.number)

    def cancel(self, put: P, why: str = "") -> None:
        """Take a put back. If it was sent its reply must come first, else it is done now. ``why``: what it has waited
        for here, if not for room."""
        with self._lock:
            put.cancelled = True
            # every value is None. One that was sent before may have been accepted: only the controller can say
            here = not put.sent_before and self._waiting.pop(put, self) is None
            if put.number in self._sent:
                self._cancelled.append(put.number)
        if here:
            put.resolve(PutCancelled(why))

    def resolve(self, number: int, error: Exception | None) -> None:
        """A reply came. Raises WireError if there is no such put."""
        with self._lock:
            put = self._sent.pop(number, None)
            if put is None:
                raise WireError(f"the controller replied to put number {number}, which is not on its way")
            self._staged -= put.size
        if isinstance(error, DuplicateRolloutError) and put.sent_before:
            error = None  # the first time it was accepted, and the reply lost
        if isinstance(error, PutCancelled) and not put.cancelled:
            error = ClosedResourceError("the producer was closed while put() waited; the rollout was not accepted")
        put.resolve(error)

    def resend(self) -> None:
        """The controller was started again and knows only what it had accepted: what is sent waits again, first."""
        with self._lock:
            puts = list(self._sent.values())
            for put in puts:
                put.sent_before, put.number = True, None
            self._waiting = dict.fromkeys(puts) | self._waiting
            self._sent, self._cancelled, self._staged, self._limits = {}, [], 0, None

    def close(self) -> None:
        """No more puts. Those that wait are done, those that are sent are to be cancelled."""
        with self._lock:
            if self._end is None:
                self._end = lambda _: ClosedResourceError(CLOSED)
            end = self._end
            waiting, self._waiting = list(self._waiting), {}
            self._cancelled += self._sent
        for put in waiting:
            put.resolve(end(put))

    def end(self, error: Callable[[P], Exception]) -> None:
        """The connection is over: every put is done with ``error(put)``, later ones too."""
        with self._lock:
            if self._end is None:
                self._end = error
            puts = [*self._sent.values(), *self._waiting]
            self._sent, self._waiting, self._cancelled = {}, {}, []
            self._staged = 0
        for put in puts:
            put.resolve(error(put))
