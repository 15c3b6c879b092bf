"""What has been accepted and is not forgotten yet: ids, and the batches in flight.

::

    dispatch --> in flight --acknowledge--> done
                 |   ^  `--mark_missing: some of it will count as evicted then
                 |   `--redelivered------.
                 `--nack, redeliver------> to be delivered again, same plan

A rollout that waits is the buffer's; here is what became of it. Nothing is decided in this module. Pure.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from stream_balancer.core.counters import TrainingAges
from stream_balancer.types import Batch

__all__ = ["Ledger", "RolloutIds"]


class RolloutIds:
    """The ids of rollouts that are held (they wait or are in flight), and of the last ones that are done."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.past: OrderedDict[str, None] = OrderedDict()

    def why_known(self, rollout_id: str) -> str:
        """Why a put of a known id is refused."""
        if rollout_id in self.held:
            return (
                f"a rollout with rollout_id {rollout_id!r} is already held: it waits or is in flight. If this is a "
                "retry, the first put was accepted; else give every rollout an id of its own"
            )
        return (
            f"a rollout with rollout_id {rollout_id!r} was accepted before and is done (trained on or evicted). "
            "If this is a retry, all is well; else give every rollout an id of its own"
        )

    def finish(self, rollout_ids: Iterable[str], remember: int) -> None:
        """These are done: no longer held; the last ``remember`` of all are known. O(1) each."""
        held, past = self.held, self.past
        for rollout_id in rollout_ids:
            held.discard(rollout_id)
            past[rollout_id] = None
        while len(past) > remember:
            past.popitem(last=False)


