"""Values that go into the planner and come out of it. No decisions."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from .arrays import Bools, Counts, Floats, Ints, Order, Oversize, Sync, positions_in
from .cost_order import CostOrder
from .partition import TOLERANCE


@dataclass(frozen=True, slots=True)
class Waiting:
    """Waiting rollouts as columns, in arrival order (oldest first)."""

    costs: Floats
    """[W] work of each, >= 0."""
    lengths: Ints
    """[W] tokens of each, >= 1."""
    skips: Ints
    """[W] steps that left it behind so far, since it was ready."""
    due: Bools
    """[W] must go now: its deadline passed, or it is about to go stale."""
    groups: Ints
    """[W] label of its sibling group; -1 for none."""
    group_complete: Bools
    """[W] False while siblings are missing (then it waits, unless due); True without a group."""
    order: CostOrder | None = None
    """Order of the rollouts by cost, where it is kept; None: the planner sorts them if it has to."""

    @classmethod
    def of(cls, costs: Floats) -> Waiting:
        """Rollouts without groups, none of them passed over or due, and as long as they cost."""
        none = np.zeros(costs.size, dtype=np.bool_)
        zero = np.zeros(costs.size, dtype=np.int64)
        return cls(costs, np.maximum(costs, 1).astype(np.int64), zero, none, zero - 1, ~none)

    def among(self, keep: Bools) -> Waiting:
        """Only those to keep ([W]), in positions among them. O(W)."""
        columns: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "order"}
        kept: dict[str, Any] = {name: column if column is None else column[keep] for name, column in columns.items()}
        return Waiting(order=None if self.order is None else self.order.among(keep), **kept)


@dataclass(frozen=True, slots=True)
class PlanKnobs:
    """Knobs that a plan has to respect. Taken as checked: `BalancerConfig` refuses the bad ones."""

    dp_size: int
    batch_size: int
    """Rollouts of a step."""
    max_skips: int | None
    """None = no bound."""
    counts: Counts = "free"
    sync: Sync = "step"
    whole_groups: bool = False
    """Siblings of a group leave in one batch. False: the planner ignores groups."""
    max_tokens_per_micro_batch: int | None = None
    padded: bool = False
    overhead_cost: float = 0.0
    """Fixed work of a micro-batch."""
    micro_batch_counts: Counts = "equal"
    micro_batch_multiple: int = 1
    mini_batches: int = 1
    """Pieces of a step, each with an optimizer step of its own; see :mod:`.mini_batches`."""
    order: Order = "heaviest_first"
    oversize: Oversize = "refuse"
    group_size: int | None = None
    """Most rollouts in a group, where known: the skip guarantee keeps room for a whole one."""
    tolerance: float = TOLERANCE
    """How near to the lower bound a partition is sought (relatively)."""


def has_micro_batches(knobs: PlanKnobs) -> bool:
    """A rank's share may be more than one micro-batch."""
    return knobs.max_tokens_per_micro_batch is not None or knobs.micro_batch_multiple > 1 or knobs.padded


@dataclass(frozen=True, slots=True)
class Times:
    """Work of the ranks of a layout, and when they are done."""

    work: Floats
    """[dp_size] work of each."""
    overheads: Floats
    """[dp_size] what their micro-batches cost beside their rollouts, padding copies counted."""
    finish: float
    """When the last of the ranks is done with its micro-batches; where they meet at every one, the sum of the costliest
    of each index. What they cost is padded where the knobs say so."""

    @classmethod
    def of(cls, waiting: Waiting, knobs: PlanKnobs, ranks: list[list[Ints]]) -> Times:
        """Times of ``[rank][micro_batch]`` -> positions. O(n).

        Examples:
            >>> waiting = Waiting.of(np.array([900.0, 100.0, 300.0, 700.0]))
            >>> ranks = [[np.array([0]), np.array([1])], [np.array([2]), np.array([3])]]
            >>> Times.of(waiting, PlanKnobs(2, 4, 8), ranks).finish  # 900 + 100, 300 + 700
            1000.0
            >>> in_step = PlanKnobs(2, 4, 8, sync="micro_batch")
            >>> Times.of(waiting, in_step, ranks).finish  # 900 beside 300, 100 beside 700
            1600.0
        """
        ones = [one for share in ranks for one in share]
        numbers = np.array([len(share) for share in ranks])
        rank_of = np.repeat(np.arange(numbers.size), numbers)
        index = np.arange(len(ones)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
        # one call for all: a sum for each costs more at hundreds of ranks
        place = np.repeat(np.arange(len(ones)), [one.size for one in ones])
        each = np.bincount(place, waiting.costs[positions_in(ranks)], len(ones)).astype(np.float64)
        took = np.zeros((int(numbers.max()), numbers.size))  # [micro-batches, ranks]
        took[index, rank_of] = [one.size * waiting.costs[one].max() for one in ones] if knobs.padded else each
        overheads = _overheads(knobs, numbers)
        # ranks that meet at every micro-batch wait for the costliest of each index; else only for the last at the end
        if knobs.sync == "micro_batch":
            finish = float(took.max(axis=1).sum() + overheads.max())
        else:
            finish = float((took.sum(axis=0) + overheads).max())
        work = np.bincount(rank_of, weights=each, minlength=numbers.size).astype(np.float64)
        return cls(work, overheads, finish)

    @property
    def idle(self) -> float:
        """The part of the step that is not work."""
        return 1.0 - float(self.work.mean()) / self.finish if self.finish else 0.0


def _overheads(knobs: PlanKnobs, numbers: Ints) -> Floats:
    """[dp_size] of so many micro-batches."""
    if not has_micro_batches(knobs):
        return np.zeros(numbers.size)
    # a rank with nothing to run runs a padding copy
    run = np.maximum(numbers, 1)
    if knobs.micro_batch_counts == "equal":
        run[:] = run.max()
    # a virtual pipeline runs whole multiples, padding copies in what is missing
    overheads: Floats = knobs.overhead_cost * (-(-run // knobs.micro_batch_multiple))
    return overheads * knobs.micro_batch_multiple


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a batch: who goes, on which rank, in which micro-batch."""

    ranks: list[list[Ints]]
    """``[rank][micro_batch]`` -> positions into the `Waiting` columns. A rank with fewer rollouts than micro-batches
    has a shorter list: the caller completes it with padding copies."""
    loads: Floats
    """[dp_size] work per rank, overheads of micro-batches counted."""
    finish: float
    """When the last rank is done, see `Times`."""
    lower_bound: float
    """No plan of these rollouts is done before."""
    incomplete_groups: tuple[int, ...]
    """Labels of groups that had to go without all their siblings."""
    mini_batches: tuple[Plan, ...] = ()
    """Plans of its mini-batches, in the order they run in; ``ranks`` has theirs one after the other. Empty where the
    step is in one piece."""

    @property
    def pieces(self) -> tuple[Plan, ...]:
        """Mini-batches of the plan, or the plan itself."""
        return self.mini_batches or (self,)

    @property
    def mean_finish(self) -> float:
        """When all ranks would be done if their work were spread evenly."""
        if self.mini_batches:
            return sum(one.mean_finish for one in self.mini_batches)
        return float(self.loads.mean())

    @property
    def imbalance(self) -> float:
        """latest finish / mean finish - 1. Beyond what `lower_bound` explains a better partition could save it; the
        rest is the price of the heaviest rollout, and only another choice from the window helps."""
        mean = self.mean_finish
        return max(self.finish - mean, 0.0) / mean if mean else 0.0
