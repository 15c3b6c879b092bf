"""Knobs of a balancer: which exist, and which combinations are refused.

A knob that could deadlock, or never fire, is refused here with what, why, and what to do, so that a run fails in its
first second and not in its tenth hour. Values only: nothing that decides at run time may enter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from stream_balancer.cost import CostModel, TokenCost
from stream_balancer.errors import ConfigError
from stream_balancer.field_docs import documented
from stream_balancer.planning import smallest_max_skips
from stream_balancer.planning.arrays import Counts, Oversize, Sync
from stream_balancer.planning.plan import Groups, step_multiple
from stream_balancer.planning.windows import START, window_choices

__all__ = ["BalancerConfig"]

OnStale: TypeAlias = Literal["evict", "send"]
Policy: TypeAlias = Literal["window", "fifo", "round_robin"]
MicroBatchOrder: TypeAlias = Literal["heavy_first", "pipeline"]

if TYPE_CHECKING:

    class Window:
        """A knob that is given as an int or "auto", and read as an int: the window in force."""

        def __get__(self, config: object, owner: object) -> int: ...
        def __set__(self, config: object, value: int | Literal["auto"]) -> None: ...

    class BatchSize:
        """A knob that may be left out under ``batch_tokens``, and is read as an int."""

        def __get__(self, config: object, owner: object) -> int: ...
        def __set__(self, config: object, value: int | None) -> None: ...

    class MaxSkips:
        """A knob that is given as an int, None or "auto", and read as an int or None."""

        def __get__(self, config: object, owner: object) -> int | None: ...
        def __set__(self, config: object, value: int | Literal["auto"] | None) -> None: ...


_DERIVED: Any = None  # a default that __post_init__ computes from the other knobs
_AUTO: Any = "auto"  # the same, for a knob whose None is a value: no bound


@documented
@dataclass(frozen=True, kw_only=True)
class BalancerConfig:
    """The knobs of a balancer. Raises :class:`ConfigError` (a ValueError) for a value or a combination that cannot
    work.

    Knobs left out are derived from the others; :meth:`replace` derives them anew.
    """

    dp_size: int
    """DP ranks that take part in every step."""
    batch_size: BatchSize = _DERIVED
    """Rollouts per dispatch, over all ranks; with ``batch_size_range``, on average. Under ``batch_tokens``, which takes
    its place, it is read as the fewest that a full dispatch has: one for each micro-batch that every rank must run, in
    whole groups."""
    batch_size_range: tuple[int, int] | None = None
    """Least and most rollouts per dispatch, ``(16, 64)`` for example: a step that is long because of an outlier takes
    more rollouts, so that all ranks have work, and later steps take fewer until the mean is ``batch_size`` again. What
    a loss divides by varies with it: see docs/tuning.md. None = ``batch_size`` every time."""
    batch_tokens: int | None = None
    """Tokens per dispatch, instead of ``batch_size``: so many rollouts (or whole groups) go that their tokens come
    nearest to this. More go where ``max_skips`` demands it, or where some rank would get none. See docs/tuning.md for
    what it costs."""
    window: Window = _DERIVED
    """Dispatch once this many rollouts wait. Default ``2 * batch_size``: most of the balance a window can buy, for
    one dispatch of mean queueing delay; every further ``batch_size`` adds another (Little's law). ``"auto"``: the
    smallest of :attr:`auto_windows` from which waiting longer would save hardly any idle time, fitted to the lengths
    that come; read back, it is the one in force. See docs/tuning.md."""
    window_tokens: int | None = None
    """Under ``batch_tokens``, instead of ``window``: dispatch once this many tokens wait. Default ``2 * batch_tokens``
    if no ``window`` is given."""
    deadline_s: float | None = None
    """... or once the oldest has waited this long, in seconds. Then a batch may be smaller than ``batch_size``, which
    is why the default is None: wait for the window."""
    max_skips: MaxSkips = _AUTO
    """No rollout is passed over by more dispatches than this. "auto" (read back, it is the number): 16, or what the
    window and the capacity need. The strong knob on heavy tails: twice as many leave a third to four fifths of the
    idle time, at the same mean delay, and the longest wait is twice as long. None = no bound: outliers may wait for
    the drain. Holds while no more than ``capacity`` wait: see docs/planning_proofs.md."""
    capacity: int = _DERIVED
    """``put()`` waits once this many rollouts wait, places kept for siblings of waiting groups counted in. Default
    ``2 * window``."""
    capacity_tokens: int | None = None
    """... or once this many tokens wait. Default ``2 * window_tokens``; with a ``window`` in rollouts under
    ``batch_tokens`` as many as ``max_skips`` allows; else None = no such limit."""
    capacity_bytes: int | None = None
    """... or once the waiting rollouts' tensors are this many bytes. None = no such limit. While a put is held back
    by any limit, the window counts as full; while fewer than ``min_batch_size`` could leave, no limit holds a
    put back."""
    min_batch_size: int = _DERIVED
    """Smallest batch a deadline may send. Default ``dp_size``, so that every rank has something to run."""
    counts: Counts = "free"
    """"equal": the same number of rollouts on every rank (to within one). "free" balances better."""
    sync: Sync = "step"
    """Where ranks meet: once per step, or at every "micro_batch" (FSDP, ZeRO-3)."""
    max_tokens_per_micro_batch: int | None = None
    """Hard cap on the tokens of a micro-batch, never exceeded (padding counts under a padded cost). None = one
    micro-batch."""
    oversize: Oversize = "refuse"
    """A rollout above the cap is refused at put, or goes in a micro-batch "alone"."""
    micro_batch_counts: Counts = "equal"
    """"equal": as many micro-batches on every rank. "free": each rank its own number, where ranks meet once per step
    (DDP with ``no_sync``, HSDP): fewer padding copies, less ``micro_batch_overhead_cost``."""
    micro_batch_overhead_cost: float | None = None
    """Work of a micro-batch beside that of its rollouts (launching kernels, reading the weights), in the cost model's
    unit. One more micro-batch a rank is taken where it saves more by balance. None = what a
    ``CalibratedCost`` has learned; 0 with any other cost."""
    micro_batch_multiple: int = 1
    """The number of micro-batches is a multiple of this (virtual pipeline stages)."""
    micro_batch_order: MicroBatchOrder = "heavy_first"
    """"heavy_first" shows an out-of-memory at once; "pipeline" puts smaller micro-batches at both ends."""
    cost: CostModel = field(default_factory=TokenCost)
    """How much work is a length."""
    speeds: tuple[float, ...] | None = None
    """Relative speed of each rank: a rank of speed 0.5 gets half the work. None = all alike."""
    group_size: int | None = None
    """Siblings per group (GRPO), which a ``group_id`` names. Every rollout must have one then, unless groups are
    "free". None = groups play no part."""
    groups: Groups = "same_batch"
    """Siblings leave in the "same_batch", on the "same_rank" (costs balance), or "free". Only with ``group_size``."""
    stratum_shares: Mapping[str, float] | None = None
    """Least share of every step's rollouts for some strata (environments, data sets), as ``{"math": 0.25}``: at least
    so many of those that wait go, oldest first, and one (or one group) at the least. What must go for its age comes
    first. A rollout's stratum is its ``metadata["stratum"]``. None = no shares."""
    max_staleness: int | None = None
    """Most policy versions a rollout may lie behind *when it is trained on*. One leaves only if that holds though
    every batch before it, which the trainer is not through with, makes a version; one that cannot wait for another
    batch is due. None = no bound. See docs/staleness.md for what this assumes."""
    on_stale: OnStale = "evict"
    """A rollout beyond ``max_staleness`` is evicted (counted, and given to ``on_evict``), or sent all the same."""
    remember_ids: int = 100_000
    """Ids of this many past rollouts (acknowledged or evicted) are kept, so that a producer that retries a put after a
    crash gets the reply that the first one was accepted. About 100 bytes each."""
    loss_mask_column: str | None = "loss_mask"
    """Column of your rollouts that says which tokens are trained on (non-zero = trained). Under whatever name you put
    it, ranks find it as ``loss_mask``. "loss_mask" may be left out where every token is trained on, any other name
    must be there; None = every token is trained on. A rollout without it is refused if it has another column that
    looks like one (``response_mask``, ``completion_mask``, ``action_mask``, ``labels``, ...)."""
    policy: Policy = "window"
    """"window" is what this library is for. "fifo" (arrival order, best partition) and "round_robin" (arrival order,
    to the ranks in turn) are what is usual elsewhere: run them to measure, in your own training, what the window
    buys."""

    auto_windows: tuple[int, ...] = field(init=False)
    """What ``window="auto"`` chooses from: one to three batches, as far as ``capacity``, ``max_skips`` and
    ``max_staleness`` allow. Empty where the window is fixed."""

    _given: Mapping[str, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        # What was given, without what is derived: replace() starts from it, so a knob left out follows the others.
        given = {k: v for k, v in given.items() if v is not None or k in _NONE_IS_A_VALUE}
        object.__setattr__(self, "_given", given)
        object.__setattr__(self, "auto_windows", ())
        _check_values(self)
        if self.stratum_shares is not None:  # a dict of our own: nobody may change it later
            object.__setattr__(self, "stratum_shares", dict(self.stratum_shares))
        self._derive()
        _check_combinations(self)

    def replace(self, **changes: Any) -> BalancerConfig:
        """A config with some knobs changed; knobs that were never given are derived anew. Raises
        :class:`ConfigError`."""
        known = {f.name for f in fields(self) if f.init}
        if unknown := changes.keys() - known:
            raise ConfigError(f"no such knob: {', '.join(sorted(unknown))}. The knobs are: {', '.join(sorted(known))}")
        return BalancerConfig(**{**self._given, **changes})

    def _derive(self) -> None:
        def default(name: str, value: int) -> None:
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

        if self._given.get("window") == "auto":
            _check_auto(self)
            object.__setattr__(self, "auto_windows", _auto_windows(self))
            first = [window for window in self.auto_windows if window <= START * self.batch_size]
            object.__setattr__(self, "window", max(first, default=self.batch_size))
        if self.batch_tokens is not None:
            default("batch_size", self._least_batch_size())
            if "window" not in self._given:
                default("window_tokens", self._batches_of_window * self.batch_tokens)
                default("window", self.batch_size)
        default("window", self._batches_of_window * self.batch_size)
        if self.window_tokens is not None:
            default("capacity_tokens", 2 * self.window_tokens)
            default("capacity", max(self.capacity_tokens or 0, self.window))  # no limit: every rollout has a token
        default("capacity", 2 * self._largest_window)
        default("min_batch_size", self.dp_size)
        if self._given["max_skips"] == "auto":
            object.__setattr__(self, "max_skips", max(_USUAL_MAX_SKIPS, self.least_max_skips))
        if self.batch_tokens is not None and self.max_skips is not None:
            default("capacity_tokens", self.max_skips * self.batch_tokens)

    def at_window(self, window: int) -> BalancerConfig:
        """The same knobs with another of :attr:`auto_windows` in force."""
        other = copy(self)
        object.__setattr__(other, "window", window)
        return other

    @property
    def _batches_of_window(self) -> int:
        """How many batches a window holds by default."""
        return 2 if self.policy == "window" else 1

    def _least_batch_size(self) -> int:
        """Rollouts of which every rank gets one for each micro-batch that it must run, in whole groups."""
        least = max(self.dp_size * self.micro_batch_multiple, self.group_size or 1)
        least = -(-least // self._whole) * self._whole
        return max(least, self.dp_size * self._whole) if self.groups == "same_rank" else least

    @property
    def _largest_window(self) -> int:
        return max(self.auto_windows, default=self.window)

    @property
    def tracked_group_size(self) -> int | None:
        """Siblings that a group must have before it may leave; None where groups play no part."""
        return None if self.groups == "free" else self.group_size

    @property
    def _whole(self) -> int:
        """Rollouts that leave together."""
        return self.tracked_group_size or 1

    @property
    def least_max_skips(self) -> int:
        """Smallest ``max_skips`` that works with this window and capacity.

        Below ``3 * (window / batch_size - 1)`` every rollout would always be due and the window could choose nothing;
        below ``ceil(capacity / batch_size) - 1`` a full buffer could not leave in time, whatever the order (with groups
        kept whole a batch may be up to ``group_size - 1`` short, so a little more is needed). With ``batch_size_range``
        the second is of its least. Under ``batch_tokens`` the same of ``window_tokens`` and ``capacity_tokens``; there
        it is the steps that would have too many tokens.
        """
        if self.batch_tokens is not None:
            window = self.window_tokens or self.batch_tokens
            most = (self.capacity_tokens or window) + self.batch_tokens  # the last put may pass the limit
            return max(smallest_max_skips(window, self.batch_tokens, most), 1)
        return max(_smallest_max_skips(self, self._largest_window, self.capacity), 1)

    @property
    def least_batch_size(self) -> int:
        """Rollouts that every full batch has at least."""
        return self.batch_size if self.batch_size_range is None else self.batch_size_range[0]


_USUAL_MAX_SKIPS = 16
"""What "auto" takes unless more are needed; measured in docs/planning_measured.md."""
_NONE_IS_A_VALUE = ("max_skips", "loss_mask_column")
_POSITIVE_INTS = ("dp_size", "micro_batch_multiple")
_OPTIONAL_INTS = (
    "batch_size",
    "batch_tokens",
    "window",
    "window_tokens",
    "max_skips",
    "capacity",
    "capacity_tokens",
    "capacity_bytes",
    "min_batch_size",
    "max_tokens_per_micro_batch",
    "group_size",
)
_MAY_BE_AUTO = ("window", "max_skips")
_CHOICES = {
    "counts": get_args(Counts),
    "micro_batch_counts": get_args(Counts),
    "sync": get_args(Sync),
    "oversize": get_args(Oversize),
    "micro_batch_order": get_args(MicroBatchOrder),
    "groups": get_args(Groups),
    "on_stale": get_args(OnStale),
    "policy": get_args(Policy),
}


def _check_int(name: str, value: object, *, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        also = ' or "auto"' if name in _MAY_BE_AUTO else ""
        raise ConfigError(f"{name} must be an int >= {least}{also}, not {value!r}")


def _check_pair(value: object) -> None:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ConfigError(f"batch_size_range must be two ints, the least and the most rollouts, not {value!r}")
    for number in value:
        _check_int("batch_size_range", number)


def _check_values(config: BalancerConfig) -> None:
    """Each knob by itself."""
    for name in _POSITIVE_INTS:
        _check_int(name, getattr(config, name))
    for name in _OPTIONAL_INTS:
        auto = name in _MAY_BE_AUTO and getattr(config, name) == "auto"
        if getattr(config, name) is not None and not auto:
            _check_int(name, getattr(config, name))
    if config.batch_size_range is not None:
        _check_pair(config.batch_size_range)
        object.__setattr__(config, "batch_size_range", tuple(config.batch_size_range))
    for name in ("max_staleness", "remember_ids"):
        if getattr(config, name) is not None:
            _check_int(name, getattr(config, name), least=0)
    for name, choices in _CHOICES.items():
        if getattr(config, name) not in choices:
            raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}, not {getattr(config, name)!r}")
    deadline = config.deadline_s
    if deadline is not None and (
        isinstance(deadline, bool) or not isinstance(deadline, (int, float)) or not 0 < deadline < math.inf
    ):
        raise ConfigError(
            f"deadline_s must be a finite number of seconds > 0, or None to wait for the window, not {deadline!r}"
        )
    overhead = config.micro_batch_overhead_cost
    if overhead is not None and (
        isinstance(overhead, bool) or not isinstance(overhead, (int, float)) or not 0 <= overhead < math.inf
    ):
        raise ConfigError(
            "micro_batch_overhead_cost must be a finite number >= 0 in the cost model's unit, or None for what is "
            f"learned, not {overhead!r}"
        )
    _check_batch(config)
    _check_shares(config.stratum_shares)
    _check_loss_mask(config.loss_mask_column)
    _check_cost(config.cost)
    _check_speeds(config)


def _check_shares(shares: object) -> None:
    if shares is None:
        return
    good = isinstance(shares, Mapping) and all(
        isinstance(name, str) and not isinstance(share, bool) and isinstance(share, (int, float)) and 0 < share <= 1
        for name, share in shares.items()
    )
    if not isinstance(shares, Mapping) or not good or sum(shares.values()) > 1 + 1e-9:
        raise ConfigError(
            "stratum_shares must be a dict from the name of a stratum to a share above 0, at most 1 all together, not "
            f"{shares!r}"
        )


def _check_batch(c: BalancerConfig) -> None:
    """How much a step takes, and what it waits for, is given in rollouts or in tokens."""
    if "batch_size" not in c._given and c.batch_tokens is None:
        raise ConfigError("give batch_size (rollouts per step) or batch_tokens (tokens per step)")
    if "batch_size" in c._given and c.batch_tokens is not None:
        raise ConfigError(
            f"batch_size ({c.batch_size}) and batch_tokens ({c.batch_tokens}) exclude one another: a step has a fixed "
            "number of rollouts, or about a fixed number of tokens. Leave one out"
        )
    if c.window_tokens is not None and c.batch_tokens is None:
        raise ConfigError(
            f"window_tokens ({c.window_tokens}) needs batch_tokens: a batch of batch_size rollouts might not be among "
            "so many tokens. Give window, in rollouts, or batch_tokens instead of batch_size"
        )
    if c.window_tokens is not None and "window" in c._given:
        raise ConfigError(
            f"window ({c.window}) and window_tokens ({c.window_tokens}) exclude one another: a dispatch waits for "
            "rollouts or for tokens. Leave one out"
        )


def _check_loss_mask(column: object) -> None:
    if column is not None and (not isinstance(column, str) or column in ("", "input_ids", "labels")):
        also = ". Labels are no mask, -100 is not zero: give a column labels != -100" if column == "labels" else ""
        raise ConfigError(f"loss_mask_column must be the name of a column of masks, or None, not {column!r}{also}")


def _check_cost(cost: object) -> None:
    if not isinstance(cost, CostModel):
        raise ConfigError(
            "cost must be a cost model (TokenCost(), QuadraticCost(), ... or a callable with a 'padded' "
            f"attribute), not {cost!r}"
        )
    # Two lengths show a model that returns one number for all, NaN, or a negative one; before the first put does.
    probe = np.asarray(cost(np.array([1, 1000], dtype=np.int64)), dtype=np.float64)
    if probe.shape != (2,) or not np.all(np.isfinite(probe)) or np.any(probe < 0):
        raise ConfigError(f"cost({[1, 1000]}) must give two finite numbers >= 0, not {probe.tolist()!r}")


def _check_speeds(config: BalancerConfig) -> None:
    speeds = config.speeds
    if speeds is None:
        return
    if len(speeds) != config.dp_size or not all(math.isfinite(s) and s > 0 for s in speeds):
        raise ConfigError(f"speeds must be {config.dp_size} finite numbers > 0 (one per rank), not {speeds!r}")


def _auto_windows(c: BalancerConfig) -> tuple[int, ...]:
    """Windows that are legal with the knobs that were given; capacity and ``max_skips`` follow where they were not."""

    def legal(window: int) -> bool:
        capacity = 2 * window if c.capacity is None else c.capacity
        skips = c._given["max_skips"]
        if isinstance(skips, int) and skips < _smallest_max_skips(c, window, capacity):
            return False
        return c.max_staleness is None or window <= (c.max_staleness + 1) * c.batch_size

    limit = 3 * c.batch_size + c._whole if c.capacity is None else c.capacity // c._whole * c._whole
    windows = tuple(window for window in window_choices(c.batch_size, c._whole, limit) if legal(window))
    if len(windows) < 2:
        raise ConfigError(
            f"window='auto' has nothing to choose from: capacity ({c.capacity}), max_skips ({c.max_skips}) and "
            f"max_staleness ({c.max_staleness}) leave no window above batch_size ({c.batch_size}). Loosen them, or set "
            "window=batch_size"
        )
    return windows


def _smallest_max_skips(c: BalancerConfig, window: int, capacity: int) -> int:
    return smallest_max_skips(window, c.batch_size, capacity, c._whole, c.least_batch_size)


def _check_auto(c: BalancerConfig) -> None:
    """Knobs that the estimate behind ``window="auto"`` does not cover."""
    if c.policy != "window":
        raise ConfigError(f"window='auto' needs policy='window': {c.policy!r} sends the oldest. Leave window out")
    if c.batch_tokens is not None:
        raise ConfigError(
            "window='auto' does not work with batch_tokens: it compares windows by batches of one size. Leave window "
            "out, or give window_tokens; `stream-balancer tune` finds one"
        )
    if c.sync != "step" or c.cost.padded:
        what = "a padded cost" if c.cost.padded else f"sync={c.sync!r}"
        raise ConfigError(
            f"window='auto' does not work with {what}: it foresees steps that are as long as the heaviest rank's sum. "
            "Give a number; `stream-balancer tune` finds one"
        )


def _check_combinations(c: BalancerConfig) -> None:
    """Knobs together: what could deadlock, or never fire."""
    if c.batch_size < c.dp_size:
        raise ConfigError(
            f"batch_size ({c.batch_size}) must be >= dp_size ({c.dp_size}): some ranks would get nothing in every "
            "step. Raise batch_size"
        )
    if c.window < c.batch_size:
        raise ConfigError(
            f"window ({c.window}) must be >= batch_size ({c.batch_size}): it would fill before a batch is there. "
            "Raise window, or lower batch_size"
        )
    if c.window > c.capacity:
        then = "every batch would wait for deadline_s" if c.deadline_s is not None else "no batch would ever leave"
        raise ConfigError(
            f"window ({c.window}) must be <= capacity ({c.capacity}): it could never fill, and {then}. "
            "Raise capacity or lower window"
        )
    _check_tokens(c)
    if not c.dp_size <= c.min_batch_size <= (c.batch_size if c.batch_tokens is None else c.capacity):
        raise ConfigError(
            f"min_batch_size ({c.min_batch_size}) must be between dp_size ({c.dp_size}) and "
            + (f"batch_size ({c.batch_size})" if c.batch_tokens is None else f"capacity ({c.capacity})")
            + ": below, ranks would run padding only; above, a deadline could not be kept"
        )
    if c.policy != "window" and c.window_tokens is not None and c.window_tokens != c.batch_tokens:
        raise ConfigError(
            f"policy {c.policy!r} sends the oldest batch_tokens, so window_tokens ({c.window_tokens}) must equal "
            f"batch_tokens ({c.batch_tokens}). Leave window_tokens out"
        )
    if c.policy != "window" and c.window != c.batch_size:
        raise ConfigError(
            f"policy {c.policy!r} sends the oldest batch_size rollouts, so window ({c.window}) must equal batch_size "
            f"({c.batch_size}). Leave window out"
        )
    if c.max_skips is not None and c.max_skips < c.least_max_skips:
        tokens = "" if c.window_tokens is None else "_tokens"
        batch, window, capacity = (
            f"{name} ({getattr(c, name)})"
            for name in ("batch" + (tokens or "_size"), "window" + tokens, "capacity" + tokens)
        )
        raise ConfigError(
            f"max_skips ({c.max_skips}) is too small for {window} and {capacity} at {batch}: every rollout would "
            f"always be due, or a full buffer could not leave in time. Use max_skips >= {c.least_max_skips}, or a "
            "smaller window or capacity"
        )
    _check_groups(c)
    if c.batch_size_range is not None:
        _check_range(c, *c.batch_size_range)
    _check_shares_fit(c)
    if c.micro_batch_counts == "free" and c.sync == "micro_batch":
        raise ConfigError(
            "micro_batch_counts='free' needs sync='step': ranks that meet at every micro-batch would wait for ever for "
            "one that has fewer. Leave micro_batch_counts out"
        )
    if c.micro_batch_multiple > 1 and c.batch_size < c.dp_size * c.micro_batch_multiple:
        raise ConfigError(
            f"micro_batch_multiple ({c.micro_batch_multiple}) x dp_size ({c.dp_size}) is more than batch_size "
            f"({c.batch_size}): some micro-batches would be empty. Lower micro_batch_multiple or raise batch_size"
        )


def _check_shares_fit(c: BalancerConfig) -> None:
    smallest = c.batch_size if c.batch_size_range is None else c.batch_size_range[0]
    shares = dict(c.stratum_shares or {})
    least = sum(max(int(share * smallest) // c._whole, 1) * c._whole for share in shares.values())
    if least > smallest:
        raise ConfigError(
            f"stratum_shares {shares} do not fit into a step of {smallest} rollouts: each takes at least one rollout, "
            f"or group, of every step, {least} together. Leave some out, or raise batch_size"
        )


def _check_tokens(c: BalancerConfig) -> None:
    """Limits in tokens: each at least what must fit into it."""
    if c.window_tokens is not None and c.batch_tokens is not None and c.window_tokens < c.batch_tokens:
        raise ConfigError(
            f"window_tokens ({c.window_tokens}) must be >= batch_tokens ({c.batch_tokens}): it would fill before a "
            "batch is there. Raise window_tokens, or lower batch_tokens"
        )
    least = c.batch_tokens if c.window_tokens is None else c.window_tokens
    if least is not None and c.capacity_tokens is not None and c.capacity_tokens < least:
        name = "batch_tokens" if c.window_tokens is None else "window_tokens"
        raise ConfigError(
            f"capacity_tokens ({c.capacity_tokens}) must be >= {name} ({least}): so many could never wait. Raise "
            f"capacity_tokens or lower {name}"
        )


def _check_range(c: BalancerConfig, least: int, most: int) -> None:
    """A number of rollouts per step that varies."""
    given = f"batch_size_range ({least}, {most})"
    if c.batch_tokens is not None:
        raise ConfigError(
            f"{given} and batch_tokens ({c.batch_tokens}) exclude one another: under batch_tokens a step has as many "
            "rollouts as its tokens ask for. Leave one out"
        )
    if c.policy != "window":
        raise ConfigError(f"{given} needs policy='window': {c.policy!r} sends the oldest batch_size. Leave it out")
    if c.sync != "step" or c.cost.padded:
        what = "a padded cost" if c.cost.padded else f"sync={c.sync!r}"
        raise ConfigError(
            f"{given} does not work with {what}: it looks for steps that are as long as the heaviest rank's sum. Leave "
            "batch_size_range out"
        )
    if not least <= c.batch_size <= most or least == most:
        raise ConfigError(
            f"batch_size ({c.batch_size}) is the mean of {given}: it must lie in it, and the range must be one. Widen "
            "batch_size_range, or leave it out for batch_size rollouts every time"
        )
    if most > c.capacity:
        raise ConfigError(
            f"{given} reaches above capacity ({c.capacity}): so many rollouts could never wait. Raise capacity, or "
            "lower batch_size_range"
        )
    if least < c.dp_size * c.micro_batch_multiple:
        raise ConfigError(
            f"{given} begins below dp_size ({c.dp_size}) x micro_batch_multiple ({c.micro_batch_multiple}): some "
            "micro-batches would be empty. Raise its least"
        )
    if c.min_batch_size > least:
        raise ConfigError(
            f"min_batch_size ({c.min_batch_size}) must be <= the least of {given}: a step that gives back what others "
            "took beyond batch_size has so few. Lower min_batch_size, or raise the least"
        )
    multiple = step_multiple(c.dp_size, c.counts, c.groups, c.group_size)
    if odd := [number for number in (least, c.batch_size, most) if number % multiple]:
        raise ConfigError(
            f"{given} and batch_size ({c.batch_size}) must be multiples of {multiple} with counts={c.counts!r}, "
            f"dp_size {c.dp_size} and group_size {c.group_size}: whole groups leave, and as many on every rank where "
            f"counts are equal. Change {' and '.join(map(str, odd))}"
        )
    if c.groups == "same_rank" and c.group_size is not None and least // c.group_size < c.dp_size:
        raise ConfigError(
            f"groups='same_rank' needs a group for every rank: {given} begins with {least // c.group_size} groups of "
            f"{c.group_size}, and dp_size is {c.dp_size}. Raise its least"
        )


def _check_groups(c: BalancerConfig) -> None:
    if c.group_size is None:
        return
    if c.group_size > c.batch_size:
        raise ConfigError(
            f"group_size ({c.group_size}) must be <= batch_size ({c.batch_size}): a group could not leave in one "
            "batch. Raise batch_size, or leave group_size out"
        )
    if c.groups != "free" and c.batch_size % c.group_size:
        raise ConfigError(
            f"batch_size ({c.batch_size}) must be a multiple of group_size ({c.group_size}) while groups={c.groups!r}: "
            "whole groups could not make a full batch. Change batch_size, or use groups='free'"
        )
    if c.groups != "free" and c.window > c.capacity // c.group_size * c.group_size:
        raise ConfigError(
            f"window ({c.window}) is more than the {c.capacity // c.group_size} whole groups of {c.group_size} that "
            f"fit into capacity ({c.capacity}): it could never fill. Raise capacity or lower window"
        )
    if c.groups == "same_rank" and c.batch_size // c.group_size < c.dp_size:
        raise ConfigError(
            f"groups='same_rank' needs a group for every rank: batch_size ({c.batch_size}) holds "
            f"{c.batch_size // c.group_size} groups of {c.group_size}, and dp_size is {c.dp_size}. Raise batch_size"
        )
    if c.groups == "same_rank" and c.counts == "equal" and (c.batch_size // c.group_size) % c.dp_size:
        raise ConfigError(
            f"groups='same_rank' with counts='equal' needs batch_size / group_size ({c.batch_size // c.group_size}) to "
            f"be a multiple of dp_size ({c.dp_size})"
        )
