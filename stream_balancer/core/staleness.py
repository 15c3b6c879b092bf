"""Policy versions: how old the waiting rollouts are, which must leave now, are held back, or are too old. Pure.

Under ``max_versions`` a rollout leaves only if it is young enough *when it is trained on*, although every batch before
it that the trainer is not through with (``steps_ahead``) may make a version:

    version - max_versions                 oldest fresh: older ones can never be trained on in time, and are evicted
    version - max_versions + steps_ahead   oldest trainable: older ones are held back until the trainer is further;
                                            those of exactly this version are due, with one more step they are too old

docs/staleness.md has the rule, bench/results/staleness.md its proof.
"""

from __future__ import annotations

import logging

import numpy as np

from stream_balancer.config import BalancerConfig
from stream_balancer.core.buffer import NO_ROWS, NO_VERSION, Buffer
from stream_balancer.core.in_flight import BatchesInFlight
from stream_balancer.errors import RolloutError
from stream_balancer.planning.arrays import Bools, Ints
from stream_balancer.rollouts import Rollout
from stream_balancer.values import plain_policy_version

_log = logging.getLogger("stream_balancer.balancer")

_BEFORE_ALL = -(2**63)
"""A bound that no version is below: nothing is ever too old."""


def newer_version(current: int | None, version: object) -> int | None:
    """The version to be set; None, with a warning, for one that is older than the ``current`` one, as of an older
    checkpoint. Raises ValueError for what is no version."""
    try:
        plain = plain_policy_version(version)
    except RolloutError as error:
        raise ValueError(f"set_version(): version {error}") from None
    if current is None or plain >= current:
        return plain
    _log.warning("set_version(%d): the version is %d already, and stays so", plain, current)
    return None


class RolloutAges:
    """The policy version, and the ages of what waits; counted anew by :meth:`recount` after every change."""

    def __init__(self, config: BalancerConfig, buffer: Buffer, in_flight: BatchesInFlight) -> None:
        self.config = config
        self.version: int | None = None
        """Policy version last set."""
        self.num_due = 0
        """Waiting rollouts that would be too old with one more step before them, those held back included."""
        self.num_held_back = 0
        """Waiting rollouts that are too old to leave while so many batches are before them."""
        self._buffer = buffer
        self._in_flight = in_flight

    # -- one rollout ---------------------------------------------------------------------------------------------------

    def is_too_old(self, version: int | None) -> bool:
        """True if a rollout that began at this version is to be evicted. O(1)."""
        return version is not None and version < self._oldest_fresh() and self._evicts

    def add(self, rollout: Rollout) -> None:
        """A rollout waits from now on. O(1)."""
        oldest, version = self._oldest_trainable(), rollout.min_version
        if version is not None:
            # counted one by one as they come: a recount at every put would be O(n)
            self.num_due += version <= oldest
            self.num_held_back += version < oldest and self._evicts

    # -- all that wait -------------------------------------------------------------------------------------------------

    def recount(self) -> Ints:
        """The waiting rollouts, the version or the steps ahead have changed. -> rows of rollouts that cannot be trained
        on in time any more, whatever the trainer does. O(n) under ``max_versions``, else O(1)."""
        self.num_due = self.num_held_back = 0
        if self.config.staleness.max_versions is None:
            return NO_ROWS
        oldest, trainable, versions = self._oldest_fresh(), self._oldest_trainable(), self._buffer.versions
        self.num_due = int(np.count_nonzero(versions <= trainable))
        self.num_held_back = int(np.count_nonzero(versions < trainable)) if self._evicts else 0
        return np.flatnonzero((versions < oldest) & self._evicts)

    def due(self) -> Bools:
        """[n] True for rollouts that must leave with the next batch, or are held back already. O(n)."""
        return self._buffer.versions <= self._oldest_trainable()

    def held_back(self) -> Bools:
        """[n] True for rollouts that would be too old when trained on if they left now, and their siblings. O(n)."""
        if not self.num_held_back:
            return np.zeros(self._buffer.num_waiting, dtype=bool)
        # unknown versions are larger than any, so they are never held back
        held = self._buffer.versions < self._oldest_trainable()
        labels = self._buffer.labels
        # groups leave whole, so a sibling holds the others back
        return held | np.isin(labels, labels[held & (labels >= 0)])

    def oldest_fresh_version(self) -> int:
        """The oldest version that waits, those too old left out; ``NO_VERSION`` where none is known. O(n)."""
        versions = self._buffer.versions
        return int(versions[versions >= self._oldest_fresh()].min(initial=NO_VERSION))

    # -- bounds --------------------------------------------------------------------------------------------------------

    @property
    def _evicts(self) -> bool:
        return self.config.staleness.on_stale == "evict"

    def _oldest_fresh(self) -> int:
        most = self.config.staleness.max_versions
        return _BEFORE_ALL if self.version is None or most is None else self.version - most

    def _oldest_trainable(self) -> int:
        # what leaves now is trained on once the steps ahead have made their versions
        return self._oldest_fresh() + self._in_flight.steps_ahead
