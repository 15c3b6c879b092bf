"""Groups of knobs: values of a :class:`BalancerConfig` that belong together."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from stream_balancer.config.values import Count, Knobs, checked
from stream_balancer.field_docs import documented
from stream_balancer.planning.arrays import Oversize

Amount: TypeAlias = Annotated[float, Meta(ge=0, le=sys.float_info.max, description="a finite number >= 0")]


@documented
@checked("micro_batches")
@dataclass(frozen=True, kw_only=True, repr=False)
class MicroBatches(Knobs):
    """How the rollouts of a rank are cut into micro-batches."""

    max_tokens: Count | None = None
    """Most tokens of a micro-batch, never exceeded; a padded cost counts the padding. Needs ``sync``. ``None`` = one
    micro-batch."""
    equal_number: bool = True
    """True: every rank runs the same number of micro-batches. False: ranks run different numbers, which needs
    ``sync="step"`` and gives fewer padding copies and less ``overhead_cost``."""
    multiple_of: Count = 1
    """The number of micro-batches is a multiple of this number (virtual pipeline stages)."""
    overhead_cost: Amount | None = None
    """Fixed work of a micro-batch (kernel launches, reading the weights), in the unit of the
    cost model. A rank gets one micro-batch more if the better balance saves more than this. ``None`` = the value that a
    ``CalibratedCost`` has learned; 0 with any other cost."""
    oversize: Oversize = "refuse"
    """``put`` refuses a rollout above ``max_tokens``, or the rollout gets a micro-batch "alone"."""


@documented
@checked("groups")
@dataclass(frozen=True, kw_only=True, repr=False)
class Groups(Knobs):
    """Groups of siblings (GRPO): rollouts of one prompt, which a ``group_id`` names."""

    size: Count | None = None
    """Siblings per group. Siblings leave in one batch, and every rollout must have a ``group_id``. Samples of one
    ``execution_id`` count as one sibling. ``None`` = groups play no part."""
    min_size: Count | None = None
    """A group may leave with this number of siblings, at least half of ``size``, once the missing siblings are
    stragglers. A straggler that comes later is evicted as "late"; ``statistics().length_bias`` reports the effect on
    lengths. ``accept=`` is not asked about such a group. ``None`` = a group waits for all siblings."""
    patience: Amount = 2.0
    """A sibling is a straggler after this number of times the time that half of the group took, counted from
    ``expect_group()`` or the first rollout. 0 = as soon as ``min_size`` siblings have come. Needs ``min_size``."""


@documented
@checked("staleness")
@dataclass(frozen=True, kw_only=True, repr=False)
class Staleness(Knobs):
    """How many policy versions old a rollout may be when it is trained on."""

    max_versions: Annotated[int, Meta(ge=0, description="an int >= 0")] | None = None
    """Most policy versions between a rollout and the weights *that train on it*. The balancer assumes that every batch
    in flight makes a version: a rollout leaves only if it is young enough then, and it is due if the next batch would
    be too late. ``None`` = no bound. See docs/staleness.md for the assumptions."""
    on_stale: Literal["evict", "send"] = "evict"
    """A rollout beyond ``max_versions`` is evicted (counted, and given to ``on_evict``), or sent all the same."""
