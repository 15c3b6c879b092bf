"""Knobs of a balancer: which exist, and what follows from them.

Values only: nothing that decides at run time may enter, and nothing that refuses: that is ``checks``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

from stream_balancer.cost import CostModel, TokenCost
from stream_balancer.planning import smallest_max_skips
from stream_balancer.planning.arrays import Counts, Oversize, Sync
from stream_balancer.planning.plan import Groups
from stream_balancer.planning.selection import most_for_max_skips

__all__ = ["USUAL_MAX_SKIPS", "Knobs", "MicroBatchOrder", "OnStale", "Policy"]

OnStale: TypeAlias = Literal["evict", "send"]
Policy: TypeAlias = Literal["window", "fifo", "round_robin"]
MicroBatchOrder: TypeAlias = Literal["heavy_first", "pipeline"]

USUAL_MAX_SKIPS = 16
"""The value of "auto" unless more are needed; measured in bench/results/planning_measured.md."""

if TYPE_CHECKING:
    Given = TypeVar("Given", contravariant=True)
    Read = TypeVar("Read", covariant=True)

    class Knob(Generic[Given, Read]):
        """A knob that may be given as more than what it is read as, once the others are known."""

        def __get__(self, config: object, owner: object) -> Read: ...
        def __set__(self, config: object, value: Given) -> None: ...


TOKENS: Any = TokenCost()
DERIVED: Any = None  # a default that BalancerConfig computes from the other knobs
AUTO: Any = "auto"  # the same, for a knob whose None is a value: no bound


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """Knobs, and the figures that follow from them: what ``checks`` judges. Users make a :class:`BalancerConfig`."""

    dp_size: int
    """DP ranks that take part in every step."""
    batch_size: Knob[int | None, int] = DERIVED
    """Rollouts per dispatch, over all ranks; with ``batch_size_range``, on average. Under ``batch_tokens``, which takes
    its place, it is read as the fewest that a full dispatch has: one for each micro-batch that every rank must run, in
    whole groups."""
    batch_size_range: tuple[int, int] | None = None
    """Least and most rollouts per dispatch, ``(16, 64)`` for example: a step that is long because of an outlier takes
    more rollouts, so that all ranks have work, and later steps take fewer until the mean is ``batch_size`` again. What
    a loss divides by varies with it: see docs/planning.md. None = ``batch_size`` every time."""
    batch_tokens: int | None = None
    """Tokens per dispatch, instead of ``batch_size``: so many rollouts (or whole groups) go that their tokens come
    nearest to this. More go where ``max_skips`` demands it, or where some rank would get none. See
    docs/planning.md for what it costs."""
    window: Knob[int | Literal["auto"], int] = DERIVED
    """How many must wait: dispatch once this many rollouts do, chosen from all that wait. Default ``2 * batch_size``:
    most of the balance a window can buy, for one dispatch of mean queueing delay; every further ``batch_size`` adds
    another (Little's law). ``"auto"``: the smallest of :attr:`auto_windows` from which waiting longer would save hardly
    any idle time, fitted to the lengths that come; read back, it is the one in force. See docs/tuning.md."""
    window_tokens: int | None = None
    """Under ``batch_tokens``, instead of ``window``: dispatch once this many tokens wait. Default ``2 * batch_tokens``
    if no ``window`` is given."""
    deadline_s: float | None = None
    """... or once the oldest has waited this long, in seconds. Then a batch may be smaller than ``batch_size``, which
    is why the default is None: wait for the window."""
    max_skips: Knob[int | Literal["auto"] | None, int | None] = AUTO
    """No rollout is passed over by more dispatches than this. "auto" (read back, it is the number): 16, or what the
    window and the capacity need. The strong knob on heavy tails: twice as many leave a third to four fifths of the
    idle time, at the same mean delay, and the longest wait is twice as long. None = no bound: outliers may wait for
    the drain. Holds while no more than ``capacity`` wait: see bench/results/planning_proofs.md."""
    capacity: int = DERIVED
    """How many may wait: ``put()`` waits once this many rollouts could leave. While the trainer is busy more than
    ``window`` wait, so a larger one gives more to choose from, and older rollouts: see docs/tuning.md. Those whose
    groups lack siblings do not count: with what they lack they are limited by :attr:`most_waiting`. Default
    ``2 * window``."""
    capacity_tokens: int | None = None
    """... or once rollouts of this many tokens could leave. Default ``2 * window_tokens``; with a ``window`` in
    rollouts under ``batch_tokens`` as many as ``max_skips`` allows; else None = no such limit."""
    capacity_bytes: int | None = None
    """... or once the waiting rollouts' tensors are this many bytes. None = no such limit. While a put is held back
    by any limit, the window counts as full; while fewer than ``min_batch_size`` could leave, no limit holds a
    put back."""
    min_batch_size: int = DERIVED
    """Smallest batch a deadline may send. Default ``dp_size``, so that every rank has something to run."""
    counts: Counts = "free"
    """"equal": the same number of rollouts on every rank (to within one). "free" balances better."""
    sync: Sync = "step"
    """Where ranks meet: once per step, or at every "micro_batch" (FSDP, ZeRO-3)."""
    max_tokens_per_micro_batch: int | None = None
    """Hard cap on the tokens of a micro-batch, never exceeded (padding counts under a padded cost). None = one
    micro-batch."""
    oversize: Oversize = "refuse"
    """A rollout above the cap, if not even sharing it by ``cp_sizes`` keeps it below, is refused at put, or goes in a
    micro-batch "alone"."""
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
    mini_batches: int = 1
    """Mini-batches of a step, each with an optimizer step and denominators of its own (PPO): see
    :attr:`RankBatch.mini_batches`. Each has ``batch_size / mini_batches`` rollouts, and as many micro-batches on every
    rank. Samples of an execution stay together in one, and so do groups on the "same_rank"; others are cut. A step of
    too few rollouts for all ranks in so many has fewer."""
    cp_sizes: tuple[int, ...] = (1,)
    """By how many ranks a rollout may be shared (context parallelism), ``(1, 2, 4, 8)`` for example: powers of two,
    ascending, from 1. A rollout that is longer than a rank's fair share of the step goes to a block of so many
    neighbouring ranks, each with a slice of its tokens. Sizes above ``dp_size`` are not used. ``(1,)`` = each rollout
    on one rank. See docs/planning.md."""
    cp_overhead: float = 0.15
    """Price of sharing: a rollout of cost c on g ranks costs each ``c / g * (1 + cp_overhead * log2(g))``. A
    ``CalibratedCost`` learns it from steps in which ranks share one, beginning with this."""
    cp_min_tokens: int = 2048
    """A rollout is shared by at most ``num_tokens / cp_min_tokens`` ranks, or by so many as it takes to bring it within
    ``max_tokens_per_micro_batch``."""
    cost: Knob[CostModel | str, CostModel] = TOKENS
    """How much work is a length: a cost model, or one of "tokens", "quadratic", "quadratic:LINEAR:QUADRATIC", "padded",
    or the path of a Hugging Face config.json (its FLOPs)."""
    speeds: tuple[float, ...] | None = None
    """Relative speed of each rank: a rank of speed 0.5 gets half the work. None = all alike."""
    group_size: int | None = None
    """Siblings per group (GRPO), which a ``group_id`` names: executions, each a rollout or all with one
    ``execution_id``. Every rollout must have a group then, unless groups are "free". None = groups play no part."""
    groups: Groups = "same_batch"
    """Siblings leave in the "same_batch", on the "same_rank" (costs balance), or "free". Only with ``group_size``."""
    share_prefixes: bool = False
    """The trainer computes the prefix of siblings (``Rollout.prefix``: their prompt) once for those of a micro-batch,
    as :meth:`MicroBatch.tree` lays them out. Then it is planned and counted so: a group is split over ranks where that
    is worth another copy of its prefix, and no batch takes longer than it would without sharing. A rollout
    that brings its own ``cost`` has no price for its prefix, and counts as it is. See docs/sharing.md."""
    stratum_shares: Mapping[str, float] | None = None
    """Least share of every step's rollouts for some strata (environments, data sets), as ``{"math": 0.25}``: at least
    so many of those that wait go, and one (or one group) at the least. What must go for its age comes first. A
    rollout's stratum is its ``metadata["stratum"]``. None = no shares."""
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
    """Column of your rollouts that says which tokens are trained on (non-zero = trained; the first token of a rollout
    never is). Under whatever name you put it, ranks find it as ``loss_mask``. "loss_mask" may be left out where every
    token is trained on, any other name must be there; None = every token is trained on. A rollout without it is refused
    if it has another column that looks like one (``response_mask``, ``completion_mask``, ``action_mask``, ``labels``,
    ...)."""
    policy: Policy = "window"
    """"window" is what this library is for. "fifo" (arrival order, best partition) and "round_robin" (arrival order,
    to the ranks in turn) are what is usual elsewhere: run them to measure, in your own training, what the window
    buys."""

    auto_windows: tuple[int, ...] = field(init=False)
    """Windows that ``window="auto"`` chooses from: one to three batches, as far as ``capacity``, ``max_skips`` and
    ``max_staleness`` allow. Empty where the window is fixed."""

    _given: Mapping[str, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:  # no abstract method: with a metaclass help() would not show the fields' texts
        raise TypeError("knobs alone are not checked: make a BalancerConfig")

    @property
    def _batches_of_window(self) -> int:
        """How many batches a window holds by default."""
        return 2 if self.policy == "window" else 1

    @property
    def _largest_window(self) -> int:
        """Largest window that may be in force."""
        return max(self.auto_windows, default=self.window)

    @property
    def tracked_group_size(self) -> int | None:
        """Siblings that a group must have before it may leave; None where groups play no part."""
        return None if self.groups == "free" else self.group_size

    @property
    def _whole(self) -> int:
        """Rollouts that leave together: the siblings of a group, or one."""
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
        return max(self._least_max_skips_at(self._largest_window, self.capacity), 1)

    def _least_max_skips_at(self, window: int, capacity: int) -> int:
        """Smallest ``max_skips`` that works with another window and capacity, both in rollouts."""
        return smallest_max_skips(window, self.batch_size, capacity, self._whole, self.least_batch_size)

    @property
    def most_waiting(self) -> int:
        """Rollouts that may wait at once, together with the siblings that their groups lack: ``capacity``, or where
        siblings leave together as many as ``max_skips`` (None: as 16) is a guarantee for.
        """
        if self.tracked_group_size is None or self.batch_tokens is not None:
            return self.capacity
        skips = USUAL_MAX_SKIPS if self.max_skips is None else self.max_skips
        return max(self.capacity, most_for_max_skips(skips, self.least_batch_size, self._whole))

    @property
    def most_waiting_tokens(self) -> int | None:
        """Tokens from which on nothing more is let in but siblings of what waits: ``capacity_tokens``, or where
        siblings leave together as many as ``max_skips`` (None: as 16) is a guarantee for; None = no such limit.
        """
        if self.capacity_tokens is None or self.tracked_group_size is None:
            return self.capacity_tokens
        if self.batch_tokens is None:
            return None  # the guarantee counts rollouts: see most_waiting
        return max(self.capacity_tokens, (self.max_skips or USUAL_MAX_SKIPS) * self.batch_tokens)

    @property
    def longest_rollout(self) -> int | None:
        """Tokens that a rollout may have to stay within ``max_tokens_per_micro_batch``, shared by as many ranks as may
        (two equal chunks a rank); None = no cap."""
        cap = self.max_tokens_per_micro_batch
        if cap is None:
            return None
        return max(cap, *(2 * size * (cap // 2) for size in self.cp_sizes if size <= self.dp_size))

    @property
    def least_batch_size(self) -> int:
        """Rollouts that every full batch has at least."""
        return self.batch_size if self.batch_size_range is None else self.batch_size_range[0]
