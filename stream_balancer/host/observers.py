"""Observers that every balancer has: the user's ``on_evict``, and a warning. They know no transport and no disk."""

from __future__ import annotations

import logging
from collections.abc import Callable

from stream_balancer.config.figures import most_waiting
from stream_balancer.core.groups import Declared
from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.observer import Observer
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.types import EvictReason, Rollout

__all__ = ["CapacityWarning", "EvictCallback", "GroupLog"]

_log = logging.getLogger("stream_balancer.balancer")


class EvictCallback(Observer):
    """The ``on_evict`` of a balancer: called for every rollout that is given up."""

    def __init__(self, callback: Callable[[Rollout, EvictReason], object]) -> None:
        self._callback = callback

    def evicted(self, rollout: Rollout, reason: EvictReason) -> None:
        try:
            self._callback(rollout, reason)
        except Exception:  # noqa: BLE001 - a caller's; what it was called for has happened
            _log.exception("on_evict failed for rollout %r (%s)", rollout.rollout_id, reason)


class CapacityWarning(Observer):
    """A warning where more rollouts were restored than may wait: ``max_skips`` was proven for no more."""

    def __init__(self, core: BalancerCore) -> None:
        self._core = core

    def restored(self, snapshot: Snapshot) -> None:
        waiting, config = len(self._core.state.buffer), self._core.config
        if waiting > most_waiting(config) and config.max_skips is not None and config.step_size.tokens is None:
            _log.warning(
                "%d rollouts were recovered, above what may wait (%d): until no more than that do, some may be passed "
                "over by more dispatches than max_skips (%d). Use the capacity of before",
                waiting,
                most_waiting(config),
                config.max_skips,
            )


class GroupLog(Observer):
    """A line in the log for each group that is closed short, or abandoned."""

    def __init__(self, core: BalancerCore) -> None:
        self._core = core

    def group_declared(self, group_id: str, declared: Declared | None) -> None:
        whole = self._core.config.groups.size
        if declared is None or not declared.closed or whole is None:
            return
        if declared.size is None:
            _log.info("group %r was abandoned: what comes of it is evicted", group_id)
        elif declared.size < whole:
            _log.info("group %r is complete with %d of %d rollouts", group_id, declared.size, whole)
