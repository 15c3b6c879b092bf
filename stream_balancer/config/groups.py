"""Groups of knobs: values of a :class:`BalancerConfig` that belong together, for those who need them."""

from __future__ import annotations

import sys
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from stream_balancer.config.values import Count, Values
from stream_balancer.planning.arrays import Oversize
from stream_balancer.planning.plan import Keep

Amount: TypeAlias = Annotated[float, Meta(ge=0, le=sys.float_info.max, description="a finite number >= 0")]
Range: TypeAlias = Annotated[
    tuple[Count, Count], Meta(description="two ints >= 1, the least and the most rollouts, as in (16, 64)")
]


class MicroBatches(metaclass=Values):
    """How the rollouts of a rank are cut into micro-batches."""

    max_tokens: Count | None = None
    """Hard cap on the tokens of a micro-batch, never exceeded (padding counts under a padded cost). None = one
    micro-batch."""
    equal_number: bool = True
    """True: every rank runs the same number of micro-batches. False: each rank runs its own number, which needs
    ``sync="step"`` and gives fewer padding copies and less ``overhead_cost``."""
    multiple_of: Count = 1
    """The number of micro-batches is a multiple of this (virtual pipeline stages)."""
    overhead_cost: Amount | None = None
    """Work of a micro-batch beside that of its rollouts (launching kernels, reading the weights), in the cost model's
    unit. One more micro-batch a rank is taken where it saves more by balance. None = what a
    ``CalibratedCost`` has learned; 0 with any other cost."""
    oversize: Oversize = "refuse"
    """A rollout above ``max_tokens`` is refused at put, or goes in a micro-batch "alone"."""


class Groups(metaclass=Values):
    """Groups of siblings (GRPO): rollouts of one prompt, which a ``group_id`` names."""

    size: Count | None = None
    """Siblings per group: executions, each a rollout or all with one ``execution_id``. Every rollout must have a group
    then, unless they are kept "free". None = groups play no part."""
    min_size: Count | None = None
    """A group may leave with so many siblings, at least half of ``size``, once the others are stragglers: those that
    come later are evicted as "late", and ``statistics().length_bias`` says what that does to lengths. ``accept=`` is
    not asked about such a group. None = it waits for all."""
    patience: Amount = 2.0
    """Stragglers are those that take so many times as long as half of the group took, since its ``expect_group()`` or
    its first rollout. 0 = as soon as ``min_size`` have come. Only with ``min_size``."""
    keep: Keep = "same_batch"
    """Siblings leave in the "same_batch", on the "same_rank" (costs balance), or "free". Only with ``size``."""

    @property
    def kept(self) -> int | None:
        """Siblings that a group must have before it may leave; None where groups play no part."""
        return None if self.keep == "free" else self.size


class Staleness(metaclass=Values):
    """How many policy versions old a rollout may be when it is trained on."""

    max_versions: Annotated[int, Meta(ge=0, description="an int >= 0")] | None = None
    """Most policy versions a rollout may lie behind *when it is trained on*. One leaves only if that holds though
    every batch before it, which the trainer is not through with, makes a version; one that cannot wait for another
    batch is due. None = no bound. See docs/staleness.md for what this assumes."""
    on_stale: Literal["evict", "send"] = "evict"
    """A rollout beyond ``max_versions`` is evicted (counted, and given to ``on_evict``), or sent all the same."""


class Limits(metaclass=Values):
    """Limits of what may wait, beside ``capacity``, which is one of rollouts."""

    tokens: Count | None = None
    """``put()`` waits once rollouts of this many tokens could leave. Default ``2 * step_size.window_tokens``; with a
    ``window`` in rollouts under ``step_size.tokens`` as many as ``max_skips`` allows; else None = no such limit."""
    bytes: Count | None = None
    """``put()`` waits once the tensors of waiting rollouts are this many bytes. None = no such limit. While a put is
    held back by any limit, the window counts as full; while fewer than ``min_batch_size`` could leave, no limit holds a
    put back."""


class StepSize(metaclass=Values):
    """Steps of another size than ``batch_size`` rollouts, and steps in several parts."""

    tokens: Count | None = None
    """Tokens per step, instead of ``batch_size``. So many rollouts (or whole groups) go that their tokens come
    nearest to this. More go where ``max_skips`` demands it, or where some rank would get none. See
    docs/planning.md for what it costs."""
    window_tokens: Count | None = None
    """Under ``tokens``, instead of ``window``: dispatch once this many tokens wait. Default ``2 * tokens`` if no
    ``window`` is given."""
    rollouts: Range | None = None
    """Least and most rollouts per step, ``(16, 64)`` for example. A step that is long because of an outlier takes
    more rollouts, so that all ranks have work, and later steps take fewer until the mean is ``batch_size`` again. What
    a loss divides by varies with it: see docs/planning.md. None = ``batch_size`` every time."""
    mini_batches: Count = 1
    """Mini-batches of a step, each with an optimizer step and denominators of its own (PPO). See
    :attr:`RankBatch.mini_batches`. Each has ``batch_size / mini_batches`` rollouts, and as many micro-batches on every
    rank. Samples of an execution stay together in one; so do groups on the "same_rank". A step of too few rollouts for
    all ranks in so many has fewer."""
