"""Selection of the rollouts that go now: which of those that wait make the next batch.

    must go    due rollouts, and as many more as the skip guarantee needs
    may go     first in, first out, while that balances; outliers wait, then go together (outliers.py), where ranks
               meet at every micro-batch as many as ranks (lockstep_choice.py)

What is chosen is a unit: a rollout, or a whole group where siblings stay together. Pure;
bench/results/planning_proofs.md has the proof of the guarantee.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .arrays import Bools, Floats, Ints, rounded_up
from .cost_order import CostOrder
from .lockstep_choice import CappedStep, choose_lockstep, choose_neighbours
from .outliers import Candidates, choose
from .plan import PlanKnobs, Waiting

_ROOM = 0.95
"""How full of tokens one micro-batch on every rank can be packed, more or less."""

_UNBOUNDED = 2**62
"""More skips than any run has steps: ``max_skips=None``."""


@dataclass(frozen=True, slots=True)
class Units:
    """Rollouts, or whole groups where siblings stay together; in order of their oldest member."""

    unit_of: Ints | None
    """[W] unit of each waiting rollout; None: each is a unit of its own."""
    sizes: Ints
    """[U] rollouts."""
    costs: Floats
    """[U] summed cost."""
    remaining: Ints
    """[U] steps that may still leave it behind; 0 = must go now."""
    due: Bools
    """[U] a member is due."""
    ready: Bools
    """[U] complete, or going anyway."""
    peaks: Floats
    """[U] the heaviest rollout of each."""
    sent: int
    """Rollouts that a full batch takes for sure."""
    order: CostOrder
    """Order of the units by cost."""

    @staticmethod
    def of(waiting: Waiting, knobs: PlanKnobs) -> Units:
        patience = _UNBOUNDED if knobs.max_skips is None else min(knobs.max_skips, _UNBOUNDED)
        remaining = np.maximum(patience - waiting.skips, 0)  # [W]
        due = waiting.due | (remaining == 0)
        size = waiting.costs.size
        each = Units(
            unit_of=None,
            sizes=np.ones(size, dtype=np.int64),
            costs=waiting.costs,
            remaining=remaining,
            due=due,
            ready=waiting.group_complete | due if knobs.whole_groups else np.ones_like(due),
            peaks=waiting.costs,
            sent=_sent(1, knobs),
            order=waiting.order or CostOrder(waiting.costs),
        )
        if not knobs.whole_groups or not bool((waiting.groups >= 0).any()):
            return each
        # [W] a rollout without a group is one by itself: a label of its own, above all that are taken
        labels = np.where(waiting.groups >= 0, waiting.groups, waiting.groups.max() + 1 + np.arange(size))
        # numbered by arrival, so that "the oldest units" are the first ones, as with single rollouts
        unit_of = _by_first_member(_in_pieces(labels, knobs.batch_size))
        members = np.argsort(unit_of, kind="stable")  # unit after unit, the oldest of each first
        first = np.flatnonzero(np.diff(unit_of[members], prepend=-1))
        sizes = np.diff(first, append=size)
        costs = np.add.reduceat(waiting.costs[members], first)
        # one member that is due takes its siblings along
        due = np.logical_or.reduceat(due[members], first)
        return Units(
            unit_of=unit_of,
            sizes=sizes,
            costs=costs,
            # a group must go when the first of its members must
            remaining=np.minimum.reduceat(remaining[members], first),
            due=due,
            # an incomplete group waits for siblings, unless it is due
            ready=np.logical_and.reduceat(waiting.group_complete[members], first) | due,
            peaks=np.maximum.reduceat(waiting.costs[members], first),
            sent=_sent(int(sizes.max()), knobs),
            order=CostOrder(costs),
        )

    def of_rollouts(self, units: Bools) -> Bools:
        """[U] -> [W]: what holds for a unit holds for its rollouts."""
        return units if self.unit_of is None else units[self.unit_of]

    def common_size(self, some: Bools) -> int:
        """The size that most rollouts of these ([U], at least one) belong to."""
        return int(np.bincount(self.sizes[some], weights=self.sizes[some]).argmax())


def _sent(largest_unit: int, knobs: PlanKnobs) -> int:
    largest_group = knobs.group_size or 1
    # units are taken whole, so one less than the largest may be missing
    return knobs.batch_size - min(max(largest_unit, largest_group), knobs.batch_size) + 1


def _by_first_member(labels: Ints) -> Ints:
    """Labels renumbered 0, 1, ... in the order of their first appearance. O(W log W)."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    new_label = np.empty(first.size, dtype=np.int64)
    new_label[np.argsort(first, kind="stable")] = np.arange(first.size)
    return new_label[inverse]


