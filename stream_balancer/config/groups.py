"""Groups of knobs: values of a :class:`BalancerConfig` that belong together, for those who need them."""

from __future__ import annotations

import sys
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from stream_balancer.config.values import Count, Values
from stream_balancer.planning.arrays import Counts, Order, Oversize

Amount: TypeAlias = Annotated[float, Meta(ge=0, le=sys.float_info.max, description="a finite number >= 0")]
Sizes: TypeAlias = Annotated[
    tuple[Count, ...],
    Meta(min_length=1, description="powers of two in ascending order, beginning with 1, as in (1, 2, 4, 8)"),
]


class MicroBatches(metaclass=Values):
    """How the rollouts of a rank are cut into micro-batches."""

    max_tokens: Count | None = None
    """Hard cap on the tokens of a micro-batch, never exceeded (padding counts under a padded cost). None = one
    micro-batch."""
    counts: Counts = "equal"
    """"equal": as many micro-batches on every rank. "free": each rank its own number, where ranks meet once per step
    (DDP with ``no_sync``, HSDP): fewer padding copies, less ``overhead_cost``."""
    multiple_of: Count = 1
    """The number of micro-batches is a multiple of this (virtual pipeline stages)."""
    order: Order = "heaviest_first"
    """"heaviest_first" shows an out-of-memory at once; "pipeline" puts smaller micro-batches at both ends."""
    overhead_cost: Amount | None = None
    """Work of a micro-batch beside that of its rollouts (launching kernels, reading the weights), in the cost model's
    unit. One more micro-batch a rank is taken where it saves more by balance. None = what a
    ``CalibratedCost`` has learned; 0 with any other cost."""
    oversize: Oversize = "refuse"
    """A rollout above ``max_tokens``, if not even sharing it by ``context_parallel`` keeps it below, is refused at put,
    or goes in a micro-batch "alone"."""


class Groups(metaclass=Values):
    """Groups of siblings (GRPO): rollouts of one prompt, which a ``group_id`` names."""

    size: Count | None = None
    """Siblings per group: executions, each a rollout or all with one ``execution_id``. Every rollout must have a group
    then, and the siblings of a group leave in one batch. None = groups play no part."""
    min_size: Count | None = None
    """A group may leave with so many siblings, at least half of ``size``, once the others are stragglers: those that
    come later are evicted as "late", and ``statistics().length_bias`` says what that does to lengths. ``accept=`` is
    not asked about such a group. None = it waits for all."""
    patience: Amount = 2.0
    """Stragglers are those that take so many times as long as half of the group took, since its ``expect_group()`` or
    its first rollout. 0 = as soon as ``min_size`` have come. Only with ``min_size``."""
    share_prefixes: bool = False
    """The trainer computes the prefix of siblings (``Rollout.prefix``: their prompt) once for those of a micro-batch.
    :meth:`MicroBatch.tree` lays them out. Then it is planned and counted so: a group is split over ranks where that
    is worth another copy of its prefix, and no batch takes longer than it would without sharing. A rollout
    that brings its own ``cost`` has no price for its prefix, and counts as it is. See docs/sharing.md."""


class Staleness(metaclass=Values):
    """How many policy versions old a rollout may be when it is trained on."""

    max_versions: Annotated[int, Meta(ge=0, description="an int >= 0")] | None = None
    """Most policy versions a rollout may lie behind *when it is trained on*. One leaves only if that holds though
    every batch before it, which the trainer is not through with, makes a version; one that cannot wait for another
    batch is due. None = no bound. See docs/staleness.md for what this assumes."""
    on_stale: Literal["evict", "send"] = "evict"
    """A rollout beyond ``max_versions`` is evicted (counted, and given to ``on_evict``), or sent all the same."""


class ContextParallel(metaclass=Values):
    """By how many ranks one rollout may be shared, each with a slice of its tokens."""

    sizes: Sizes = (1,)
    """By how many ranks a rollout may be shared, ``(1, 2, 4, 8)`` for example: powers of two, ascending, from 1. A
    rollout that is longer than a rank's fair share of the step goes to a block of so many neighbouring ranks. Sizes
    above ``dp_size`` are not used. ``(1,)`` = each rollout on one rank. See docs/planning.md."""
    overhead: Amount = 0.15
    """Price of sharing: a rollout of cost c on g ranks costs each ``c / g * (1 + overhead * log2(g))``."""
    min_tokens: Count = 2048
    """A rollout is shared by at most ``num_tokens / min_tokens`` ranks, or by so many as it takes to bring it within
    ``micro_batches.max_tokens``."""
