"""A step that begins before it is complete: which rollouts leave in its next row, and what has left. Pure.

A row is micro-batches for all ranks, at least one rollout for each. Example, 2 ranks, 6 rollouts a step::

    a b c d wait, lengths 9 1 5 2       row 0: a, c         (the heaviest: there is work for everybody)
    b d, and e f have come              row 1: b d e f      (the step is complete: all that is left of it)

Rollouts of a row go on waiting in the buffer until the last row leaves. Then all of them leave as one batch, which is
in flight, written to the journal, acknowledged and given again as any other. A step that is left in the middle, by a
crash or by another iterator, is forgotten here, and its rollouts are there to be given again from the first row on:
gradients of half a step are nowhere, either.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from stream_balancer.config import BalancerConfig
from stream_balancer.core.buffer import NO_ROWS, Buffer
from stream_balancer.errors import ConfigError
from stream_balancer.planning import Plan
from stream_balancer.planning.arrays import Bools, Floats, Ints
from stream_balancer.types import Batch


class OpenStep:
    """Rollouts that have left of the step under way; nothing, between two steps."""

    def __init__(self, config: BalancerConfig) -> None:
        """Raises ConfigError for knobs that rows cannot respect."""
        check_open(config)
        self.rows: list[Batch] = []
        """Rows that have left."""
        self.loads: Floats = np.zeros(config.dp_size)
        """[rank] work of these."""
        self.num_taken = 0
        """Rollouts that have left in rows."""
        self.waited_s = 0.0
        """Seconds that somebody has waited for its rows."""

    def choose(self, config: BalancerConfig, buffer: Buffer, may: Bools, *, complete: bool) -> Ints:
        """Rows of the buffer that leave next; ``may`` [n] could. Not ``complete``: the heaviest of those that the step
        has room for, enough for every rank; none if these are too few. ``complete``: all that the step has room for,
        oldest first. Groups are whole, but for those that no step has room for. O(n log n)."""
        # oldest first, whatever they cost: who waits longest must not be passed over by every step
        room, going = config.batch_size - self.num_taken, []
        for unit in _units(np.flatnonzero(may & ~buffer.taken), buffer.labels):
            # a group that can never leave whole
            if unit.size > config.batch_size:
                unit = unit[:room]
            if 0 < unit.size <= room:
                going.append(unit)
                room -= unit.size
        if not complete:
            # heavy ones first: what is left for the end of the step is light, and balances what came before
            going.sort(key=lambda unit: -float(buffer.costs[unit].sum()))
            enough = np.flatnonzero(np.cumsum([unit.size for unit in going]) >= least_rollouts(config))
            going = going[: enough[0] + 1] if enough.size else []
        return np.concatenate([NO_ROWS, *going])

    def spread(self, plan: Plan) -> Plan:
        """The plan of a row, its heaviest share on the rank that has had the least work in the step."""
        # made for these ranks, one by one
        if plan.rates is not None or plan.degrees:
            return plan
        share_of = np.empty(self.loads.size, dtype=np.int64)
        share_of[np.argsort(self.loads, kind="stable")] = np.argsort(-plan.loads, kind="stable")
        return replace(plan, ranks=[plan.ranks[share] for share in share_of], loads=plan.loads[share_of])

    def add(self, row: Batch) -> None:
        """A row leaves. O(ranks)."""
        self.rows.append(row)
        self.loads += row.loads
        self.num_taken += row.num_rollouts

    @property
    def num_padding(self) -> int:
        """Padding copies in the rows that have left. O(rows)."""
        return sum(row.num_padding for row in self.rows)


def least_rollouts(config: BalancerConfig) -> int:
    """Least rollouts of a row before the last: one for every micro-batch that every rank must have."""
    return config.dp_size * config.micro_batches.multiple_of


def _units(rows: Ints, labels: Ints) -> list[Ints]:
    """The siblings of a group together, others alone; oldest first."""
    names = np.where(labels[rows] >= 0, labels[rows], -1 - rows)
    _, first, sizes = np.unique(names, return_index=True, return_counts=True)
    together = np.split(rows[np.argsort(names, kind="stable")], np.cumsum(sizes)[:-1]) if rows.size else []
    return [together[number] for number in np.argsort(first)]


def check_open(config: BalancerConfig) -> None:
    """Raise ConfigError for knobs that a step in rows cannot respect."""
    nothing_waits, window = "nothing waits to be chosen from", f"Give window={config.batch_size}"
    size, leave_out = config.step_size, "Leave it out"
    batch_size = f"Give batch_size={config.batch_size // size.mini_batches}"
    refused = [
        ("window", config.window != config.batch_size, nothing_waits, window),
        ("window='auto'", bool(config.auto_windows), nothing_waits, window),
        ("step_size.tokens", size.tokens is not None, "a step's rollouts are counted when it begins", leave_out),
        ("step_size.rollouts", size.rollouts is not None, "a step has batch_size rollouts", leave_out),
        # its denominators are known with its last row, and the policy moves then: nothing would be left of the step
        ("step_size.mini_batches", size.mini_batches > 1, "a mini-batch in rows is a step by itself", batch_size),
        ("groups.keep='same_rank'", config.groups.keep == "same_rank", "a row has too few groups for that", leave_out),
        ("stratum_shares", bool(config.stratum_shares), "a step has its oldest rollouts, whatever they are", leave_out),
    ]
    for name, is_given, why, instead in refused:
        if is_given:
            raise ConfigError(
                f"batches(open=True) cannot have {name}: rows leave as they form, and {why}. {instead}, or iterate "
                "batches()"
            )
