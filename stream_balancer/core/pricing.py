"""What the waiting rollouts cost, and what the planner is given of the ranks: by the config's cost model, or by what a
``CalibratedCost`` has learned. Pure; seconds come in as arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from stream_balancer.config import BalancerConfig
from stream_balancer.core.buffer import Buffer
from stream_balancer.core.calibration import Calibration
from stream_balancer.cost import CalibratedCost
from stream_balancer.errors import RolloutError
from stream_balancer.planning import Plan, PlanKnobs, Waiting
from stream_balancer.planning.arrays import Floats, Ints
from stream_balancer.planning.plan import work_in
from stream_balancer.planning.rank_speeds import NO_FIXED_COSTS, FixedCosts
from stream_balancer.types import Batch, RankBatch, Rollout
from stream_balancer.types.shared import SharedRollout
from stream_balancer.values import MAX_COST

__all__ = ["Pricing", "costs_of"]
CostFunction = Callable[[Ints], Floats]


class Pricing:
    """The cost model in force, and the knobs of the planner that follow from it."""

    def __init__(self, config: BalancerConfig, tolerance: float) -> None:
        """``tolerance``: how near to the lower bound the planner seeks partitions."""
        self._tolerance = tolerance
        self._config = config
        self.knobs = _plan_knobs(config, tolerance)
        """What the planner is given."""
        self.calibration = _calibration_of(config)
        """What is learned from the ranks' seconds; None for a cost that does not learn."""
        self.model: CostFunction = config.cost if self.calibration is None else self.calibration.cost
        """[n] lengths -> [n] costs, as of now."""
        self.has_own_costs = False
        """Some rollout that has come brought its own cost."""

    def reprice(self, buffer: Buffer) -> float:
        """Plan with what the model says now. -> the waiting rollouts' cost over what it was. O(n); O(n) calls of the
        model where rollouts bring their own cost."""
        if self.has_own_costs and len(buffer):
            costs = np.array([_cost_of(rollout, self.model) for rollout in buffer.rollouts()], dtype=np.float64)
        else:
            costs = np.asarray(self.model(buffer.lengths), dtype=np.float64)
        before = float(buffer.costs.sum())  # 0 where nothing waits, or all of it is free
        # observers keep costs of their own, and scale them by this
        factor = float(costs.sum()) / before if before > 0 else 1.0
        buffer.reprice(costs)
        if self.calibration is not None:
            # ranks that share a rollout are planned as if they were alike
            speeds = None if len(self._config.cp_sizes) > 1 else self.calibration.speeds
            self.knobs = replace(
                self.knobs,
                speeds=None if speeds is None else np.array(speeds, dtype=np.float64),
                fixed_costs=_fixed_costs(self._config, self.calibration.fixed_costs),
                cp_overhead=(
                    self._config.cp_overhead if self.calibration.cp_overhead is None else self.calibration.cp_overhead
                ),
            )
        return factor

    def reconfigure(self, config: BalancerConfig) -> None:
        """Other knobs; what was learned is kept while cost and speeds are the same, and with another number of ranks
        all but their speeds. :meth:`reprice` must follow."""
        before, resized = self._config, config.dp_size != self._config.dp_size
        if resized or (config.cost, config.speeds) != (before.cost, before.speeds):
            learned, self.calibration = self.calibration, _calibration_of(config)
            self.model = config.cost if self.calibration is None else self.calibration.cost
            if resized and config.cost == before.cost and learned is not None and self.calibration is not None:
                self.calibration.take_over(learned.state())
        self._config = config
        self.knobs = _plan_knobs(config, self._tolerance)

    def expect(self, batch: Batch, plan: Plan) -> None:
        """A batch leaves: its seconds will say what its lengths cost. O(rollouts)."""
        # costs that are not the model's would teach it something else, and a rank with nothing but padding copies is
        # done before any work could be measured
        if self.calibration is not None and not self.has_own_costs and all(plan.ranks):
            lengths = [_lengths_of((one,)) for one in batch.ranks]
            self.calibration.expect(batch.step, lengths, _degrees_of(batch) if batch.has_shared else None)

    def worked_on(self, batch: Batch, work: Sequence[tuple[RankBatch, ...]]) -> Batch:
        """``batch``, with the loads that its ranks had in the end: ``work[rank]`` is what each trained on, after some
        was moved between them. Its seconds will be compared with that. O(rollouts)."""
        if self.calibration is not None and self.calibration.expects(batch.step):
            self.calibration.expect(batch.step, [_lengths_of(one) for one in work])
        costs = self._work_of(work)
        planned = self._work_of([(one,) for one in batch.ranks])
        loads = zip(batch.loads, costs, planned, strict=True)
        return replace(batch, loads=tuple(load * cost / before if before else load for load, cost, before in loads))

    def _work_of(self, work: Sequence[tuple[RankBatch, ...]]) -> list[float]:
        """[rank] work of all its micro-batches. O(rollouts)."""
        real: list[Rollout] = []
        ranks: list[list[Ints]] = []
        for of_rank in work:
            ranks.append([])
            for one in chain.from_iterable(rank_batch.micro_batches for rank_batch in of_rank):
                rollouts = [rollout for rollout in one.rollouts if not rollout.is_padding]
                ranks[-1].append(np.arange(len(real), len(real) + len(rollouts)))
                real += rollouts
        return [float(of_rank.sum()) for of_rank in work_in(self.waiting_of(real), ranks)]

    def waiting_of(self, rollouts: Sequence[Rollout]) -> Waiting:
        """The planner's columns of rollouts that all go, oldest first. O(n)."""
        number = len(rollouts)
        everybody = np.ones(number, dtype=np.bool_)
        # -1 = no group; the others are numbered as they come
        labels: dict[str | None, int] = {None: -1}
        waiting = Waiting(
            costs=np.array(costs_of(rollouts, self.model) if rollouts else (), dtype=np.float64),
            lengths=np.array([rollout.num_tokens for rollout in rollouts], dtype=np.int64),
            skips=np.zeros(number, dtype=np.int64),
            due=everybody,
            groups=np.array([labels.setdefault(r.group_id, len(labels) - 1) for r in rollouts], dtype=np.int64),
            group_complete=everybody,
        )
        return self.with_prefixes(waiting, rollouts)

    def with_prefixes(self, waiting: Waiting, rollouts: Sequence[Rollout]) -> Waiting:
        """The columns of these rollouts, with what the prefix of each costs alone, where prefixes are shared. O(n).

        A rollout with a cost of its own has no price for its prefix: what it costs does not follow from lengths.
        """
        if not self._config.share_prefixes:
            return waiting
        numbers: dict[str | None, int] = {}
        lengths = np.array([0 if r.cost is not None else r.prefix for r in rollouts], dtype=np.int64)
        siblings = np.array(
            [
                numbers.setdefault(r.group_id, len(numbers)) if length else -1
                for r, length in zip(rollouts, lengths, strict=True)
            ],
            dtype=np.int64,
        )
        costs, shares = np.zeros(lengths.size), np.flatnonzero(lengths)
        if shares.size:
            # a model is only known to have a price for whole lengths
            costs[shares] = np.maximum(np.nan_to_num(np.asarray(self.model(lengths[shares]), dtype=np.float64)), 0.0)
        return replace(waiting, prefix_costs=costs, prefix_lengths=lengths, siblings=siblings)


