"""Knobs of a balancer: which exist, and what each may be. What follows from them is in ``figures`` and ``config``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from msgspec import Meta

from stream_balancer.config.groups import Groups, Limits, MicroBatches, Staleness, StepSize
from stream_balancer.config.values import Count, Group, Knob, Values
from stream_balancer.cost import CostModel, TokenCost
from stream_balancer.planning.arrays import Sync

Policy: TypeAlias = Literal["window", "fifo", "round_robin"]
Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=sys.float_info.max, description="a finite number of seconds > 0")]
Speeds: TypeAlias = Annotated[
    tuple[Annotated[float, Meta(gt=0, le=sys.float_info.max)], ...],
    Meta(description="finite numbers > 0, one for each rank"),
]
Shares: TypeAlias = Annotated[
    dict[str, Annotated[float, Meta(gt=0, le=1)]],
    Meta(description="a dict from the name of a stratum to a share above 0, at most 1 all together"),
]
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
    batch_size: Knob[Count | None, int] = DERIVED
    """Rollouts per step, over all ranks. With ``step_size.rollouts``, on average. Under ``step_size.tokens``, which
    takes its place, it is read as the fewest that a full dispatch has: one for each micro-batch that every rank must
    run, in whole groups."""
    window: Knob[Count | Literal["auto"] | None, int] = DERIVED
    """How many must wait until a batch leaves, chosen from all that wait; default 1.5 * batch_size. With
    ``step_size.tokens`` two budgets must wait. A wider one balances a step better, but ranks wait for it: 2 *
    batch_size pays where nothing is generated during a step. Every ``batch_size`` more adds a step of mean queueing
    delay (Little's law). ``"auto"``: the smallest of :attr:`auto_windows` from which waiting longer would save hardly
    any idle time, fitted to the lengths that come; read back, it is the one in force. See docs/tuning.md."""
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
    min_batch_size: Knob[Count | None, int] = DERIVED
    """Smallest batch that a deadline may send; default dp_size: every rank has something to run."""
    cost: Knob[Cost, CostModel] = TOKENS
    """Work of a length: a model, "tokens", "quadratic[:LINEAR:QUADRATIC]", "padded", or a config.json's path.
    Of a Hugging Face config.json it is the model's FLOPs."""
    speeds: Speeds | None = None
    """Relative speed of each rank: one of speed 0.5 gets half the work. None = all alike."""
    equal_rollouts: bool = False
    """True: every rank gets the same number of rollouts, to within one. False balances better."""
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
    stratum_shares: Shares | None = None
    """Least share of every step's rollouts for some environments or data sets, as {"math": 0.25}. At least
    so many of those that wait go, and one (or one group) at the least. What must go for its age comes first. A
    rollout's stratum is its ``metadata["stratum"]``. None = no shares."""
    micro_batches: Group[MicroBatches] = _defaults(MicroBatches)
    """MicroBatches(max_tokens, equal_number, multiple_of, overhead_cost, oversize): cuts a rank's part."""
    groups: Group[Groups] = _defaults(Groups)
    """Groups(size, min_size, patience, keep): siblings of one prompt (GRPO)."""
    staleness: Group[Staleness] = _defaults(Staleness)
    """Staleness(max_versions, on_stale): how old a rollout may be when it is trained on."""
    limits: Group[Limits] = _defaults(Limits)
    """Limits(tokens, bytes): of what may wait, beside capacity."""
    step_size: Group[StepSize] = _defaults(StepSize)
    """StepSize(tokens, window_tokens, rollouts, mini_batches): steps of other sizes, or in several parts."""

    auto_windows: tuple[int, ...] = field(init=False, default=())
    """Windows that window="auto" chooses from; empty where the window is fixed. They are one to three batches, as far
    as ``capacity``, ``max_skips`` and ``staleness`` allow."""

    # what was given, without what is derived: replace() starts from it, so that a knob left out follows the others
    _given: Mapping[str, Any] = field(init=False, repr=False, compare=False)
