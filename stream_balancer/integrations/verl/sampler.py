"""verl's V1 replay buffer, choosing: of the prompt groups that wait, those that make the ranks finish together.

    trainer.v1.sampler.custom_sampler.path=pkg://stream_balancer.integrations.verl.sampler
    trainer.v1.sampler.custom_sampler.name=BalancedReplayBuffer
    +trainer.v1.sampler.sampler_kwargs.dp_size=8

Everything but the choice is verl's own ``ReplayBufferAsync``: what waits, what is stale, filtered or failed, and what
is refilled. verl takes the oldest ``batch_size`` groups; here the planner chooses among all that wait, within
`max_skips` and verl's staleness limit, and the rows come ordered rank by rank. Written against verl 0.9.1.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from stream_balancer.integrations._plans import choose_groups
from stream_balancer.integrations.partitions import get_seqlen_balanced_partitions
from stream_balancer.integrations.verl.seqlen_balancing import workload

__all__ = ["BalancedReplayBuffer", "SamplerKnobs"]


class SamplerKnobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Knobs in ``trainer.v1.sampler.sampler_kwargs``."""

    dp_size: Annotated[int, msgspec.Meta(ge=1)]
    """Data-parallel ranks that a batch is split over."""
    max_skips: Annotated[int, msgspec.Meta(ge=0)] = 16
    """No group is passed over by more batches than this, as long as no more than (max_skips + 1) batches wait. verl's
    ``max_off_policy_threshold`` holds besides: a group that would be dropped as stale at the next step goes now."""
    window: int | None = None
    """Wait until this many groups can be chosen from; None: take the choice there is once a batch is complete."""
    deadline_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Seconds to wait for the window after a batch was complete, at most. Required with `window`."""
    filter_groups_metric: str | None = None
    """DAPO's group filter, which verl does not pass on to custom samplers: ``algorithm.filter_groups.metric``."""

    def __post_init__(self) -> None:
        if (self.window is None) != (self.deadline_s is None):
            raise ValueError(
                "window and deadline_s go together: a window may never fill (verl bounds the prompts in flight), and a "
                "deadline without a window never fires. Set both or neither"
            )


class BalancedReplayBuffer(ReplayBufferAsync):  # type: ignore[misc] # verl says no types
    """verl's ``ReplayBufferAsync``, but for the choice."""

    def __init__(self, trainer_mode: str, *args: Any, sampler_kwargs: Mapping[str, Any], **kwargs: Any) -> None:
        if trainer_mode == "sync":
            raise ValueError(
                "a sync trainer has exactly one batch in flight, so there is nothing to choose. Leave custom_sampler "
                "out, or use colocate_async or separate_async"
            )
        self.knobs = msgspec.convert(dict(sampler_kwargs), SamplerKnobs)  # a ValueError names what it refuses
        kwargs.setdefault("filter_groups_metric", self.knobs.filter_groups_metric)
        super().__init__(trainer_mode, *args, sampler_kwargs=sampler_kwargs, **kwargs)
        self._skips: dict[str, int] = {}  # group -> batches that passed it over
        self._global_steps = 0
        self._sampling = False
        self._complete_since: float | None = None
        self._report: dict[str, float] = {}

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Batch, and metrics (ours begin with ``training/window/``), as verl's: blocks until there is one."""
        self._global_steps = global_steps
        # verl asks whether there is enough at other times, too: only a sample waits for a window
        self._sampling, self._complete_since = True, None
        self._report = {}
        try:
            batch, metrics = super().sample(global_steps, partition_id, batch_size)
        finally:
            self._sampling = False
        return batch, {**metrics, **self._report}

    def _has_enough_samples(
        self, global_steps: int, partition_id: str, batch_size: int, sampleable_keys: set[str]
    ) -> bool:
        if not super()._has_enough_samples(global_steps, partition_id, batch_size, sampleable_keys):
            return False
        window = self.knobs.window
        if window is None or not self._sampling or partition_id == "val" or len(sampleable_keys) >= window:
            return True
        if not self.pending_keys[partition_id] and not self.running_keys[partition_id]:
            return True  # no more can come
        # verl asks again and again until this is True
        now = time.monotonic()
        self._complete_since = now if self._complete_since is None else self._complete_since
        return now - self._complete_since >= (self.knobs.deadline_s or 0.0)

    def _select_prompt_uids(
        self, partition_id: str, sampleable_keys: set[str], batch_size: int
    ) -> tuple[list[str], dict[str, dict[str, Any]], dict[str, int]]:
        # verl's own choice says whether a batch is complete, and brings what is known of the rows
        oldest, rows, steps = super()._select_prompt_uids(partition_id, sampleable_keys, batch_size)
        if partition_id == "val" or len(oldest) < batch_size:
            return oldest, rows, steps
        # a set has no order: the oldest first, as verl takes them
        by_age = sorted(sampleable_keys, key=lambda uid: (steps.get(uid, 0), uid))
        chosen = choose_groups(
            _lengths_by_group(rows, by_age),
            workload,
            batch_size,
            self.knobs.dp_size,
            skips=self._skips,
            max_skips=self.knobs.max_skips,
            step=self._global_steps,
            due={uid for uid in by_age if self._stale_next(steps.get(uid, self._global_steps))},
            equal_rollouts=True,
        )
        self._skips = {uid: self._skips.get(uid, 0) + 1 for uid in set(by_age).difference(chosen)}
        self._report = {
            "training/window/waiting": len(by_age),
            "training/window/skips_max": max(self._skips.values(), default=0),
        }
        return chosen, rows, steps

    def _stale_next(self, steps: int) -> bool:
        """verl would drop this group at the next step."""
        limit = self.max_off_policy_threshold
        return limit is not None and self.max_off_policy_strategy == "drop" and self._global_steps - steps + 2 > limit

    def _materialize_batch(self, partition_id: str, uids: list[str], rows: dict[str, dict[str, Any]]) -> Any:
        batch = super()._materialize_batch(partition_id, uids, rows)
        if partition_id != "val" and len(batch) and len(batch) % self.knobs.dp_size == 0:
            work = workload([tag.get("seq_len", 0) for tag in batch.tags])
            parts = get_seqlen_balanced_partitions(work, self.knobs.dp_size, equal_size=True)
            # verl cuts a batch in equal pieces, rank by rank
            batch.reorder([place for part in parts for place in part])
        return batch


def _lengths_by_group(rows: Mapping[str, Mapping[str, Any]], uids: Sequence[str]) -> dict[str, list[int]]:
    """Tokens of each group's trajectories; keys are ``{uid}_{session}_{index}``, as in verl."""
    lengths: dict[str, list[int]] = {uid: [] for uid in uids}
    for key, tag in rows.items():
        own = lengths.get(key.split("_")[0])
        if own is not None:
            own.append(int(tag.get("seq_len", 0)))
    return lengths


# a renamed method would never be called, and the choice silently be verl's
_REPLACED = {"_has_enough_samples", "_select_prompt_uids", "_materialize_batch"}
if missing := sorted(_REPLACED - set(dir(ReplayBufferAsync))):
    raise ImportError(f"this verl's ReplayBufferAsync has no {missing}; BalancedReplayBuffer is for verl 0.9.1")