def _lengths_of(work: tuple[RankBatch, ...]) -> list[NDArray[np.int64]]:
    """[micro_batch] lengths of its rollouts, whole ones of those that it shares."""
    return [
        np.array(
            [r.whole_tokens if isinstance(r, SharedRollout) else r.num_tokens for r in one.rollouts], dtype=np.int64
        )
        for rank_batch in work
        for one in rank_batch.micro_batches
    ]


def _degrees_of(batch: Batch) -> list[list[int]]:
    """[rank][micro_batch] how many ranks share it."""
    return [[max(len(one.cp_group), 1) for one in rank_batch.micro_batches] for rank_batch in batch.ranks]


def costs_of(rollouts: Sequence[Rollout], model: CostFunction) -> list[float]:
    """Each rollout's own cost, else the model's, which is asked once for all where it can be. Raises RolloutError,
    naming the rollout, for a cost that is no number from 0 to 1e100."""
    if len(rollouts) == 1:
        return [_cost_of(rollouts[0], model)]
    if any(rollout.cost is not None for rollout in rollouts):
        return [_cost_of(rollout, model) for rollout in rollouts]
    costs = np.asarray(model(np.array([rollout.num_tokens for rollout in rollouts], dtype=np.int64)), dtype=np.float64)
    if not ((costs >= 0) & (costs <= MAX_COST)).all():
        return [_cost_of(rollout, model) for rollout in rollouts]  # raises, and names one
    found: list[float] = costs.tolist()
    return found


def _cost_of(rollout: Rollout, model: CostFunction) -> float:
    if rollout.cost is not None:
        return rollout.cost
    cost = float(model(np.array([rollout.num_tokens], dtype=np.int64))[0])
    if not 0 <= cost <= MAX_COST:  # not NaN either
        raise RolloutError(
            f"the cost model gave {cost} for rollout {rollout.rollout_id!r} ({rollout.num_tokens} tokens); a cost must "
            f"be a finite number >= 0 and at most {MAX_COST:g}. Fix {model!r}, or give the rollout a cost of its own"
        )
    return cost


def _calibration_of(config: BalancerConfig) -> Calibration | None:
    if not isinstance(config.cost, CalibratedCost):
        return None
    return Calibration(config.cost, config.dp_size, config.speeds, cp_overhead=config.cp_overhead)


def _fixed_costs(config: BalancerConfig, learned: FixedCosts) -> FixedCosts:
    given = config.micro_batch_overhead_cost
    return learned if given is None else learned._replace(micro_batch=float(given))


def _plan_knobs(config: BalancerConfig, tolerance: float) -> PlanKnobs:
    return PlanKnobs(
        num_ranks=config.dp_size,
        batch_size=config.batch_size,
        batch_tokens=config.batch_tokens,
        batch_size_range=config.batch_size_range,
        max_skips=config.max_skips,
        counts=config.counts,
        sync=config.sync,
        groups="free" if config.group_size is None else config.groups,
        max_tokens_per_micro_batch=config.max_tokens_per_micro_batch,
        padded=config.cost.padded,
        speeds=None if config.speeds is None else np.array(config.speeds, dtype=np.float64),
        micro_batch_multiple=config.micro_batch_multiple,
        mini_batches=config.mini_batches,
        pipeline_order=config.micro_batch_order == "pipeline",
        fixed_costs=_fixed_costs(config, NO_FIXED_COSTS),
        micro_batch_counts=config.micro_batch_counts,
        oversize=config.oversize,
        group_size=config.group_size,
        cp_sizes=config.cp_sizes,
        cp_overhead=config.cp_overhead,
        cp_min_tokens=config.cp_min_tokens,
        tolerance=tolerance,
    )
