"""Knobs of a balancer: which exist, and what each may be. What follows from them is in ``figures`` and ``config``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from msgspec import Meta

from stream_balancer.config.groups import ContextParallel, Groups, MicroBatches, Staleness
from stream_balancer.config.values import Count, Group, Knob, Values
from stream_balancer.cost import CostModel, TokenCost
from stream_balancer.planning.arrays import Counts, Sync

Policy: TypeAlias = Literal["window", "fifo", "round_robin"]
Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=sys.float_info.max, description="a finite number of seconds > 0")]
if TYPE_CHECKING:
    Cost: TypeAlias = CostModel | str
else:
    Cost = Any  # msgspec knows no protocols: check_cost looks at it


TOKENS: Any = TokenCost()
DERIVED: Any = None  # a default that is computed from the other knobs
AUTO: Any = "auto"  # the same, for a knob whose None is a value: no bound


def _defaults(group: Values) -> Any:  # type checkers see a Knob at the field, where the group stands
    return group()


class Knobs(metaclass=Values):
    """The fields of a :class:`~stream_balancer.BalancerConfig`, which users make."""

    dp_size: Count
    """DP ranks that take part in every step."""
    batch_size: Count
    """Rollouts per step, over all ranks."""
    window: Knob[Count | None, int] = DERIVED
    """How many must wait until a batch leaves, chosen from all that wait; default 1.5 * batch_size. A wider
    one balances a step better, but ranks wait for it: 2 * batch_size pays where nothing is generated during a step.
    Every ``batch_size`` more adds a step of mean queueing delay (Little's law). See docs/tuning.md."""
    deadline_s: Seconds | None = None
    """How long the oldest may wait for the window, in seconds. Then a batch may be smaller than ``batch_size``, which
    is why the default is None: wait for the window."""
    max_skips: Knob[Count | Literal["auto"] | None, int | None] = AUTO
    """No rollout is passed over by more steps than this; default 16, or what window and capacity need. The strong
    knob on heavy tails: twice as many leave a third to four fifths of the idle time, at the same mean delay, and the
    longest wait is twice as long. None = no bound: outliers may wait for the drain. Holds while no more than
    ``capacity`` wait: see bench/results/planning_proofs.md."""
    capacity: Knob[Count | None, int] = DERIVED
    """How many may wait until put() waits; default 4 * batch_size, or 2 * ``window`` where that is given. While
    the trainer is busy more than ``window`` wait, so a larger one gives more to choose from, and older rollouts: see
    docs/tuning.md. Those whose groups lack siblings do not count: with what they lack they are limited to what
    ``max_skips`` is a guarantee for."""
    max_bytes: Count | None = None
    """``put()`` waits while the tensors of the buffered rollouts, the new rollout included, exceed this many bytes.
    None: no limit. A blocked put counts as a full window. With fewer than ``min_batch_size`` rollouts ready,
    ``put()`` never waits."""
    min_batch_size: Knob[Count | None, int] = DERIVED
    """Smallest batch that a deadline may send; default dp_size: every rank has something to run."""
    mini_batches: Count = 1
    """Mini-batches per step. Every mini-batch (PPO) ends with an optimizer step and has its own denominators; see
    :attr:`RankBatch.mini_batches`. A mini-batch has ``batch_size / mini_batches`` rollouts, and the same number of
    micro-batches on every rank. Samples of an execution stay in one mini-batch. A group with a shared prefix does too,
    if the mini-batch can hold the group. A short step has fewer mini-batches."""
    cost: Knob[Cost, CostModel] = TOKENS
    """Work of a length: a model, "tokens", "quadratic[:LINEAR:QUADRATIC]", "padded", or a config.json's path.
    Of a Hugging Face config.json it is the model's FLOPs."""
    counts: Counts = "free"
    """"equal": the same number of rollouts on every rank (to within one). "free" balances better."""
    sync: Sync = "step"
    """Where ranks meet: once per "step", or at every "micro_batch" (FSDP, ZeRO-3)."""
    policy: Policy = "window"
    """"window", or to compare "fifo" (arrival order) and "round_robin". "fifo" (arrival order, best partition) and
    "round_robin" (arrival order, to the ranks in turn) are what is usual elsewhere: run them to measure, in your own
    training, what the window buys."""
    loss_mask_column: Annotated[str, Meta(min_length=1, description="the name of a column of masks")] | None = (
        "loss_mask"
    )
    """Column of your rollouts that says which tokens are trained on; None = all. Non-zero = trained; the first token of
    a rollout never is. Under whatever name you put it, ranks find it as ``loss_mask``. "loss_mask" may be left out
    where every token is trained on, any other name must be there. A rollout without it is refused
    if it has another column that looks like one (``response_mask``, ``completion_mask``, ``action_mask``, ``labels``,
    ...)."""
    remember_ids: Annotated[int, Meta(ge=0, description="an int >= 0")] = 100_000
    """Past rollouts whose ids are kept, so that a put again, after a crash, is known. They were acknowledged or
    evicted; a producer that retries gets the reply that the first one was accepted. About 100 bytes each."""
    micro_batches: Group[MicroBatches] = _defaults(MicroBatches)
    """MicroBatches(max_tokens, counts, multiple_of, order, overhead_cost, oversize): cuts a rank's part."""
    groups: Group[Groups] = _defaults(Groups)
    """Groups(size, min_size, patience, share_prefixes): siblings of one prompt (GRPO)."""
    staleness: Group[Staleness] = _defaults(Staleness)
    """Staleness(max_versions, on_stale): how old a rollout may be when it is trained on."""
    context_parallel: Group[ContextParallel] = _defaults(ContextParallel)
    """ContextParallel(sizes, overhead, min_tokens): ranks that share one rollout."""

    # what was given, without what is derived: replace() starts from it, so that a knob left out follows the others
    _given: Mapping[str, Any] = field(init=False, repr=False, compare=False)
