"""Who goes now: which of the waiting rollouts make the next batch, and how that batch lies on ranks and micro-batches.

Pure: numpy in, positions out. See docs/planning.md for the proofs.

    Waiting, PlanKnobs --> must go     due rollouts, and as many more as the skip guarantee needs (earliest deadline first)
                       --> may go      first in, first out, while that balances; outliers are deferred, then gathered
                       --> ranks       partition.py, or micro_batches.py under a token cap
                       --> Plan
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from .micro_batches import form_micro_batches
from .partition import lower_bound_of, partition

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .partition import Counts, Floats, Ints

    Bools = NDArray[np.bool_]

Groups = Literal["free", "same_batch", "same_rank"]
Sync = Literal["step", "micro_batch"]
Oversize = Literal["refuse", "alone"]


@dataclass(frozen=True, slots=True)
class Waiting:
    """The waiting rollouts as columns, in arrival order (oldest first)."""

    costs: Floats
    """[W] work of each, >= 0."""
    lengths: Ints
    """[W] tokens of each, >= 1."""
    skips: Ints
    """[W] dispatches that left it behind so far, since it was ready."""
    due: Bools
    """[W] must go now: its deadline passed, or it is about to go stale."""
    groups: Ints
    """[W] label of its sibling group; -1 for none."""
    group_complete: Bools
    """[W] False while siblings are missing (then it waits, unless due); True without a group."""


@dataclass(frozen=True, slots=True)
class PlanKnobs:
    """What a plan has to respect. Taken as checked: `BalancerConfig` refuses the bad ones."""

    num_ranks: int
    batch_size: int
    max_skips: int
    counts: Counts = "free"
    sync: Sync = "step"
    groups: Groups = "free"
    max_tokens_per_micro_batch: int | None = None
    padded: bool = False
    speeds: Floats | None = None
    micro_batch_multiple: int = 1
    pipeline_order: bool = False
    oversize: Oversize = "refuse"


@dataclass(frozen=True, slots=True)
class Plan:
    """Who goes, and where."""

    ranks: list[list[Ints]]
    """[rank][micro_batch] -> positions into the `Waiting` columns. With fewer rollouts than ranks (or than micro-batches) the
    last ranks' lists are shorter than the longest: the caller completes them with zero-weight padding copies."""
    loads: Floats
    """[num_ranks] work per rank."""
    lower_bound: float
    """Latest finish that no partition of these rollouts can beat."""
    incomplete_groups: tuple[int, ...]
    """Labels of groups that had to go without all their siblings."""
    avoidable_imbalance: float
    """(latest finish - lower bound) / mean finish: what a better partition could still save."""
    unavoidable_imbalance: float
    """(lower bound - mean finish) / mean finish: the price of the heaviest rollout; only another choice from the window helps."""

    @property
    def imbalance(self) -> float:
        """latest finish / mean finish - 1."""
        return self.avoidable_imbalance + self.unavoidable_imbalance


def plan_batch(waiting: Waiting, knobs: PlanKnobs, *, num_rollouts: int, step: int) -> Plan:
    """Choose `num_rollouts` of the waiting rollouts and lay them out on ranks and micro-batches.

    Fewer are chosen only if the groups do not allow that number. Deterministic.
    """
    units = _Units.of(waiting, knobs)
    chosen = _select(units, knobs, num_rollouts)
    return _lay_out(waiting, knobs, units, chosen, step)


