"""NeMo-RL: a sampler for its single controller.

::

    async_rl:
      max_buffered_rollouts: 96          # prompt groups: steps' worth of max_staleness_versions + 1
      sampler:
        name: custom
        target: "stream_balancer.integrations.nemo_rl:BalancedSampler"
        dp_size: 8
        max_staleness_versions: 2
        window_groups: 48

The sampler chooses, from the prompt groups that are ready, those that balance over the ranks; NeMo-RL deals them out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio

import stream_balancer as sb
from stream_balancer.integrations._plans import choose_groups

__all__ = ["BalancedSampler"]

_GATE_POLL_S = 0.005  # NeMo-RL offers a version to read, and nothing to wait for


class BalancedSampler:
    """NeMo-RL's ``PromptGroupSampler``: the best-balanced subset of the prompt groups that are ready.

    Admission is gated as its ``ready_first`` policy gates: at most ``max_staleness_versions`` (K) steps ahead of
    the trainer, and nothing is ever thrown away. A group that is v versions old may be passed over K - v times more:
    the planner keeps every such deadline feasible, and admission lets in no more than K + 1 steps can take. So none is
    older than K when it is selected, but one that was still being generated, and at worst those it then displaces.
    """

    def __init__(
        self,
        buffer: Any,
        *,
        dp_size: int,
        max_staleness_versions: int = 2,
        window_groups: int | None = None,
        cost: str | sb.cost.CostModel = "quadratic",
    ) -> None:
        """``buffer``: NeMo-RL's TQReplayBuffer. ``max_staleness_versions``: with 2 or more there is something to choose
        from. ``window_groups``: wait for so many ready groups, as long as any is still being generated; None = choose
        from whatever is ready once NeMo-RL's own minimum is. More than ``max_staleness_versions`` steps' groups leave
        less to choose: the oldest must go. ``cost``: as ``BalancerConfig`` takes it, in text too."""
        window = 1 if window_groups is None else window_groups
        if max_staleness_versions < 0 or window < 1:
            raise ValueError(
                f"max_staleness_versions ({max_staleness_versions}) must be >= 0, and window_groups ({window_groups}) "
                ">= 1"
            )
        self._cost: Any = sb.BalancerConfig(dp_size=dp_size, batch_size=dp_size, cost=cost).cost
        self._buffer = buffer
        self._dp_size = dp_size
        self._lookahead = max_staleness_versions
        self._window = window
        self._dispatched = -1
        self._selections = 0

    async def admit(self, *, trainer_version_fn: Callable[[], int]) -> int | None:
        """Wait until the next prompt batch may be generated. It is stamped with no target step."""
        while self._dispatched >= trainer_version_fn() + self._lookahead:  # noqa: ASYNC110 - the protocol has no event
            await anyio.sleep(_GATE_POLL_S)
        self._dispatched += 1
        return None

    async def select(
        self, *, current_train_weight: int, min_prompt_groups: int, max_prompt_groups: int
    ) -> tuple[Any | None, int]:
        """Up to ``max_prompt_groups`` groups that balance, in the order they came, or ``(None, 0)`` while too few are
        ready. They leave the buffer; their rows stay in the data plane."""
        if not 1 <= min_prompt_groups <= max_prompt_groups:
            raise ValueError(
                f"1 <= min_prompt_groups ({min_prompt_groups}) <= max_prompt_groups ({max_prompt_groups}) must hold"
            )
        buffer = self._buffer
        ready = [
            slot
            for slot, weight in enumerate(buffer.start_weight_list)
            if buffer.ready_list[slot] and weight <= current_train_weight
        ]
        # where nothing more is on its way, waiting for the window would never end
        if len(ready) < max(min_prompt_groups, 1 if all(buffer.ready_list) else self._window):
            return None, 0
        metas = {slot: buffer.meta_list[slot] for slot in ready}
        if any(meta.sequence_lengths is None for meta in metas.values()):
            raise ValueError("a prompt group has no sequence_lengths: there is nothing to balance by")
        ages = {slot: current_train_weight - buffer.start_weight_list[slot] for slot in ready}
        chosen = choose_groups(
            {slot: meta.sequence_lengths for slot, meta in metas.items()},
            self._cost,
            min(max_prompt_groups, len(ready)),
            self._dp_size,
            # one that was still being generated may be older than all: it is as due as can be
            skips={slot: min(age, self._lookahead) for slot, age in ages.items()},
            max_skips=self._lookahead,
            step=self._selections,
        )
        self._selections += 1
        first, *rest = (metas[slot] for slot in chosen)
        # the trainer fetches rows by this meta, so only the buffer forgets them
        await buffer.remove(chosen, remove_in_dp=False)
        return first.concat(*rest), len(chosen)

    async def evict(self, *, current_train_weight: int) -> int:
        """Nothing is thrown away: admission keeps groups young enough."""
        return 0

    def should_abort_inflight(self, *, start_weight_version: int, current_train_weight: int) -> bool:
        """Every rollout that was begun will be trained on."""
        return False

    @property
    def is_on_policy(self) -> bool:
        """True if no rollout may be older than the trainer's weights."""
        return self._lookahead == 0

    def required_buffer_capacity(self, groups_per_step: int) -> int | None:
        """The groups that admission lets in. Raises ValueError if the window could never fill."""
        capacity = groups_per_step * (self._lookahead + 1)
        if self._window > capacity:
            raise ValueError(
                f"window_groups ({self._window}) could never fill: max_staleness_versions={self._lookahead} lets in "
                f"{capacity} groups of {groups_per_step} a step. Raise it, or lower window_groups"
            )
        return capacity

    def set_dispatch_index(self, resume_from_step: int) -> None:
        """Continue from a checkpoint at this step."""
        if resume_from_step < 0:
            raise ValueError(f"resume_from_step must be >= 0, not {resume_from_step}")
        self._dispatched = resume_from_step - 1