class Ledger:
    """Batches in flight, oldest first, and which of them the trainer is through with."""

    def __init__(self) -> None:
        self.next_step = 0
        """Number of the next new batch."""
        self.training_ages = TrainingAges()
        """How old rollouts were when their training began."""
        self._in_flight: dict[int, Batch] = {}  # by step, and in the order of steps, since steps only grow
        self._to_redeliver: deque[Batch] = deque()  # in flight, and older than anything new
        self._trained: set[int] = set()  # steps the trainer is through with, not acknowledged yet
        self._begun: set[int] = set()  # steps that are being trained on, or were
        self._missing: dict[int, set[str]] = {}  # by step: rollouts that a rank trains it without

    # -- dispatch and redelivery ---------------------------------------------------------------------------------------

    def dispatch(self, batch: Batch) -> None:
        """A new batch is in flight."""
        self._in_flight[batch.step] = batch
        self.next_step += 1

    def next_redelivery(self) -> Batch | None:
        """The oldest batch to be delivered again; :meth:`redelivered` must follow."""
        return self._to_redeliver[0] if self._to_redeliver else None

    def redelivered(self, batch: Batch) -> None:
        """That one, or what was planned of it for other ranks, is as if dispatched now."""
        self._to_redeliver.popleft()
        self._in_flight[batch.step] = batch

    def redeliver(self, batch: Batch) -> None:
        """A batch that reached nobody is delivered again, before any other."""
        # In front: it was taken before all the others that wait here, or it would have been one of them.
        self._to_redeliver.appendleft(batch)
        self._forget_training(batch.step)

    def nack(self, step: int) -> int:
        """A batch was not trained on: it is delivered again, older steps first. -> its rollouts, 0 if it was to be
        already. Raises ValueError for a step that is not in flight. O(batches in flight)."""
        batch = self._in_flight.get(step)
        if batch is None:
            raise ValueError(
                f"step {step} cannot be given again: it was never dispatched, or is already acknowledged. "
                f"In flight: {sorted(self._in_flight) or 'nothing'}"
            )
        if batch in self._to_redeliver:
            return 0  # asked for twice, by a rank and by the user: it comes again once
        self._to_redeliver = deque(sorted([*self._to_redeliver, batch], key=lambda one: one.step))
        self._forget_training(step)
        return batch.num_rollouts

    def restore(self, batches: Sequence[Batch], next_step: int) -> None:
        """Another balancer's batches in flight, all to be delivered again."""
        self._in_flight = {batch.step: batch for batch in batches}
        # how far ranks had come with them, nobody here knows
        self._to_redeliver = deque(batches)
        self.next_step = next_step

    # -- training and acknowledgement ----------------------------------------------------------------------------------

    def begin_training(self, version: int | None) -> None:
        """The oldest batch that the trainer is not through with is trained on now: its age counts. O(batches in
        flight)."""
        # A batch that nobody has is not trained on, however old it is.
        waits = {batch.step for batch in self._to_redeliver}
        step = min((step for step in self._in_flight if step not in self._trained and step not in waits), default=None)
        if step is not None and step not in self._begun:
            self._begun.add(step)
            self.training_ages.record(self._in_flight[step], version)

    def finish_training(self, step: int) -> bool:
        """The trainer is through with a batch that it acknowledges later. False if it is not in flight."""
        if step in self._in_flight:
            self._trained.add(step)
        return step in self._in_flight

    def mark_missing(self, step: int, rollout_ids: Iterable[str]) -> None:
        """A rank trains this step without these rollouts, whose payloads are lost. May be repeated."""
        batch = self._in_flight.get(step)
        if batch is not None:
            there = {rollout.rollout_id for rollout in batch.rollouts if not rollout.is_padding}
            self._missing.setdefault(step, set()).update(there.intersection(rollout_ids))

    def acknowledge(self, step: int) -> tuple[Batch, set[str]]:
        """A batch is done. -> it, and the ids of its rollouts that were missing. Raises ValueError for a step that is
        not in flight."""
        batch = self._in_flight.pop(step, None)
        if batch is None:
            raise ValueError(
                f"step {step} is not in flight: it was never dispatched, or is already acknowledged. "
                f"In flight: {sorted(self._in_flight) or 'nothing'}"
            )
        if batch in self._to_redeliver:
            self._to_redeliver.remove(batch)  # a checkpoint held it after all
        self._forget_training(step)
        return batch, self._missing.pop(step, set())

    def _forget_training(self, step: int) -> None:
        self._begun.discard(step)
        self._trained.discard(step)

    # -- questions -----------------------------------------------------------------------------------------------------

    @property
    def steps_ahead(self) -> int:
        """Batches that the trainer is not through with: each may make a version before another one is trained."""
        return len(self._in_flight) - len(self._trained)  # those to be delivered again are still ahead

    @property
    def redelivers(self) -> bool:
        """Whether a batch is to be delivered again."""
        return bool(self._to_redeliver)

    @property
    def num_redelivering(self) -> int:
        """Rollouts in batches to be delivered again."""
        return sum(batch.num_rollouts for batch in self._to_redeliver)

    def get(self, step: int) -> Batch | None:
        """The batch of a step that is not acknowledged."""
        return self._in_flight.get(step)

    def batches(self) -> tuple[Batch, ...]:
        """All that is not acknowledged, oldest first."""
        return tuple(self._in_flight.values())

    def delivered(self) -> tuple[Batch, ...]:
        """Batches that somebody has: not those to be delivered again. Oldest first."""
        again = {batch.step for batch in self._to_redeliver}
        return tuple(batch for batch in self._in_flight.values() if batch.step not in again)

    def steps_through(self, step: int) -> list[int]:
        """Steps in flight up to and including this one, ascending."""
        return sorted(number for number in self._in_flight if number <= step)

    def check(self) -> None:
        """Verify every invariant; for tests."""
        assert self._trained <= self._in_flight.keys() >= self._begun
        assert self._missing.keys() <= self._in_flight.keys()
        assert all(self._in_flight.get(batch.step) is batch for batch in self._to_redeliver)
        assert not {batch.step for batch in self._to_redeliver} & (self._trained | self._begun)
        assert max(self._in_flight, default=-1) < self.next_step
