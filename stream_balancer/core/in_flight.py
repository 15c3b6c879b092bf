"""Accepted rollouts that are not forgotten yet: ids, and the batches in flight.

::

    dispatch --> in flight --acknowledge--> done
                 |   ^  |--mark_missing: some of it will count as evicted then
                 |   |  `--replan: another plan of the same step, perhaps without what is missing
                 |   `--redelivered------.
                 `--nack, redeliver------> to be delivered again, same plan

A rollout that waits is the buffer's; here is what became of it. Nothing is decided in this module. Pure.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from stream_balancer.core.counters import TrainingAges
from stream_balancer.rollouts import Batch, Rollout


class RolloutIds:
    """The ids of rollouts that are held (they wait or are in flight), and of the last ones that are done."""

    remember: int = 100_000
    """Finished ids that stay known, about 100 bytes each: a producer that retries a put hears that it was accepted."""

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

    def finish(self, rollout_ids: Iterable[str]) -> None:
        """Ids that are done: trained on, or evicted. The last ``remember`` stay known. O(1) each."""
        held, past = self.held, self.past
        for rollout_id in rollout_ids:
            held.discard(rollout_id)
            past[rollout_id] = None
        while len(past) > self.remember:
            past.popitem(last=False)


class StepTiming(NamedTuple):
    """Report of one rank on one step."""

    step: int
    rank: int
    seconds: float
    """Seconds of compute."""
    own: bool = True
    """The rank did not wait for others in them; only such seconds teach a ``CalibratedCost``."""
    waited_s: float | None = None
    """From asking for its rank batch to taking it; None = as long as the balancer waited for rollouts."""
    ready_s: float = 0.0
    """How long it had been ready for more when the last rank was."""


@dataclass(eq=False, slots=True)
class _Flight:
    """A batch in flight."""

    batch: Batch
    begun: bool = False
    """The batch is being trained on, or was."""
    trained: bool = False
    """The trainer is through with it."""
    missing: dict[str, Rollout] = field(default_factory=dict)
    """Rollouts by id whose payloads are lost: the step is trained without them."""
    left_out: dict[str, Rollout] = field(default_factory=dict)
    """Those of them that the batch does not contain: the step was planned again without them."""
    timings: dict[int, StepTiming] = field(default_factory=dict)
    """By rank, as far as they have reported."""


class BatchesInFlight:
    """Batches in flight, oldest first, and which of them the trainer is through with."""

    def __init__(self) -> None:
        self.next_step = 0
        """Number of the next new batch."""
        self.training_ages = TrainingAges()
        """How old rollouts were when their training began."""
        # by step, and in the order of steps, since steps only grow
        self._flights: dict[int, _Flight] = {}
        self.again: set[int] = set()
        """Steps to be delivered again: older than anything new."""

    # -- dispatch and redelivery ---------------------------------------------------------------------------------------

    def dispatch(self, batch: Batch) -> None:
        """A new batch is in flight."""
        self._flights[batch.step] = _Flight(batch)
        self.next_step += 1

    def next_redelivery(self) -> Batch | None:
        """The oldest batch to be delivered again; :meth:`redelivered` must follow."""
        return self._flights[min(self.again)].batch if self.again else None

    def redelivered(self, batch: Batch) -> None:
        """The batch, or its plan for other ranks, is as if dispatched now."""
        self.again.remove(batch.step)
        flight = self._flights[batch.step]
        if len(flight.batch.ranks) != len(batch.ranks):
            # ranks of the old plan had other rollouts than those that carry this step now
            flight.timings = {}
        flight.batch = batch

    def redeliver(self, step: int) -> int:
        """A batch that reached nobody, or was not trained on, is delivered again, older steps first. -> its rollouts, 0
        if it was to be already. Raises ValueError for a step that is not in flight."""
        flight = self._flight(step)
        # asked for twice, by a rank and by the user: it comes again once
        number = 0 if step in self.again else flight.batch.num_rollouts
        flight.begun = flight.trained = False
        self.again.add(step)
        return number

    def restore(
        self, batches: Sequence[Batch], next_step: int, left_out: Mapping[int, Sequence[Rollout]] = MappingProxyType({})
    ) -> None:
        """Another balancer's batches in flight, all to be delivered again. ``left_out``: see :meth:`left_out`."""
        for batch in batches:
            gone = {one.rollout_id: one for one in left_out.get(batch.step, ())}
            self._flights[batch.step] = _Flight(batch, missing=gone, left_out=dict(gone))
        # how far ranks had come with them, nobody here knows
        self.again = set(self._flights)
        self.next_step = next_step

    # -- training and acknowledgement ----------------------------------------------------------------------------------

    def begin_training(self, version: int | None) -> None:
        """The oldest batch that the trainer is not through with is trained on now: its age counts. O(batches in
        flight)."""
        for step, flight in self._flights.items():
            # A batch that nobody has is not trained on, however old it is.
            if not flight.trained and step not in self.again:
                if not flight.begun:
                    flight.begun = True
                    self.training_ages.record(flight.batch, version)
                return

    def finish_training(self, step: int) -> bool:
        """The trainer is through with a batch that it acknowledges later. False if it is not in flight."""
        if step in self._flights:
            self._flights[step].trained = True
        return step in self._flights

    def time(self, timing: StepTiming) -> list[StepTiming] | None:
        """A rank reports its seconds. -> what all ranks of its step have reported, in rank order; None while one is
        missing, and for a step that is not in flight. Raises ValueError for a rank that the step was not planned for,
        and for seconds that cannot be."""
        flight = self._flights.get(timing.step)
        if flight is None:
            return None
        last = len(flight.batch.ranks) - 1
        if not 0 <= timing.rank <= last:
            raise ValueError(f"rank {timing.rank} has no part in step {timing.step}: its ranks are 0 to {last}")
        for seconds in (timing.seconds, timing.waited_s or 0.0, timing.ready_s):
            if not 0.0 <= seconds < math.inf:
                raise ValueError(f"seconds of a rank must be >= 0 and finite, not {seconds}")
        # said twice, after a broken link: the later word counts
        flight.timings[timing.rank] = timing
        if len(flight.timings) < len(flight.batch.ranks):
            return None
        timings, flight.timings = flight.timings, {}
        return [timings[rank] for rank in range(len(timings))]

    def mark_missing(self, step: int, rollout_ids: Iterable[str]) -> None:
        """A rank trains this step without these rollouts, whose payloads are lost. May be repeated."""
        if step in self._flights and (missing := set(rollout_ids)):
            flight = self._flights[step]
            found = (one for one in flight.batch.rollouts if one.rollout_id in missing and not one.is_padding)
            flight.missing.update((one.rollout_id, one) for one in found)

    def planned(self, step: int) -> tuple[Batch, Collection[str]]:
        """The batch of a step, and the ids of its missing rollouts. Raises ValueError for a step not in flight."""
        flight = self._flight(step)
        return flight.batch, flight.missing

    def replan(self, batch: Batch) -> None:
        """Another plan of a step in flight replaces the plan of before, also what ranks have reported of it."""
        flight = self._flights[batch.step]
        flight.batch, flight.timings, flight.left_out = batch, {}, dict(flight.missing)

    def acknowledge(self, step: int) -> tuple[Batch, dict[str, Rollout]]:
        """A batch is done. -> the batch, and the missing rollouts of the step by id. Raises ValueError for a step that
        is not in flight."""
        flight = self._flight(step)
        del self._flights[step]
        # a checkpoint held it after all
        self.again.discard(step)
        return flight.batch, flight.missing

    def _flight(self, step: int) -> _Flight:
        if step not in self._flights:
            raise ValueError(
                f"step {step} is not in flight: it was never dispatched, or is already acknowledged. "
                f"In flight: {sorted(self._flights) or 'nothing'}"
            )
        return self._flights[step]

    # -- questions -----------------------------------------------------------------------------------------------------

    @property
    def steps_ahead(self) -> int:
        """Batches that the trainer is not through with: each may make a version before another one is trained."""
        # those to be delivered again are ahead
        return sum(not flight.trained for flight in self._flights.values())

    @property
    def num_redelivering(self) -> int:
        """Rollouts in batches to be delivered again."""
        return sum(self._flights[step].batch.num_rollouts for step in self.again)

    def get(self, step: int) -> Batch | None:
        """The batch of a step that is not acknowledged."""
        flight = self._flights.get(step)
        return None if flight is None else flight.batch

    def batches(self) -> tuple[Batch, ...]:
        """All that is not acknowledged, oldest first."""
        return tuple(flight.batch for flight in self._flights.values())

    def left_out(self, step: int) -> tuple[Rollout, ...]:
        """Rollouts that a step was planned again without. They are in flight until the step is acknowledged."""
        flight = self._flights.get(step)
        return () if flight is None else tuple(flight.left_out.values())

    @property
    def num_rollouts(self) -> int:
        """Rollouts that are not acknowledged, those included that were left out."""
        return sum(flight.batch.num_rollouts + len(flight.left_out) for flight in self._flights.values())

    def delivered(self) -> tuple[Batch, ...]:
        """Batches that somebody has: not those to be delivered again. Oldest first."""
        return tuple(batch for batch in self.batches() if batch.step not in self.again)

    def steps_through(self, step: int) -> list[int]:
        """Steps in flight up to and including this one, ascending."""
        return [number for number in self._flights if number <= step]
