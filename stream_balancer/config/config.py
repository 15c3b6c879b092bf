"""The configuration of a balancer: checked knobs, and derived values for knobs left out."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeAlias

import numpy as np
from msgspec import Meta

from stream_balancer.config.groups import Groups, MicroBatches, Staleness
from stream_balancer.config.values import DERIVED, Count, Knobs, checked
from stream_balancer.cost import CostModel, QuadraticCost, cost_of
from stream_balancer.errors import ConfigError
from stream_balancer.field_docs import briefly_documented
from stream_balancer.planning import smallest_max_skips
from stream_balancer.planning.arrays import Sync
from stream_balancer.planning.choice import most_for_max_skips

Policy: TypeAlias = Literal["window", "fifo", "round_robin"]
Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=sys.float_info.max, description="a finite number of seconds > 0")]

AUTO: Any = "auto"
USUAL_MAX_SKIPS = 16
"""The value of "auto" unless window or capacity need more."""
# ``None`` means no bound or no mask for these knobs; for the other knobs it means that the knob was not given
_NONE_IS_A_VALUE = ("max_skips", "loss_mask_column")


@briefly_documented
@checked()
@dataclass(frozen=True, kw_only=True, repr=False)
class BalancerConfig(Knobs):
    """The knobs of a balancer; the balancer derives those left out. A group may be a mapping: ``groups={"size": 8}``.
    Raises :class:`ConfigError` (a ValueError) for a value or a combination that cannot work."""

    dp_size: Count
    """DP ranks that take part in every step."""
    batch_size: Count
    """Rollouts per step, over all ranks."""
    window: Count = DERIVED
    """Rollouts that must be buffered before a step is formed; default 1.5 * batch_size. The step is chosen from
    everything buffered. A wider window balances a step better, but ranks wait for it: 2 * batch_size pays where nothing
    is generated during a step. Each ``batch_size`` more adds one step of mean queueing delay (Little's law).
    ``stream-balancer tune`` finds a window for your lengths. See docs/tuning.md."""
    deadline_s: Seconds | None = None
    """Longest time that the oldest rollout waits for the window, in seconds. A batch may then be smaller than
    ``batch_size``, so the default is None: wait for the window."""
    max_skips: Count | None = AUTO
    """Most steps that may pass a rollout over; default 16, or what window and capacity need. The strong knob on heavy
    tails: twice the number saves idle time at the same mean delay, and doubles the longest wait.
    ``None`` = no bound: outliers may wait for the drain. The bound holds while no more than ``capacity``
    rollouts wait: see docs/planning.md."""
    capacity: Count = DERIVED
    """Rollouts that may wait before put() waits; default 4 * batch_size, or 2 * ``window`` if that is given. A
    larger capacity offers more candidates while the trainer is busy, and older rollouts: see docs/tuning.md. Rollouts
    of incomplete groups do not count: ``max_skips`` bounds them."""
    max_bytes: Count | None = None
    """Bytes of waiting rollouts' tensors from which put() waits. ``None`` = no such limit. While a limit holds a put
    back, the window counts as full. No limit holds a put back while fewer than ``min_batch_size`` rollouts could
    leave."""
    min_batch_size: Count = DERIVED
    """Smallest batch that a deadline may send; default dp_size: every rank has something to run."""
    cost: Any = QuadraticCost()  # noqa: RUF009 - frozen
    """Work of a length: a model, "quadratic[:LINEAR:QUADRATIC]", "tokens", "padded", or a config.json's path. The
    default is the law of a 7B model, ``length * 24576 + length**2``. A Hugging Face config.json gives the FLOPs of its
    model. A wrong cost idles more than any other knob saves: see docs/cost.md."""
    equal_rollouts: bool = False
    """True: every rank gets the same number of rollouts, to within one. False balances better."""
    sync: Sync = DERIVED
    """Where ranks wait for each other: "step", or every "micro_batch". "micro_batch" fits FSDP, ZeRO-3 and any
    collective inside a forward or backward pass; "step" fits DDP with ``no_sync``, ZeRO-1/2 and Megatron's data
    parallelism. Required with ``micro_batches.max_tokens``; otherwise "step"."""
    mini_batches: Count = 1
    """Mini-batches of a step, each with an optimizer step and separate denominators (PPO). Each has
    ``batch_size / mini_batches`` rollouts and the same number of micro-batches on every rank. Samples of one
    execution stay in one mini-batch. A step of too few rollouts has fewer. See :attr:`RankBatch.mini_batches`."""
    policy: Policy = "window"
    """"window", or to compare "fifo" (arrival order) and "round_robin". "fifo" takes the best partition, "round_robin"
    deals to the ranks in turn: run them to measure, in your own training, what the window buys."""
    loss_mask_column: Annotated[str, Meta(min_length=1, description="the name of a column of masks")] | None = (
        "loss_mask"
    )
    """Column of your rollouts that says which tokens are trained on; ``None`` = all. Non-zero = trained; the first
    token of a rollout never is. Ranks find the column as ``loss_mask``, whatever its name here. "loss_mask" may be left
    out where every token is trained on; any other name must be there. A rollout without the column is refused if it has
    another column that looks like a mask (``response_mask``, ``completion_mask``, ``action_mask``, ``labels``, ...)."""
    micro_batches: MicroBatches = MicroBatches()  # noqa: RUF009 - frozen
    """MicroBatches(max_tokens, equal_number, multiple_of, overhead_cost, oversize): cuts a rank's share."""
    groups: Groups = Groups()  # noqa: RUF009 - frozen
    """Groups(size, min_size, patience): siblings of one prompt (GRPO)."""
    staleness: Staleness = Staleness()  # noqa: RUF009 - frozen
    """Staleness(max_versions, on_stale): how old a rollout may be when it is trained on."""

    @classmethod
    def from_dict(cls, knobs: Mapping[str, Any]) -> Self:
        """A config from plain data: ``from_dict(yaml.safe_load(text))``. A group is a mapping, and ``cost`` is a text
        as the command line takes it. Raises :class:`ConfigError`."""
        if not isinstance(knobs, Mapping):
            raise ConfigError(f"from_dict() takes a mapping from knobs to values, not a {type(knobs).__name__}")
        return cls(**{str(name): value for name, value in knobs.items()})

    def replace(self, /, **changes: Any) -> BalancerConfig:
        """A config with some knobs changed; knobs that were never given are derived again. A mapping changes the knobs
        of a group that it names. Raises :class:`ConfigError`."""
        for name, value in changes.items():
            if isinstance(value, Mapping) and isinstance(getattr(self, name, None), Knobs):
                changes[name] = {**vars(getattr(self, name)), **value}
        return BalancerConfig(**{**self._given, **changes})

    def __post_init__(self) -> None:
        knobs = vars(self)
        # plain data (YAML, the command line) names a model
        if isinstance(self.cost, str):
            knobs["cost"] = cost_of(self.cost)
        # replace() starts from these, so that a derived knob follows the changed ones
        self._given: dict[str, Any]
        knobs["_given"] = {k: v for k, v in knobs.items() if v is not None or k in _NONE_IS_A_VALUE}
        _check_cost(self.cost)
        # a derived value would look as if it were given
        _refuse(_refusals_of_given(self))
        self._derive(knobs)
        _refuse(_refusals(self))

    def _derive(self, knobs: dict[str, Any]) -> None:
        def default(name: str, value: Any) -> None:
            if knobs[name] is None:
                knobs[name] = value

        # capacity follows the window, and max_skips follows both
        if self.policy == "window" and knobs["window"] is None:
            # the least idle time in all for the delay, where generation goes on during a step
            default("capacity", 4 * self.batch_size)
            default("window", -(-3 * self.batch_size // 2))
        # the baselines choose nothing, so they wait for no more than they send
        default("window", self.batch_size)
        # while the trainer is busy a second window of rollouts may come, and the next choice has more candidates
        default("capacity", 2 * self.window)
        default("min_batch_size", self.dp_size)
        default("sync", "step")
        if knobs["max_skips"] == AUTO:
            knobs["max_skips"] = max(USUAL_MAX_SKIPS, least_max_skips(self))


def least_max_skips(c: BalancerConfig) -> int:
    """Smallest ``max_skips`` that works with the window and the capacity.

    Below ``3 * (window / batch_size - 1)`` every rollout would always be due and the window could choose nothing.
    Below ``ceil(capacity / batch_size) - 1`` a full buffer could not leave in time, whatever the order. Whole groups
    need a little more, since a batch may lack up to ``groups.size - 1`` rollouts.
    """
    return max(smallest_max_skips(c.window, c.batch_size, c.capacity, c.groups.size or 1), 1)


def most_waiting(c: BalancerConfig) -> int:
    """Most rollouts that may wait, together with the siblings that their groups lack: ``capacity``, or with whole
    groups the number for which ``max_skips`` (None: 16) is a guarantee."""
    if c.groups.size is None:
        return c.capacity
    # rollouts of incomplete groups take no place of capacity, so this number bounds memory
    skips = USUAL_MAX_SKIPS if c.max_skips is None else c.max_skips
    return max(c.capacity, most_for_max_skips(skips, c.batch_size, c.groups.size))


# -- refusals ----------------------------------------------------------------------------------------------------------
# A knob that could deadlock, or never fire, ends a run in its first second and not in its tenth hour. A refusal names
# the knobs, the reason and the remedy.


def _refuse(reasons: Iterator[str]) -> None:
    # the first reason is enough: the next ones often follow from it
    for reason in reasons:
        raise ConfigError(reason)


def _check_cost(cost: CostModel) -> None:
    # isinstance() of a protocol does the same at ten times the price
    if isinstance(cost, type) or not (callable(cost) and hasattr(cost, "padded")):
        raise ConfigError(
            "cost must be a cost model (QuadraticCost(), TokenCost(), ... or a callable with a 'padded' "
            f"attribute), not {cost!r}"
        )
    # two lengths show a model that returns one number for all, NaN, or a negative one, before the first put does
    probe = np.asarray(cost(np.array([1, 1000], dtype=np.int64)), dtype=np.float64)
    if probe.shape != (2,) or not np.all(np.isfinite(probe)) or np.any(probe < 0):
        raise ConfigError(f"cost({[1, 1000]}) must give two finite numbers >= 0, not {probe.tolist()!r}")


def _refusals_of_given(c: Any) -> Iterator[str]:
    """Reasons against knobs before any is derived, which types do not know as ``None``."""
    size, least = c.groups.size or 0, c.groups.min_size
    if least is not None and not size / 2 <= least < size:
        yield (
            f"groups.min_size ({least}) must be at least half of groups.size ({c.groups.size}), and below it: the time "
            "of half of a group says how long the other half may take. Change min_size, or leave it out"
        )
    if least is None and c.groups.patience != Groups().patience:
        yield (
            f"groups.patience ({c.groups.patience}) needs groups.min_size, the number of siblings that must have come: "
            "without it a group waits for all siblings. Give min_size, or leave patience out"
        )
    if c.loss_mask_column in ("input_ids", "labels"):
        yield (
            f"loss_mask_column must be the name of a column of masks, not {c.loss_mask_column!r}: tokens and labels "
            "are no mask, -100 is not zero. Give a column labels != -100"
        )
    if c.sync is None and c.micro_batches.max_tokens is not None:
        yield (
            "micro_batches.max_tokens needs sync, where ranks wait for each other. Pass\n"
            '  sync="micro_batch" for FSDP, ZeRO-3 and any collective inside a forward or backward pass, or\n'
            '  sync="step" for DDP with no_sync, ZeRO-1/2 and Megatron\'s data parallelism.'
        )


def _refusals(c: BalancerConfig) -> Iterator[str]:
    """Reasons against knobs together: combinations that could deadlock, or never fire."""
    if c.batch_size < (least := c.dp_size * c.micro_batches.multiple_of * c.mini_batches):
        yield (
            f"batch_size ({c.batch_size}) must be >= {least}, which is dp_size ({c.dp_size}) x "
            f"micro_batches.multiple_of ({c.micro_batches.multiple_of}) x mini_batches ({c.mini_batches}): some "
            "micro-batches would be empty. Raise batch_size, or lower one of the three"
        )
    if c.window < c.batch_size:
        yield (
            f"window ({c.window}) must be >= batch_size ({c.batch_size}): it would fill before a batch is there. Raise "
            "window, or lower batch_size"
        )
    if c.window > (room := c.capacity - c.capacity % (c.groups.size or 1)):
        then = "no batch would ever leave" if c.deadline_s is None else "every batch would wait for deadline_s"
        yield (
            f"window ({c.window}) must be <= {room}, the whole groups that fit into capacity ({c.capacity}): it could "
            f"never fill, and {then}. Raise capacity or lower window"
        )
    if not c.dp_size <= c.min_batch_size <= c.batch_size:
        yield (
            f"min_batch_size ({c.min_batch_size}) must be >= dp_size ({c.dp_size}), as ranks would run padding only, "
            f"and <= batch_size ({c.batch_size}), as a deadline could not be kept. Change min_batch_size"
        )
    if c.policy != "window" and c.window != c.batch_size:
        yield (
            f"policy {c.policy!r} sends the oldest batch_size rollouts, so window ({c.window}) must equal batch_size "
            f"({c.batch_size}). Leave window out"
        )
    if c.max_skips is not None and c.max_skips < (least := least_max_skips(c)):
        yield (
            f"max_skips ({c.max_skips}) is too small for window ({c.window}) and capacity ({c.capacity}): every "
            "rollout would always be due, or a full buffer could not leave in time. "
            f"Use max_skips >= {least}, or a smaller window or capacity"
        )
    if c.batch_size % (c.groups.size or 1):
        yield (
            f"batch_size ({c.batch_size}) must be a multiple of groups.size ({c.groups.size}): whole groups could not "
            "make a full batch. Change batch_size"
        )
    if not c.micro_batches.equal_number and c.sync == "micro_batch":
        yield (
            "micro_batches.equal_number=False needs sync='step': ranks that meet at every micro-batch would wait "
            "forever for a rank that has fewer. Leave micro_batches.equal_number out"
        )
