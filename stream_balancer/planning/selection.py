"""Who goes now: which of the waiting rollouts make the next batch, and how that batch lies on ranks and micro-batches.

Pure: numpy in, positions out. See docs/planning.md for the proofs.

    Waiting, PlanKnobs --> must go     due rollouts, and as many more as the skip guarantee needs
                       --> may go      first in, first out, while that balances; outliers are deferred, then gathered
                       --> ranks       partition.py, or micro_batches.py under a token cap
                       --> Plan
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from .deferral import choose
from .exchange import exchange_with_waiting
from .micro_batches import form_micro_batches, in_order
from .overhead import NO_OVERHEAD, Overhead, work_rates
from .partition import TOLERANCE, loads_of, lower_bound, partition, partition_together
from .rows import choose_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .micro_batches import Order
    from .partition import Counts, Floats, Ints

    Bools = NDArray[np.bool_]

Groups = Literal["free", "same_batch", "same_rank"]
Sync = Literal["step", "micro_batch"]
Oversize = Literal["refuse", "alone"]


_LIGHT_SHARE = 2
"""Under equal counts an outlier's rank is filled up from the lighter half of the window (1/4 and 1/8 leave 1-4 points
more idle)."""


_UNBOUNDED = 2**62
"""Skips that nobody will live to see: ``max_skips=None``."""


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
    max_skips: int | None
    """None = no bound."""
    counts: Counts = "free"
    sync: Sync = "step"
    groups: Groups = "free"
    max_tokens_per_micro_batch: int | None = None
    padded: bool = False
    speeds: Floats | None = None
    overhead: Overhead = NO_OVERHEAD
    """Fixed costs of every rank; they matter only where speeds differ."""
    micro_batch_multiple: int = 1
    pipeline_order: bool = False
    oversize: Oversize = "refuse"
    group_size: int | None = None
    """Most rollouts in a group, where known: the skip guarantee keeps room for a whole one."""
    tolerance: float = TOLERANCE
    """How near to the lower bound a partition is sought (relatively)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Who goes, and where."""

    ranks: list[list[Ints]]
    """``[rank][micro_batch]`` -> positions into the `Waiting` columns. With fewer rollouts than ranks (or than
    micro-batches) the last ranks' lists are shorter than the longest: the caller completes them with zero-weight
    padding copies."""
    loads: Floats
    """[num_ranks] work per rank."""
    rates: Floats | None
    """[num_ranks] work per time; a rank finishes at load / rate. None = all alike."""
    lower_bound: float
    """Latest finish that no partition of these rollouts can beat."""
    incomplete_groups: tuple[int, ...]
    """Labels of groups that had to go without all their siblings."""
    avoidable_imbalance: float
    """(latest finish - lower bound) / mean finish: what a better partition could still save."""
    unavoidable_imbalance: float
    """(lower bound - mean finish) / mean finish: the price of the heaviest rollout; only another choice from the window
    helps."""

    @property
    def imbalance(self) -> float:
        """latest finish / mean finish - 1."""
        return self.avoidable_imbalance + self.unavoidable_imbalance


def plan_batch(waiting: Waiting, knobs: PlanKnobs, *, num_rollouts: int, step: int) -> Plan:
    """Choose `num_rollouts` of the waiting rollouts and lay them out on ranks and micro-batches.

    Fewer are chosen only if whole groups do not add up to that number, or if the rest waits for siblings.
    With fewer chosen than ranks, the last ranks stay empty: the caller adds zero-weight padding copies.

    Args:
        waiting: the columns; nothing is changed in them.
        knobs: taken as checked.
        num_rollouts: how many to send: `batch_size`, or fewer for a deadline or the drain.
        step: counts the batches; rotates which rank gets the heaviest share.

    Raises:
        OversizeError: a rollout is above the token cap and oversize="refuse".

    Complexity: O(W log W + n log n), refinement within a fixed work budget. Deterministic.
    """
    units = _Units.of(waiting, knobs)
    at_first = _with_rates(waiting, knobs, np.arange(min(num_rollouts, waiting.costs.size)))
    fixed, go = _select(waiting, units, at_first, min(num_rollouts, knobs.batch_size))
    chosen = go[units.unit_of]
    fixed_rollouts = fixed[units.unit_of]
    knobs = _with_rates(waiting, knobs, np.flatnonzero(chosen))
    shares = _shares(waiting, knobs, units, chosen, fixed_rollouts, step)
    return _finish(waiting, knobs, shares)


def _with_rates(waiting: Waiting, knobs: PlanKnobs, picked: Ints) -> PlanKnobs:
    """Knobs whose speeds are how the work of these rollouts should be split, fixed costs considered."""
    if knobs.speeds is None or not any(knobs.overhead) or not picked.size:
        return knobs
    cap = knobs.max_tokens_per_micro_batch
    number = 1 if cap is None else -(-int(waiting.lengths[picked].sum()) // (cap * knobs.num_ranks))
    number = -(-number // knobs.micro_batch_multiple) * knobs.micro_batch_multiple
    return replace(knobs, speeds=work_rates(knobs.speeds, knobs.overhead, float(waiting.costs[picked].sum()), number))


def choose_batch(waiting: Waiting, knobs: PlanKnobs, *, num_rollouts: int) -> Bools:
    """[W] who would go: `plan_batch` without the ranks, and without the exchange that follows from them.
    O(W log W)."""
    units = _Units.of(waiting, knobs)
    _, go = _select(waiting, units, knobs, min(num_rollouts, knobs.batch_size))
    return go[units.unit_of]


def _shares(
    waiting: Waiting, knobs: PlanKnobs, units: _Units, chosen: Bools, fixed: Bools, step: int
) -> list[list[Ints]]:
    """[rank][micro_batch] -> positions."""
    picked = np.flatnonzero(chosen)
    costs = waiting.costs[picked]
    together = units.unit_of[picked] if knobs.groups == "same_rank" else None
    if _one_each(knobs):
        if together is not None:
            whole = partition_together(costs, together, knobs.num_ranks, knobs.counts, knobs.speeds, rotation=step)
            return [[picked[share]] if share.size else [] for share in whole]
        parts = partition(costs, knobs.num_ranks, knobs.counts, knobs.speeds, rotation=step, tolerance=knobs.tolerance)
        shares = [[picked[part]] if part.size else [] for part in parts]
        return _exchanged(waiting, knobs, shares, chosen, fixed)
    order: Order = "pipeline" if knobs.pipeline_order else "heaviest_first"
    formed = form_micro_batches(
        waiting.lengths[picked],
        costs,
        knobs.num_ranks,
        max_tokens=knobs.max_tokens_per_micro_batch,
        sync=knobs.sync,
        counts=knobs.counts,
        padded=knobs.padded,
        multiple_of=knobs.micro_batch_multiple,
        order=order,
        speeds=knobs.speeds,
        keep_together=together,
        oversize=knobs.oversize,
        rotation=step,
    )
    shares = [[picked[one] for one in share] for share in formed]
    if knobs.padded or knobs.sync == "micro_batch":  # there, not the sums decide
        return shares
    exchanged = _exchanged(waiting, knobs, shares, chosen, fixed)
    if exchanged is shares:
        return shares
    return [in_order(share, lambda one: float(waiting.costs[one].sum()), order) for share in exchanged]


def _exchanged(
    waiting: Waiting, knobs: PlanKnobs, shares: list[list[Ints]], chosen: Bools, fixed: Bools
) -> list[list[Ints]]:
    """The shares after the exchange with the window, where rollouts may be chosen one by one."""
    if knobs.groups != "free" or not all(shares):
        return shares
    return exchange_with_waiting(
        waiting.costs,
        shares,
        fixed,
        np.flatnonzero(~chosen),
        knobs.speeds,
        waiting.lengths,
        knobs.max_tokens_per_micro_batch,
    )


def _one_each(knobs: PlanKnobs) -> bool:
    """Every rank's share is one micro-batch."""
    return knobs.max_tokens_per_micro_batch is None and knobs.micro_batch_multiple == 1 and not knobs.padded