def _lay_out(waiting: Waiting, knobs: PlanKnobs, units: _Units, chosen: Ints, step: int) -> Plan:
    picked = np.flatnonzero(np.isin(units.unit_of, chosen))
    costs = waiting.costs[picked]
    speeds = knobs.speeds
    rank_lists: list[list[Ints]]
    if knobs.max_tokens_per_micro_batch is None and knobs.sync == "step" and knobs.micro_batch_multiple == 1:
        if knobs.groups == "same_rank":
            shares = partition(units.costs[chosen], knobs.num_ranks, knobs.counts, speeds, rotation=step)
            members = [np.flatnonzero(np.isin(units.unit_of, chosen[share])) for share in shares]
        else:
            shares = partition(costs, knobs.num_ranks, knobs.counts, speeds, rotation=step)
            members = [picked[share] for share in shares]
        rank_lists = [[one] if one.size else [] for one in members]
    else:
        labels = units.unit_of[picked] if knobs.groups == "same_rank" else None
        formed = form_micro_batches(
            waiting.lengths[picked],
            costs,
            knobs.num_ranks,
            max_tokens=knobs.max_tokens_per_micro_batch,
            sync=knobs.sync,
            counts=knobs.counts,
            padded=knobs.padded,
            multiple_of=knobs.micro_batch_multiple,
            order="pipeline" if knobs.pipeline_order else "heaviest_first",
            speeds=speeds,
            keep_together=labels,
            oversize=knobs.oversize,
            rotation=step,
        )
        rank_lists = [[picked[one] for one in share] for share in formed]
    loads = np.array([float(sum(waiting.costs[one].sum() for one in share)) for share in rank_lists])
    rate = np.ones(knobs.num_ranks) if speeds is None else np.asarray(speeds, dtype=np.float64)
    bound = lower_bound_of(costs, knobs.num_ranks, knobs.counts, None if speeds is None else rate)
    mean = float(loads.sum() / rate.sum())
    finish = float((loads / rate).max()) if picked.size else 0.0
    flagged = np.unique(waiting.groups[picked][~waiting.group_complete[picked]])
    return Plan(
        ranks=rank_lists,
        loads=loads,
        lower_bound=bound,
        incomplete_groups=tuple(int(label) for label in flagged if label >= 0),
        avoidable_imbalance=max(finish - bound, 0.0) / mean if mean else 0.0,
        unavoidable_imbalance=max(bound - mean, 0.0) / mean if mean else 0.0,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Units: what is chosen as a whole
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Units:
    """Rollouts, or whole groups where siblings stay together; in order of their oldest member."""

    unit_of: Ints
    """[W] unit of each waiting rollout."""
    sizes: Ints
    """[U] rollouts."""
    costs: Floats
    """[U] summed cost."""
    remaining: Ints
    """[U] dispatches that may still leave it behind; 0 = must go now."""
    due: Bools
    """[U] a member is due."""
    ready: Bools
    """[U] complete, or going anyway."""

    @staticmethod
    def of(waiting: Waiting, knobs: PlanKnobs) -> _Units:
        num_waiting = waiting.costs.size
        unit_of = np.arange(num_waiting)
        if knobs.groups != "free" and bool((waiting.groups >= 0).any()):
            labels = np.where(waiting.groups >= 0, waiting.groups, waiting.groups.max() + 1 + unit_of)
            _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
            by_age = np.argsort(np.argsort(first, kind="stable"), kind="stable")
            unit_of = by_age[inverse]
        num_units = int(unit_of.max(initial=-1)) + 1
        remaining = np.full(num_units, knobs.max_skips, dtype=np.int64)
        np.minimum.at(remaining, unit_of, np.maximum(knobs.max_skips - waiting.skips, 0))
        due = np.zeros(num_units, dtype=np.bool_)
        due[unit_of[waiting.due]] = True
        ready = np.ones(num_units, dtype=np.bool_)
        if knobs.groups != "free":
            ready[unit_of[~waiting.group_complete]] = False
        due |= remaining == 0
        return _Units(
            unit_of=unit_of,
            sizes=np.bincount(unit_of, minlength=num_units),
            costs=np.bincount(unit_of, weights=waiting.costs, minlength=num_units),
            remaining=remaining,
            due=due,
            ready=ready | due,
        )


def _select(units: _Units, knobs: PlanKnobs, num_rollouts: int) -> Ints:
    """-> ascending units that go now."""
    remaining, due, ready = units.remaining, units.due, units.ready
    age = np.arange(units.sizes.size)
    first = np.lexsort((age, ~ready, np.where(due, 0, 1), remaining))  # v1: earliest deadline first, then the oldest
    urgent = _forced(units, knobs, num_rollouts)
    order = np.concatenate((first[urgent[first]], age[ready & ~urgent & due], age[ready & ~urgent & ~due]))
    room = num_rollouts
    chosen = []
    for unit in order.tolist():
        size = int(units.sizes[unit])
        if size <= room:
            chosen.append(unit)
            room -= size
            if room == 0:
                break
    return np.sort(np.array(chosen, dtype=np.int64))


def _forced(units: _Units, knobs: PlanKnobs, num_rollouts: int) -> Bools:
    """Units that must go so that nobody is ever passed over by more than max_skips dispatches.

    Of the units with at most j skips left, at most j * batch_size rollouts may stay behind: the next j dispatches take them.
    """
    forced = np.zeros(units.sizes.size, dtype=np.bool_)
    for j in range(knobs.max_skips + 1):
        pressed = units.remaining <= j
        need = int(units.sizes[pressed].sum()) - j * knobs.batch_size - int(units.sizes[forced & pressed].sum())
        if need <= 0:
            continue
        candidates = np.flatnonzero(pressed & ~forced)
        candidates = candidates[np.argsort(~units.ready[candidates], kind="stable")]
        enough = int(np.searchsorted(np.cumsum(units.sizes[candidates]), need)) + 1
        forced[candidates[:enough]] = True
    return forced


def smallest_max_skips(window: int, batch_size: int, capacity: int, max_group: int = 1) -> int:
    """The least `max_skips` for which the skip guarantee is a theorem and the window is of use.

    The guarantee needs capacity <= (max_skips + 1) * (batch_size - max_group + 1); usefulness needs
    max_skips >= 3 * (window / batch_size - 1), else everything is always due and nothing is left to choose.
    With groups that all have the same size and divide batch_size, pass max_group=1.
    """
    sent = max(batch_size - max_group + 1, 1)
    guarantee = -(-capacity // sent) - 1
    useful = -(-3 * (window - batch_size) // batch_size)
    return max(guarantee, useful, 0)
