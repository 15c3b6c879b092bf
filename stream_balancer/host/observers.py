"""The observer that every balancer has: warnings in the log."""

from __future__ import annotations

import logging
from typing import Any

from stream_balancer.config import most_waiting
from stream_balancer.core.diagnosis import incomplete_groups
from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.observer import Learner
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.rollouts import Batch

_log = logging.getLogger("stream_balancer.balancer")


class Notices(Learner):
    """Warnings, once each, of what would be wrong or be left out in silence."""

    def __init__(self, core: BalancerCore) -> None:
        self._core = core
        self._said: set[str] = set()
        self._num_unchecked = self._num_unversioned_steps = 0

    def figures(self, now: float) -> dict[str, Any]:
        return {"unchecked_rollouts": self._num_unchecked}

    def left(self, batch: Batch, asked_at: float, enough_at: float, now: float) -> None:
        """Rollouts whose age nobody can check are counted."""
        most = self._core.config.staleness.max_versions
        if most is None:
            return
        # looked at when they leave, not at each put, which costs nothing then
        unknown = [r for r in batch.rollouts if r.version is None and not r.is_padding]
        self._num_unchecked += len(unknown) if self._core.staleness.version is not None else batch.num_rollouts
        if unknown:
            self._warn_once(
                "staleness.max_versions=%d is not checked for rollouts without a version, which are never too old: %d "
                "of step %d, the first is %r. Give Rollout(version=...), or leave staleness.max_versions out",
                most,
                len(unknown),
                batch.step,
                unknown[0].rollout_id,
            )

    def acknowledged(self, batch: Batch) -> None:
        """The first step may well be trained before there is a version."""
        most = self._core.config.staleness.max_versions
        if most is not None and self._core.staleness.version is None:
            self._num_unversioned_steps += 1
            # a trainer that acknowledges first sets the first version after its first acknowledgement
            if self._num_unversioned_steps > 1:
                self._warn_once(
                    "staleness.max_versions=%d is not checked: 2 steps were trained, and set_version() was never "
                    "called. Call it when the policy's weights change, or leave staleness.max_versions out",
                    most,
                )

    def ended(self) -> None:
        """Groups that lack siblings leave all the same."""
        if groups := incomplete_groups(self._core):
            number = len(self._core.buffer.groups.incomplete())
            self._warn_once("end(): groups that lack siblings leave incomplete (%d): %s", number, groups)

    def closed(self) -> None:
        """The balancer is closed, perhaps with batches that were trained and not acknowledged."""
        steps = [batch.step for batch in self._core.in_flight.delivered()]
        # who leaves in the midst of a run means to come back: only a run to its end was not acknowledged
        if steps and self._core.finished:
            self._warn_once(
                "closed before steps %s were acknowledged: a journal or checkpoint would deliver them again. With "
                "auto_ack=False call acknowledge(step), or acknowledge_through(step) at checkpoints",
                steps,
            )

    def restored(self, snapshot: Snapshot) -> None:
        """``max_skips`` was proven for no more than may wait."""
        waiting, config = self._core.buffer.num_waiting, self._core.config
        if waiting > most_waiting(config) and config.max_skips is not None:
            self._warn_once(
                "%d rollouts were recovered, above what may wait (%d): until no more than that do, some may be passed "
                "over by more steps than max_skips (%d). Use the capacity of before",
                waiting,
                most_waiting(config),
                config.max_skips,
            )

    def _warn_once(self, text: str, *values: object) -> None:
        # by the text without its values: the second step is no news
        if text not in self._said:
            self._said.add(text)
            _log.warning(text, *values)