def _finish(waiting: Waiting, knobs: PlanKnobs, shares: list[list[Ints]]) -> Plan:
    """The plan with its figures."""
    everything = [one for share in shares for one in share]
    picked = np.concatenate(everything) if everything else np.empty(0, dtype=np.int64)
    loads = loads_of(waiting.costs, shares)
    rate = np.ones(knobs.num_ranks) if knobs.speeds is None else np.asarray(knobs.speeds, dtype=np.float64)
    bound = lower_bound(waiting.costs[picked], knobs.num_ranks, knobs.counts, knobs.speeds)
    mean = float(loads.sum() / rate.sum())
    finish = float((loads / rate).max())
    flagged = waiting.groups[picked][~waiting.group_complete[picked]]
    if knobs.groups != "free":  # so are the pieces of a group that no batch can hold
        left = np.delete(waiting.groups, picked)
        flagged = np.concatenate((flagged, np.intersect1d(waiting.groups[picked], left)))
    return Plan(
        ranks=shares,
        loads=loads,
        rates=knobs.speeds,
        lower_bound=bound,
        incomplete_groups=tuple(int(label) for label in np.unique(flagged) if label >= 0),
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
    peaks: Floats
    """[U] the heaviest rollout of each."""
    slack: int
    """Rollouts by which a full batch may fall short of batch_size because units are chosen whole."""

    @staticmethod
    def of(waiting: Waiting, knobs: PlanKnobs) -> _Units:
        num_waiting = waiting.costs.size
        unit_of = np.arange(num_waiting)
        if knobs.groups != "free" and bool((waiting.groups >= 0).any()):
            labels = np.where(waiting.groups >= 0, waiting.groups, waiting.groups.max() + 1 + unit_of)
            unit_of = _by_first_member(_in_pieces(labels, knobs.batch_size))
        num_units = int(unit_of.max(initial=-1)) + 1
        sizes = np.bincount(unit_of, minlength=num_units)
        peaks = np.zeros(num_units)
        np.maximum.at(peaks, unit_of, waiting.costs)
        patience = _UNBOUNDED if knobs.max_skips is None else min(knobs.max_skips, _UNBOUNDED)
        remaining = np.full(num_units, patience, dtype=np.int64)
        np.minimum.at(remaining, unit_of, np.maximum(patience - waiting.skips, 0))
        due = np.zeros(num_units, dtype=np.bool_)
        due[unit_of[waiting.due]] = True
        ready = np.ones(num_units, dtype=np.bool_)
        if knobs.groups != "free":
            ready[unit_of[~waiting.group_complete]] = False
        due |= remaining == 0
        largest_group = 1 if knobs.groups == "free" or knobs.group_size is None else knobs.group_size
        return _Units(
            unit_of=unit_of,
            sizes=sizes,
            costs=np.bincount(unit_of, weights=waiting.costs, minlength=num_units).astype(np.float64),
            remaining=remaining,
            due=due,
            ready=ready | due,
            peaks=peaks,
            slack=min(max(int(sizes.max(initial=1)), largest_group), knobs.batch_size) - 1,
        )


def _by_first_member(labels: Ints) -> Ints:
    """Labels renumbered 0, 1, ... in the order of their first appearance. O(W log W)."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    by_age = np.empty(first.size, dtype=np.int64)
    by_age[np.argsort(first, kind="stable")] = np.arange(first.size)
    return by_age[inverse]


def _in_pieces(labels: Ints, limit: int) -> Ints:
    """A group larger than a batch cannot go in one batch: it is cut, oldest first, into pieces that can. O(W log W)."""
    order = np.argsort(labels, kind="stable")
    _, sizes = np.unique(labels, return_counts=True)
    if int(sizes.max(initial=0)) <= limit:
        return labels
    place = np.empty(labels.size, dtype=np.int64)
    place[order] = np.arange(labels.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return labels * (labels.size // limit + 1) + place // limit


def _select(waiting: Waiting, units: _Units, knobs: PlanKnobs, num_rollouts: int) -> tuple[Bools, Bools]:
    """-> ([U] goes in any case, [U] goes)."""
    num_units = units.sizes.size
    must = np.zeros(num_units, dtype=np.bool_)
    room = num_rollouts
    forced = _forced(units, knobs)
    for wanted in (forced, units.due & ~forced):  # the guarantee first, then what is due; each earliest deadline first
        candidates = np.flatnonzero(wanted)
        candidates = candidates[np.lexsort((candidates, units.remaining[candidates]))]
        room -= _take(must, candidates, units.sizes, room)
    others = np.flatnonzero(units.ready & ~must)
    if room == 0 or others.size == 0:
        return must, must
    # nearly always there is one size only; else the one that most rollouts belong to, and the others fill up
    size = int(np.bincount(units.sizes[others], weights=units.sizes[others]).argmax())
    alike = others[units.sizes[others] == size]
    field = np.sort(np.concatenate((np.flatnonzero(must), alike)))
    ranks = knobs.num_ranks
    rate = np.ones(ranks) if knobs.speeds is None else np.asarray(knobs.speeds, dtype=np.float64)
    go = np.zeros(num_units, dtype=np.bool_)
    num_more = min(room // size, alike.size)
    num_rows = _num_rows(waiting, knobs, num_rollouts)
    if num_rows > 1 and size == 1 and field.size == int(units.sizes[field].sum()) > num_rollouts > num_rows:
        go[field] = choose_rows(
            units.costs[field], must[field], units.remaining[field], num_rollouts, knobs.num_ranks, num_rows
        )
        return must, go
    peaks = (units.costs if knobs.groups == "same_rank" else units.peaks)[field]
    go[field] = choose(
        units.costs[field],
        peaks,
        must[field],
        units.remaining[field],
        num_more,
        float(rate.sum() / rate.max()),
        _company(units, field, knobs, num_rollouts),
    )
    room = num_rollouts - int(units.sizes[go].sum())
    if room:
        _take(go, others[~go[others]], units.sizes, room)
    return must, go


def _num_rows(waiting: Waiting, knobs: PlanKnobs, num_rollouts: int) -> int:
    """Micro-batches per rank to expect; 1 where rows do not matter."""
    if not (knobs.padded or knobs.sync == "micro_batch"):
        return 1
    number = 1
    if knobs.max_tokens_per_micro_batch is not None:
        expected = float(waiting.lengths.mean()) * num_rollouts
        number = int(np.ceil(expected / (knobs.num_ranks * knobs.max_tokens_per_micro_batch)))
    return -(-number // knobs.micro_batch_multiple) * knobs.micro_batch_multiple


def _company(units: _Units, field: Ints, knobs: PlanKnobs, num_rollouts: int) -> float:
    """Equal counts: the least work that the rollouts beside an outlier bring along; they are taken to be light ones."""
    if knobs.counts == "free":
        return 0.0
    each = np.sort(units.costs[field] / units.sizes[field])
    beside = num_rollouts // knobs.num_ranks - 1
    return max(beside, 0) * float(each[: max(1, each.size // _LIGHT_SHARE)].mean())


def _take(go: Bools, candidates: Ints, sizes: Ints, room: int) -> int:
    """Mark candidates, in this order, while they fit. -> rollouts marked."""
    fitting = np.cumsum(sizes[candidates])
    enough = int(np.searchsorted(fitting, room, side="right"))
    go[candidates[:enough]] = True
    taken = int(fitting[enough - 1]) if enough else 0
    for unit in candidates[enough:].tolist():  # only where sizes differ: a smaller one may still fit
        if taken == room:
            break
        if sizes[unit] <= room - taken:
            go[unit] = True
            taken += int(sizes[unit])
    return taken


def _forced(units: _Units, knobs: PlanKnobs) -> Bools:
    """Units that must go so that nobody is ever passed over by more than max_skips dispatches.

    Of the units with at most j skips left, at most j * batch_size rollouts may stay behind: the next j dispatches take
    them (earliest deadline first: Liu and Layland 1973; proof in docs/planning.md). From j = ready / batch_size on that
    is all of them: O(W), however large max_skips is.
    """
    forced = np.zeros(units.sizes.size, dtype=np.bool_)
    sent = knobs.batch_size - units.slack
    ready = np.flatnonzero(units.ready)  # an incomplete group's patience starts when it is complete
    soon = ready[units.remaining[ready] <= int(units.sizes[ready].sum()) // sent]
    waiting_by_deadline = np.cumsum(np.bincount(units.remaining[soon], weights=units.sizes[soon], minlength=1))
    taken = 0  # rollouts forced so far; all of them have at most j skips left
    for j in range(waiting_by_deadline.size):
        need = int(waiting_by_deadline[j]) - j * sent - taken
        if need <= 0:
            continue
        candidates = np.flatnonzero(units.ready & (units.remaining <= j) & ~forced)
        candidates = candidates[np.argsort(~units.due[candidates], kind="stable")]  # if one must, then one that is due
        enough = int(np.searchsorted(np.cumsum(units.sizes[candidates]), need)) + 1
        forced[candidates[:enough]] = True
        taken += int(units.sizes[candidates[:enough]].sum())
    return forced


def smallest_max_skips(window: int, batch_size: int, capacity: int, group_size: int = 1) -> int:
    """The least `max_skips` for which the skip guarantee is a theorem and the window is of use.

    The guarantee needs capacity <= (max_skips + 1) * (batch_size - group_size + 1), where group_size is 1 unless groups
    stay together; usefulness needs max_skips >= 3 * (window / batch_size - 1), else everything is always due and
    nothing is left to choose.
    """
    sent = max(batch_size - group_size + 1, 1)
    guarantee = -(-capacity // sent) - 1
    useful = -(-3 * (window - batch_size) // batch_size)
    return max(guarantee, useful, 0)