def _in_pieces(labels: Ints, limit: int) -> Ints:
    """A group larger than a batch cannot go in one batch: it is cut, oldest first, into pieces that can. O(W log W)."""
    order = np.argsort(labels, kind="stable")
    _, sizes = np.unique(labels, return_counts=True)
    if int(sizes.max(initial=0)) <= limit:
        return labels
    place = np.empty(labels.size, dtype=np.int64)
    # [W] how many of its group are older: np.repeat gives each the start of its group
    place[order] = np.arange(labels.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return labels * (labels.size // limit + 1) + place // limit


def select(waiting: Waiting, units: Units, knobs: PlanKnobs, num_rollouts: int) -> tuple[Bools, Bools]:
    """-> ([U] must go, [U] goes: those that must, and the units that make the best step with them)."""
    must = _must_go(units, num_rollouts)
    room = num_rollouts - int(units.sizes[must].sum())
    others = units.ready & ~must
    if room == 0 or not others.any():
        return must, must
    # choices count units, so they must be of one size: nearly always they are, else the size that most rollouts belong
    # to, and the others fill up
    size = 1 if units.unit_of is None else units.common_size(others)
    candidates = must | (others & (units.sizes == size))
    # nearly always everybody is a candidate: then the columns, and their order, are taken as they are
    everybody = bool(candidates.all())
    among = slice(None) if everybody else candidates
    order = units.order if everybody else units.order.among(candidates)
    costs, going, remaining = order.costs, must[among], units.remaining[among]
    go, chosen, cap, tokens = np.zeros_like(must), None, knobs.max_tokens_per_micro_batch, None
    if units.sizes.size == waiting.costs.size and costs.size > num_rollouts:  # each is one rollout
        chosen = _in_lockstep(waiting.lengths[among], knobs, num_rollouts, order, going, remaining)
        if knobs.sync == "micro_batch" and cap is not None and not knobs.padded:
            tokens = np.minimum(waiting.lengths[among], cap)
    if chosen is None:
        candidates_of_one_size = Candidates(
            order=order,
            parts=costs if units.unit_of is None else units.peaks[among],
            must=going,
            remaining=remaining,
            num_more=min(room // size, int(np.count_nonzero(~going))),
            ranks=knobs.dp_size,
            beside=0.0 if knobs.counts == "free" else max(num_rollouts // knobs.dp_size - 1, 0) / size,
            tokens=tokens,
            room=_ROOM * knobs.dp_size * (cap or 0),
        )
        chosen = choose(candidates_of_one_size)
    go[among] = chosen
    room = num_rollouts - int(units.sizes[go].sum())
    if room:
        _take(go, np.flatnonzero(others & ~go), units.sizes, room)
    return must, go


def _must_go(units: Units, num_rollouts: int) -> Bools:
    """[U] what the guarantee demands, then what is due, each earliest deadline first, as far as they fit."""
    must = np.zeros(units.sizes.size, dtype=np.bool_)
    room = num_rollouts
    forced = _forced_units(units)
    for wanted in (forced, units.due & ~forced):
        in_order = np.flatnonzero(wanted)
        in_order = in_order[np.lexsort((in_order, units.remaining[in_order]))]
        room -= _take(must, in_order, units.sizes, room)
    return must


def _in_lockstep(
    lengths: Ints, knobs: PlanKnobs, num_rollouts: int, order: CostOrder, must: Bools, remaining: Ints
) -> Bools | None:
    """[n] which of these single rollouts go, where it is the micro-batches that decide; None where it is the sums of
    the ranks: these meet once a step, or one micro-batch holds a rank's share, or enough rollouts to even it out."""
    if not (knobs.padded or knobs.sync == "micro_batch"):
        return None
    # as many micro-batches as a step of mean lengths needs: who goes is not known yet
    cap, number = knobs.max_tokens_per_micro_batch, 1
    if cap is not None:
        number = int(np.ceil(float(lengths.mean()) * num_rollouts / (knobs.dp_size * cap)))
        if number > 1 and not knobs.padded:
            return choose_lockstep(
                CappedStep(
                    order=order,
                    tokens=np.minimum(lengths, cap),
                    must=must,
                    remaining=remaining,
                    num_rollouts=num_rollouts,
                    dp_size=knobs.dp_size,
                    max_tokens=cap,
                )
            )
    number = rounded_up(number, knobs.micro_batch_multiple)
    alone = num_rollouts < 2 * knobs.dp_size * number  # most rollouts have a micro-batch of their own
    if not number < num_rollouts or number == 1 or not (knobs.padded or alone):
        return None
    return choose_neighbours(order, must, remaining, num_rollouts, knobs.dp_size, number)


def _take(go: Bools, candidates: Ints, sizes: Ints, room: int) -> int:
    """Mark candidates, in this order, while they fit. -> rollouts marked."""
    # [candidates] rollouts of all up to this one
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


def _forced_units(units: Units) -> Bools:
    """[U] must go so that nobody is ever passed over by more than max_skips steps.

    Of the units with at most j skips left, at most j batches may stay behind: the next j steps take them (earliest
    deadline first: Liu and Layland 1973; proof in bench/results/planning_proofs.md). From j = waiting / batch on that
    is all of them: O(W), however large max_skips is.
    """
    sizes, sent = units.sizes, units.sent
    forced = np.zeros(sizes.size, dtype=np.bool_)
    ready = units.ready  # an incomplete group's patience starts when it is complete
    soon = np.flatnonzero(ready & (units.remaining <= int(sizes.sum()) // sent))
    if not soon.size:
        return forced
    # [j] what has at most j skips left; a bincount of the skips, summed up
    waiting_by_deadline = np.cumsum(np.bincount(units.remaining[soon], weights=sizes[soon], minlength=1))
    taken = 0  # how much is forced so far; all of them have at most j skips left
    for j in range(waiting_by_deadline.size):
        # more than a batch only where more waits than the guarantee is for: then as many as a batch takes
        need = min(int(waiting_by_deadline[j]) - j * sent, sent) - taken
        if need <= 0:
            continue
        candidates = np.flatnonzero(ready & (units.remaining <= j) & ~forced)
        candidates = candidates[np.argsort(~units.due[candidates], kind="stable")]  # if one must, then one that is due
        enough = int(np.searchsorted(np.cumsum(sizes[candidates]), need)) + 1
        forced[candidates[:enough]] = True
        taken += int(sizes[candidates[:enough]].sum())
    return forced


def smallest_max_skips(window: int, batch_size: int, capacity: int, group_size: int = 1) -> int:
    """The least `max_skips` for which the skip guarantee is a theorem and the window is of use.

    The guarantee needs capacity <= (max_skips + 1) * (batch_size - group_size + 1), where group_size is 1 unless
    groups stay together; usefulness needs
    max_skips >= 3 * (window / batch_size - 1), else everything is always due and nothing is left to choose.

    Examples:
        >>> smallest_max_skips(window=64, batch_size=32, capacity=128)
        3
        >>> smallest_max_skips(window=128, batch_size=32, capacity=256)
        9
        >>> smallest_max_skips(window=64, batch_size=32, capacity=128, group_size=8)  # whole groups: 25 go for sure
        5
    """
    sent = most_for_max_skips(0, batch_size, group_size)
    guarantee = -(-capacity // sent) - 1
    useful = -(-3 * (window - batch_size) // batch_size)
    return max(guarantee, useful, 0)


def most_for_max_skips(max_skips: int, batch_size: int, group_size: int = 1) -> int:
    """Rollouts that may wait at once so that the skip guarantee is a theorem; see `smallest_max_skips`.

    Examples:
        >>> most_for_max_skips(16, batch_size=32), most_for_max_skips(16, batch_size=32, group_size=8)
        (544, 425)
    """
    return (max_skips + 1) * max(batch_size - group_size + 1, 1)
