"""Observers: what happens to a balancer's state, as events. Journal, recorder, metrics and tracing
each are an :class:`Observer`; the core emits events and knows none of them.

::

    add, poll, acknowledge, set_version, ...  --the change is complete-->  Observers.emit  --> each observer

Every event is emitted by :class:`~stream_balancer.core.machine.BalancerCore`, in the thread of the call that changed
the state, after the change: an observer may call the balancer.

An observer that raises loses nothing: what it observed has happened, the error is logged, and the other observers are
notified all the same. So an observer cannot veto. What must be certain before something goes on (a rollout on the disk
before its put returns, a plan before its batch is handed out) is awaited by the shell, in the one place that hands it
out; the observer only has it begun.

An observer must not wait: the event loop waits for it. Decisions may not enter this module.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from stream_balancer.config import BalancerConfig
from stream_balancer.core.groups import Declared
from stream_balancer.core.in_flight import StepTiming
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.rollouts import Batch, EvictReason, Rollout

_log = logging.getLogger("stream_balancer.balancer")


class Observer:
    """An observer of a balancer: derive from it, write the events of interest, append it to ``balancer.observers``.

    What it raises is logged and goes no further.
    """

    def accepted(self, rollouts: Sequence[Rollout], now: float) -> None:
        """Rollouts of one put were taken in, at ``now`` seconds on the caller's clock. Not those that ``accept=``
        refused, which are only ``evicted``."""

    def left(self, batch: Batch, asked_at: float, enough_at: float, now: float) -> None:
        """A new batch is in flight. Somebody has waited for it since ``asked_at``, and enough for a batch had come at
        ``enough_at``."""

    def dispatched(self, batch: Batch) -> None:
        """A batch is in flight; emitted again for each redelivery."""

    def timed(self, batch: Batch, timings: Sequence[StepTiming], now: float) -> None:
        """All ranks have reported the seconds of a step in flight, in rank order; ``batch`` with the loads that they
        had in the end."""

    def acknowledged(self, batch: Batch) -> None:
        """A batch has been trained on."""

    def evicted(self, rollout: Rollout, reason: EvictReason) -> None:
        """A rollout was accepted and will not be trained on."""

    def gave_up(self, evicted: Sequence[tuple[Rollout, EvictReason]]) -> None:
        """All that one call has evicted, before each is ``evicted``."""

    def group_declared(self, group_id: str, declared: Declared | None) -> None:
        """Something else is declared of a group than before: its size, that it takes no more, that it was abandoned;
        None: what was is forgotten."""

    def version_set(self, version: int) -> None:
        """The policy moved on. What is too stale now is evicted after this event."""

    def repriced(self, factor: float) -> None:
        """The waiting rollouts together cost ``factor`` times what they did: a calibrated cost has learned."""

    def reconfigured(self, before: BalancerConfig) -> None:
        """Other knobs than ``before`` are in force."""

    def ended(self) -> None:
        """No more rollouts will come."""

    def restored(self, snapshot: Snapshot) -> None:
        """The state of another balancer was taken over. What is too stale for it is evicted after this event."""


EVENTS = tuple(name for name in vars(Observer) if not name.startswith("_"))
"""Events that an observer may be notified of."""


class Learner(Observer):
    """An observer that learns something: figures for the statistics, and a state that checkpoints keep."""

    def figures(self, now: float) -> dict[str, Any]:
        """Fields of :class:`~stream_balancer.statistics.Statistics` that are known here."""
        return {}

    def learned(self) -> dict[str, Any]:
        """Fields of :class:`~stream_balancer.core.snapshot.Snapshot` that are known here."""
        return {}


class Observers(list[Observer]):
    """The observers of one balancer, in the order in which they are notified."""

    def __init__(self) -> None:
        super().__init__()
        # those that _handlers was made for
        self._known: list[Observer] = []
        self._handlers: dict[str, list[Callable[..., object]]] = {name: [] for name in EVENTS}

    def emit(self, event: str, *values: object) -> None:
        """Notify every observer that has written this event. O(those)."""
        # users append to the list as they like, so it is compared: O(observers), a few at most
        if self != self._known:
            self._known = list(self)
            self._handlers = {name: _handlers_of(name, self) for name in EVENTS}
        for handler in self._handlers[event]:
            try:
                handler(*values)
            except Exception:  # noqa: BLE001  # see the module's docstring
                _log.exception("observer %r failed at %r", getattr(handler, "__self__", handler), event)


def _handlers_of(event: str, observers: Sequence[Observer]) -> list[Callable[..., object]]:
    """Not the empty ones, since every put emits: what nobody observes costs nothing."""
    handlers, empty = [getattr(observer, event) for observer in observers], getattr(Observer, event)
    return [handler for handler in handlers if getattr(handler, "__func__", None) is not empty]
