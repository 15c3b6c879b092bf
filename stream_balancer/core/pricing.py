"""Costs of the waiting rollouts, and the ranks as the planner is given them: by the config's cost model, or by what
:mod:`stream_balancer.learn` has learned in its place. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from stream_balancer.config import BalancerConfig
from stream_balancer.core.buffer import Buffer
from stream_balancer.core.executions import labels_of
from stream_balancer.errors import RolloutError
from stream_balancer.planning import PlanKnobs, Waiting
from stream_balancer.planning.arrays import Floats, Ints
from stream_balancer.rollouts import Rollout
from stream_balancer.values import MAX_COST

CostFunction = Callable[[Ints], Floats]

_MOST_LENGTHS = 16_384
"""Lengths whose cost is kept: 3 MB at most."""


class Learned(NamedTuple):
    """Prices that seconds of ranks have taught, in place of the configuration's."""

    model: CostFunction
    """[n] lengths -> [n] costs."""
    overhead_cost: float
    """Fixed cost of a micro-batch."""


class Pricing:
    """The cost model, and the knobs of the planner that follow from it. Made anew for other knobs, and for what was
    learned."""

    def __init__(self, config: BalancerConfig, tolerance: float, learned: Learned | None = None) -> None:
        """``tolerance``: how near to the lower bound the planner seeks partitions."""
        self._config = config
        self._learned = learned or Learned(config.cost, 0.0)
        self.has_own_costs = False
        """Some rollout that has come brought its own cost."""
        self.model = self._learned.model
        """[n] lengths -> [n] costs."""
        self.cost_of_length = lru_cache(_MOST_LENGTHS)(partial(_cost_of, self.model))
        """Tokens -> cost. Lengths repeat, and a model that is asked for one of them takes a third of a put."""
        self.knobs = _plan_knobs(config, self._learned, tolerance)
        """Knobs that the planner is given."""

    def under(self, config: BalancerConfig, learned: Learned | None = None) -> Pricing:
        """The same under other knobs, or by what was ``learned`` now."""
        # seconds were learned as a factor on this cost
        if config.cost == self._config.cost:
            learned = learned or self._learned
        other = Pricing(config, self.knobs.tolerance, learned)
        other.has_own_costs = self.has_own_costs
        return other

    def costs_of(self, buffer: Buffer) -> Floats:
        """[n] costs of what waits. Raises RolloutError like :meth:`cost_of`. O(n); O(n) calls of the model where
        rollouts bring their own cost."""
        if self.has_own_costs:
            return np.array([self.cost_of(rollout) for rollout in buffer.rollouts()], dtype=np.float64)
        return _costs_of(self.model, buffer.lengths)

    def cost_of(self, rollout: Rollout) -> float:
        """The rollout's own cost, else the model's. Raises RolloutError where that is no number from 0 to 1e100."""
        return self.cost_of_length(rollout.num_tokens) if rollout.cost is None else rollout.cost

    def waiting_of(self, rollouts: Sequence[Rollout]) -> Waiting:
        """The planner's columns of rollouts that all go, oldest first. O(n)."""
        return replace(
            Waiting.of(np.array([self.cost_of(rollout) for rollout in rollouts], dtype=np.float64)),
            lengths=np.array([rollout.num_tokens for rollout in rollouts], dtype=np.int64),
            due=np.ones(len(rollouts), dtype=np.bool_),
            groups=labels_of(rollout.group_id for rollout in rollouts),
        )


def _costs_of(model: CostFunction, lengths: Ints) -> Floats:
    """[n] costs of so many tokens. Raises RolloutError where one is no number from 0 to 1e100."""
    costs = np.asarray(model(lengths), dtype=np.float64)
    # not NaN either
    bad = np.flatnonzero(~((costs >= 0) & (costs <= MAX_COST)))
    if bad.size:
        raise RolloutError(
            f"the cost model gave {costs[bad[0]]} for a rollout of {lengths[bad[0]]} tokens; a cost must be a finite "
            f"number >= 0 and at most {MAX_COST:g}. Fix {model!r}, or give the rollout a cost of its own"
        )
    return costs


def _cost_of(model: CostFunction, num_tokens: int) -> float:
    return float(_costs_of(model, np.array([num_tokens], dtype=np.int64))[0])


def _plan_knobs(config: BalancerConfig, learned: Learned, tolerance: float) -> PlanKnobs:
    micro_batches, groups = config.micro_batches, config.groups
    # what the user has given goes before what was learned
    given = micro_batches.overhead_cost
    return PlanKnobs(
        dp_size=config.dp_size,
        batch_size=config.batch_size,
        max_skips=config.max_skips,
        equal_rollouts=config.equal_rollouts,
        sync=config.sync,
        whole_groups=groups.size is not None,
        group_size=groups.size,
        max_tokens=micro_batches.max_tokens,
        equal_number=micro_batches.equal_number,
        multiple_of=micro_batches.multiple_of,
        mini_batches=config.mini_batches,
        padded=config.cost.padded,
        overhead_cost=learned.overhead_cost if given is None else given,
        tolerance=tolerance,
    )
