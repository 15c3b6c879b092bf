"""What every rank divides by in a step, when payloads may be gone with their producer: agreed before anyone trains.

::

    serve       PartialBatch(step)  -->  every rank        some payloads lie with their producers
    every rank  fetches, and says   -->  PayloadsFetched(step, missing)
    serve       Denominators(step)  -->  every rank        once all have answered: final, the same on all

A rollout whose payload is gone takes part as a padding copy of weight 0, so the plan and the number of micro-batches
stay; what is subtracted here is what it would have contributed. Of a shared rollout no rank trains on its part when
another has none. Pure: no event loop, no clock, nothing is sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain

from stream_balancer.core.executions import ExecutionKey, sizes_of
from stream_balancer.errors import WireError
from stream_balancer.types import Batch, RankBatch, Rollout, SharedRollout
from stream_balancer.types.shared import whole_rollouts
from stream_balancer.wire.messages import Denominators, MiniBatchDenominators, MissingRollout, ResizedExecution

__all__ = ["StepAgreement"]


class StepAgreement:
    """One step whose ranks fetch payloads: who has answered, and what all divide by.

    Why one answer from every rank: a rank that trained before another one found a payload gone would have divided by
    more than the other, and no later message could repair its gradient.
    """

    def __init__(self, batch: Batch) -> None:
        """``batch``: as dispatched. O(rollouts)."""
        self.step = batch.step
        self._rollouts = [rank_batch.rollouts for rank_batch in batch.ranks]
        self._missing: list[frozenset[int] | None] = [None] * len(batch.ranks)
        first = batch.ranks[0]
        self._planned = _planned(first)
        parts = [one.mini_batches for one in batch.ranks] if first.mini_batch_sizes else []
        self._mini_batches = [
            (_planned(of_ranks[0]), frozenset(r.rollout_id for part in of_ranks for r in part.rollouts))
            for of_ranks in zip(*parts, strict=True)
        ]
        self.final: Denominators | None = None
        """What every rank divides by; None until all have answered."""

    def fetched(self, rank: int, missing: Iterable[MissingRollout]) -> list[Rollout]:
        """A rank has all but these; -> the rollouts that are missing. O(missing).

        A rank that was started again answers again. Before the step is final that replaces its first answer; afterwards
        what it misses in addition is masked there and not subtracted: agreement matters more than that part of one
        step. Raises WireError for a rollout that is not the rank's.
        """
        rollouts = self._rollouts[rank]
        indices = frozenset(one.index for one in missing)
        if any(one.index >= len(rollouts) or rollouts[one.index].rollout_id != one.rollout_id for one in missing):
            raise WireError(f"rank {rank} misses rollouts of step {self.step} that it was not given")
        if self.final is None:
            self._missing[rank] = indices
            if None not in self._missing:
                self.final = self._agreed()
        return [rollouts[index] for index in sorted(indices) if not rollouts[index].is_padding]

    def lost(self, rank: int) -> None:
        """A rank is gone. Its next incarnation fetches anew, and until then nothing is final that was not."""
        if self.final is None:
            self._missing[rank] = None

    def _agreed(self) -> Denominators:
        missing = [
            rollouts[index]
            for rollouts, indices in zip(self._rollouts, self._missing, strict=True)
            for index in indices or ()
            if not rollouts[index].is_padding  # a padding copy was never counted
        ]
        shared = {rollout.rollout_id for rollout in missing if isinstance(rollout, SharedRollout)}
        names = {rollout.rollout_id for rollout in missing}
        gone = [rollout for rollout in self._all() if rollout.rollout_id in names]  # each once, however many miss it
        lost, left = sizes_of(gone), sizes_of(self._left(gone)) if gone else {}
        whole = _less(self._planned, gone, left.keys())
        return Denominators(
            step=self.step,
            rollouts=whole.rollouts,
            tokens=whole.tokens,
            loss_tokens=whole.loss_tokens,
            executions=whole.executions,
            resized=tuple(
                ResizedExecution(*key, *left[key]) for key in lost if key in left and not isinstance(key, str)
            ),
            mini_batches=tuple(
                _less(planned, [rollout for rollout in gone if rollout.rollout_id in names], left.keys())
                for planned, names in self._mini_batches
            ),
            gone=tuple(sorted(shared)),
        )

    def _all(self) -> Iterator[Rollout]:
        return (one for one in whole_rollouts(chain.from_iterable(self._rollouts)) if not one.is_padding)

    def _left(self, gone: Sequence[Rollout]) -> list[Rollout]:
        names = {rollout.rollout_id for rollout in gone}
        return [rollout for rollout in self._all() if rollout.rollout_id not in names]


def _planned(batch: RankBatch) -> MiniBatchDenominators:
    return MiniBatchDenominators(
        batch.global_num_rollouts, batch.global_num_tokens, batch.global_num_loss_tokens, batch.global_num_executions
    )


def _less(
    planned: MiniBatchDenominators, gone: Sequence[Rollout], left: Collection[ExecutionKey]
) -> MiniBatchDenominators:
    """Without what is gone of it. ``left``: executions of which something is left."""
    alone = sum(rollout.execution_id is None for rollout in gone)
    # At least 1: where everything is gone the sums are 0, and 0 / 0 would put NaN into every weight.
    return MiniBatchDenominators(
        rollouts=max(planned.rollouts - len(gone), 1),
        tokens=max(planned.tokens - sum(rollout.num_tokens for rollout in gone), 1),
        loss_tokens=max(
            planned.loss_tokens - sum(rollout.num_loss_tokens for rollout in gone), min(planned.loss_tokens, 1)
        ),
        executions=max(planned.executions - alone - len(sizes_of(gone).keys() - left), 1),
    )
