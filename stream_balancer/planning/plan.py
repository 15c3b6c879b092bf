"""Values that enter and leave the planner. No decisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from .arrays import Bools, Floats, Ints, Layout, Sync

Together: TypeAlias = Callable[[Ints], Ints]
"""[n] chosen positions -> [n] labels. Rollouts of one label stay in one mini-batch; -1 = the rollout has no label."""

TOLERANCE = 1e-4
"""A partition within 0.01 % of its lower bound is final. The last digits cost as much time as all before."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Waiting rollouts as columns, oldest first."""

    costs: Floats
    """[W] work of each rollout, >= 0."""
    lengths: Ints
    """[W] tokens of each rollout, >= 1."""
    skips: Ints
    """[W] steps that left the rollout behind so far."""
    due: Bools
    """[W] the rollout must go now: its deadline passed, or it would become stale."""
    groups: Ints
    """[W] label of the rollout's group; -1 = no group."""
    group_complete: Bools
    """[W] False while siblings are missing. Such a rollout waits unless it is due."""
    by_cost: Ints | None = None
    """[W] positions by ascending cost, of equal costs the older first, where the caller keeps such an index. ``None``:
    the planner sorts."""

    @classmethod
    def of(cls, costs: ArrayLike, lengths: ArrayLike | None = None) -> Waiting:
        """Rollouts without groups, never skipped and not due. ``lengths`` default to the costs."""
        work = np.asarray(costs, np.float64)
        tokens = np.maximum(work, 1) if lengths is None else np.asarray(lengths)
        none = np.zeros(work.size, bool)
        zero = np.zeros(work.size, np.int64)
        return cls(work, tokens.astype(np.int64), zero, none, zero - 1, ~none)

    def among(self, rows: Ints | Bools) -> Waiting:
        """The rollouts in these rows, given as positions or as a mask, without the index by cost."""
        return Waiting(*(getattr(self, column.name)[rows] for column in fields(self)[:-1]))


@dataclass(frozen=True, slots=True)
class PlanKnobs:
    """Limits of a plan. Callers check them; the planner does not."""

    dp_size: int
    batch_size: int
    max_skips: int | None = None
    """Most steps that may leave a rollout behind. None = no limit."""
    sync: Sync = "step"
    """Ranks meet once per "step", or at every "micro_batch" (FSDP, ZeRO-3)."""
    equal_rollouts: bool = False
    """The rollout counts of two ranks differ by at most 1."""
    whole_groups: bool = False
    """All rollouts of a group leave in one step."""
    group_size: int | None = None
    """Rollouts of the largest group, where known. The skip bound keeps room for a whole group."""
    max_tokens: int | None = None
    """Token cap of a micro-batch. A longer rollout runs alone."""
    equal_number: bool = True
    """Every rank runs the same number of micro-batches. May be False only with ``sync="step"``."""
    multiple_of: int = 1
    """The number of micro-batches is a multiple of this (virtual pipeline stages)."""
    overhead_cost: float = 0.0
    """Work of a micro-batch on top of its rollouts."""
    padded: bool = False
    """A micro-batch costs rollouts x costliest rollout, and its tokens are rollouts x longest rollout."""
    mini_batches: int = 1
    """Optimizer steps per step."""
    tolerance: float = TOLERANCE
    """Relative distance from the lower bound at which a partition is final."""

    @property
    def has_micro_batches(self) -> bool:
        """A rank may run several micro-batches."""
        return self.max_tokens is not None or self.multiple_of > 1 or self.padded


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a step."""

    ranks: Layout
    """``[rank][micro_batch]`` -> positions in the `Waiting` columns. A rank with fewer rollouts than micro-batches has
    a shorter list; the caller adds padding copies."""
    loads: Floats
    """[dp_size] work of each rank, micro-batch overhead included."""
    finish: float
    """Time at which the last rank finishes."""
    lower_bound: float
    """No layout of the same rollouts finishes earlier."""
    incomplete_groups: tuple[int, ...] = ()
    """Labels of groups that leave before all siblings arrived."""
    mini_batches: tuple[Plan, ...] = ()
    """Plans of the mini-batches in running order. Empty where the step has one piece."""

    @property
    def pieces(self) -> tuple[Plan, ...]:
        """Mini-batches of the plan, or the plan itself."""
        return self.mini_batches or (self,)
