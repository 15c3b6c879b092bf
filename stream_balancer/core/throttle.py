"""Throttled generation: how many rollouts may be begun so that none of them is too old once it is trained on. Pure.

The rule is in docs/staleness.md, its proof in bench/results/staleness.md. In short: a rollout that began at version
``u`` must leave before the version passes ``u + max_versions``; a version needs a batch; so no more rollouts may be
held than the batches up to then can take.
"""

from __future__ import annotations

from stream_balancer.config import BalancerConfig
from stream_balancer.core.state import BalancerState
from stream_balancer.errors import ConfigError

_LIMIT = "(staleness.max_versions + 1) * batch_size"


def check_reserve(config: BalancerConfig, count: int) -> None:
    """Raise ConfigError for knobs under which the bound could not be kept, or the window never be filled; ValueError
    for a ``count`` that could never be admitted."""
    staleness = config.staleness.max_versions
    limit = config.capacity if staleness is None else (staleness + 1) * config.batch_size
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= limit:
        raise ValueError(
            f"reserve({count!r}): between 1 and {limit} rollouts can be reserved at a time "
            f"({'capacity' if staleness is None else _LIMIT})"
        )
    if config.groups.size is not None and count % config.groups.size:
        raise ValueError(
            f"reserve({count}) with groups.size {config.groups.size}: siblings leave together, so reserve whole groups "
            "and put them with slot.put_group()"
        )
    if staleness is None:
        return
    if config.deadline_s is not None or config.max_bytes is not None:
        knob = "deadline_s" if config.deadline_s is not None else "max_bytes"
        raise ConfigError(
            f"reserve() cannot keep staleness.max_versions ({staleness}) with {knob}: that sends short batches, and "
            f"every batch makes a new version while rollouts are still being generated. Leave {knob} out, or do "
            "without reserve()"
        )
    if config.window > limit:
        raise ConfigError(
            f"reserve() admits {_LIMIT} = {limit} rollouts at a time, so a window of "
            f"{config.window} would never fill. Lower window to {limit}, or raise staleness.max_versions"
        )


class Throttle:
    """Rollouts that were admitted and have not been put yet, by slot."""

    def __init__(self) -> None:
        # number -> (version, rollouts to come)
        self._slots: dict[int, tuple[int, int]] = {}
        self._last = 0
        self.running = 0
        """Rollouts to come, over all slots."""

    def room(self, state: BalancerState, began: int | None = None) -> int:
        """How many more rollouts may begin now, over what a balancer holds; or have begun at version ``began`` already.
        O(n) under ``staleness.max_versions``."""
        config, held = state.config, self.running + state.buffer.num_waiting
        if config.staleness.max_versions is None:
            return state.admission.num_places() - self.running
        # before the first version is set, what begins counts as of version 0
        version = state.staleness.version or 0
        # what is being generated is as old as its beginning once it comes
        running = min((version for version, _ in self._slots.values()), default=version)
        running = running if began is None else min(began, running)
        # unknown versions are larger than any
        oldest = min(state.staleness.oldest_fresh_version(), running)
        batches = oldest + config.staleness.max_versions + 1 - version - state.in_flight.steps_ahead
        return batches * config.batch_size - held

    def is_stuck(self, state: BalancerState) -> bool:
        """True if the window cannot fill while nothing more may begin: not with what is running, though a full batch is
        ready; or nothing is running, and anything is ready. Then a force flush is due. O(1)."""
        ready, config = state.triggers.sendable()[1], state.config
        # nothing is being generated: no put will fill the window
        if self.running == 0:
            return ready > 0
        return ready >= config.batch_size and self.running + state.buffer.num_waiting < config.window

    def admit(self, version: int, count: int) -> int:
        """A slot for so many rollouts; its number."""
        self._last += 1
        self._slots[self._last] = (version, count)
        self.running += count
        return self._last

    def settle(self, slot: int, count: int) -> None:
        """So many rollouts of a slot are held by the balancer now, or will never come."""
        version, left = self._slots[slot]
        self.running -= count
        if left == count:
            del self._slots[slot]
        else:
            self._slots[slot] = (version, left - count)
