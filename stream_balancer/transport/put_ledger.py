"""The producer's ledger of pending puts: which wait here, which are sent, and the one reply to each. No event loop.

What else a producer asks for (a slot, the end, statistics) is a put without rollouts: numbered, sent, answered,
cancelled and sent again in the same way.

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
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar, get_args

from stream_balancer.core.groups import GroupSize
from stream_balancer.core.throttle import SLOT_CLOSED, TOO_MANY
from stream_balancer.errors import (
    BrokenResourceError,
    ClosedResourceError,
    ConfigError,
    DuplicateRolloutError,
    JournalError,
    RolloutError,
    WireError,
    WouldBlock,
)
from stream_balancer.types import Rollout

__all__ = ["HeldSlot", "Limits", "Mode", "PendingPut", "PutCancelled", "PutLedger", "ended", "error_of", "reason_of"]

P = TypeVar("P", bound="PendingPut")
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


class Mode(IntEnum):
    """How rollouts are put."""

    PUT = 0
    GROUP = 1
    NOWAIT = 2
    DECLARE = 3
    """None: how many a group has."""
    ABANDON = 4
    """None: a group is not wanted."""
    RESERVE = 5
    """None yet: a slot for some."""
    END = 6
    """None any more."""
    STATISTICS = 7
    """None: what the balancer reports of itself."""
    VERSION = 8
    """None: a later policy version. Never sent: the controller passes on each by itself."""


_WHAT = {
    Mode.RESERVE: "reserve()",
    Mode.END: "end()",
    Mode.STATISTICS: "statistics()",
    Mode.VERSION: "version_after()",
}


class PutCancelled(Exception):  # noqa: N818 - a reply, not a fault
    """The reply to a put that was cancelled before it was accepted."""


Reason: TypeAlias = Literal[
    "cancelled", "rollout", "duplicate", "ended", "full", "type", "value", "knobs", "journal", "lost", "other"
]
_ERRORS: dict[Reason, type[Exception]] = {
    "cancelled": PutCancelled,
    "rollout": RolloutError,
    "duplicate": DuplicateRolloutError,
    "ended": ClosedResourceError,
    "full": WouldBlock,
    "type": TypeError,
    "value": ValueError,
    "knobs": ConfigError,
    "journal": JournalError,
    "lost": BrokenResourceError,
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


class HeldSlot:
    """Places for rollouts that the controller has admitted, as their producer counts them. From any thread."""

    def __init__(self, number: int, version: int, count: int) -> None:
        self.number = number
        """Of the request that reserved it; another one once the producer has joined again."""
        self.version = version
        """Policy version at which it was admitted."""
        self.left = count
        """Rollouts that may still be put."""
        self.open = True
        """Its block was not left."""
        self._under_way = 0  # in puts without a reply
        self._lock = threading.Lock()

    @property
    def missing(self) -> int:
        """Rollouts that may still be put, or are on their way."""
        with self._lock:
            return self.left + self._under_way

    def put(self, count: int) -> None:
        """So many are on their way. Raises ClosedResourceError, and ValueError for more than are left."""
        with self._lock:
            if not self.open:
                raise ClosedResourceError(SLOT_CLOSED)
            if count > self.left:
                raise ValueError(TOO_MANY.format(count=count, left=self.left))
            self.left -= count
            self._under_way += count

    def settle(self, count: int, *, accepted: bool) -> None:
        """They have their reply."""
        with self._lock:
            self._under_way -= count
            if self.open and not accepted:
                self.left += count

    def close(self) -> None:
        """No more will be put than are on their way."""
        with self._lock:
            self.open, self.left = False, 0


class PendingPut:
    """A put without a reply yet."""

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        mode: Mode,
        callback: Callable[[], object],
        *,
        declared: GroupSize | None = None,
        slot: HeldSlot | None = None,
        put_bytes: int = 0,
        size: int = 0,
    ) -> None:
        """``callback()`` is called, in any thread, once there is a reply."""
        self.rollouts = tuple(rollouts)
        self.mode = mode
        self.declared = declared
        """Of their group, with or without rollouts."""
        self.slot = slot
        """The one they are put in; or, to reserve, the one to have again."""
        self.places = 0
        """Rollouts to reserve a slot for."""
        self.later_than: int | None = None
        """The policy version that a later one is waited for."""
        self.put_bytes = put_bytes
        """Bytes of the whole put, wherever its payloads are."""
        self.size = size
        """Bytes that travel to the controller."""
        self.first_payload = 0
        """Number of its first rollout among all this producer sent; the others follow. Set once sent."""
        self.number: int | None = None
        """Set once sent."""
        self.cancelled = False
        self.abandoned = False
        """Nobody waits for its reply any more: a slot that comes with it is released."""
        self.sent_before = False
        """To a controller that died before it replied."""
        self.done = False
        self.error: Exception | None = None
        """None = accepted, once ``done``."""
        self.result: Any = None
        """What else the reply says: the version of a slot, statistics."""
        self._callback = callback

    @property
    def payloads(self) -> range:
        """Numbers of its rollouts among all this producer sent."""
        return range(self.first_payload, self.first_payload + len(self.rollouts))

    @property
    def what(self) -> str:
        """For errors: ``put() of rollout 'a'``."""
        if self.mode in _WHAT:
            return _WHAT[self.mode]
        if self.declared is not None and not self.rollouts:
            return f"what was declared of group {self.declared.group_id!r}"
        return f"put() of rollout {', '.join(repr(r.rollout_id) for r in self.rollouts[:3])}"

    def resolve(self, error: Exception | None, result: Any = None) -> None:
        """The reply; the first one counts. From any thread."""
        if not self.done:
            self.error, self.result = error, result
            self.done = True
            self._callback()

    @property
    def fate(self) -> str:
        """What is known of it without a reply."""
        if self.number is None and not self.sent_before:
            return "it had not been sent, so it was not accepted"
        return "whether it was accepted is not known"

    def lost(self, cause: str) -> BrokenResourceError:
        """What to raise when the controller is gone."""
        if self.mode in _WHAT:
            return BrokenResourceError(
                f"the controller was lost while {self.what} waited: {cause}. Connect again, and ask again"
            )
        return BrokenResourceError(
            f"the controller was lost while {self.what} waited: {cause}; {self.fate}. Connect and put it again: a "
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
        """Puts that are sent, and not done."""
        return len(self._sent)

    def sent(self, number: int) -> P:
        """The put of this number. Raises WireError if none waits for a reply."""
        put = self._sent.get(number)
        if put is None:
            raise WireError(f"the controller replied to put number {number}, which is not on its way")
        return put

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
            if end is None and self._ended_here and put.mode not in _WHAT:
                end = _refuse_after_end
            if end is None:
                waiting = self._watching if put.mode is Mode.VERSION else self._waiting
                waiting[put] = None
                self._ended_here |= put.mode is Mode.END
        if end is not None:
            put.resolve(end(put))
        elif put.mode is Mode.VERSION:
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
            news = [put for put in self._watching if put.later_than is None or put.later_than < version]
            for put in news:
                del self._watching[put]
        for put in news:
            put.resolve(None, version)

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
            here = here or self._watching.pop(put, self) is None
            if put.number in self._sent:
                self._cancelled.append(put.number)
        if here:
            put.resolve(PutCancelled(why))

    def resolve(self, number: int, error: Exception | None, result: Any = None) -> None:
        """A reply came. Raises WireError if there is no such put."""
        with self._lock:
            put = self.sent(number)
            del self._sent[number]
            self._staged -= put.size
        if isinstance(error, DuplicateRolloutError) and put.sent_before:
            error = None  # the first time it was accepted, and the reply lost
        if isinstance(error, PutCancelled) and not put.cancelled:
            error = ClosedResourceError("the producer was closed while put() waited; the rollout was not accepted")
        put.resolve(error, result)

    def resend(self, before: Sequence[P] = ()) -> None:
        """The controller was started again and knows only what it had accepted: what is sent waits again, first.
        ``before``: what is to be asked for before that."""
        with self._lock:
            puts = list(self._sent.values())
            for put in puts:
                put.sent_before, put.number = True, None
            later = [put for put in [*puts, *self._waiting] if put.mode is not Mode.RESERVE or put.slot is None]
            self._waiting = dict.fromkeys([*before, *later])
            self._sent, self._cancelled, self._staged, self._limits = {}, [], 0, None

    def close(self) -> None:
        """No more puts. Those that wait are done, those that are sent are to be cancelled."""
        with self._lock:
            if self._end is None:
                self._end = lambda _: ClosedResourceError(CLOSED)
            end = self._end
            waiting = [*self._waiting, *self._watching]
            self._waiting, self._watching = {}, {}
            self._cancelled += self._sent
        for put in waiting:
            put.resolve(end(put))

    def end(self, error: Callable[[P], Exception | None]) -> None:
        """The connection is over: every put is done with ``error(put)``, later ones too."""
        with self._lock:
            if self._end is None:
                self._end = error
            puts = [*self._sent.values(), *self._waiting, *self._watching]
            self._sent, self._waiting, self._watching, self._cancelled = {}, {}, {}, []
            self._staged = 0
        for put in puts:
            put.resolve(error(put))


def ended(put: PendingPut) -> Exception | None:
    """What becomes of a put once the balancer takes no more: to end was what it asked for, or it is too late."""
    return None if put.mode is Mode.END else ClosedResourceError(ENDED)


def _refuse_after_end(_: PendingPut) -> Exception:
    return ClosedResourceError(ENDED_HERE)
