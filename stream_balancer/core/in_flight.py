"""Accepted rollouts that are not forgotten yet: ids, and the batches in flight.

::

    dispatch --> in flight --acknowledge--> done
                 |   ^  |--mark_missing: some rollouts will count as evicted when done
                 |   |  `--replan: another plan of the same step, without its missing rollouts
                 |   `--redelivered------.
                 `--nack, redeliver------> to be delivered again, same plan

The buffer holds waiting rollouts; this module keeps the record of all later ones, and decides nothing. Pure.
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
    """Ids of rollouts that are held (waiting or in flight), and of the last rollouts that are done."""

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
        """Move ids to the past: trained on, or evicted. The last ``remember`` stay known. O(1) each."""
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
    """The seconds contain no wait for other ranks; only such seconds teach a ``CalibratedCost``."""
    waited_s: float | None = None
    """Seconds from the request for its rank batch to its receipt (None: the balancer's wait for rollouts)."""
    ready_s: float = 0.0
    """Seconds that this rank had been ready when the last rank became ready."""


@dataclass(eq=False, slots=True)
class _Flight:
    """A batch in flight."""

    batch: Batch
    begun: bool = False
    """Training on the batch has begun."""
    trained: bool = False
    """The trainer has finished the batch."""
    missing: dict[str, Rollout] = field(default_factory=dict)
    """Rollouts by id whose payloads are lost: the step is trained without them."""
    left_out: dict[str, Rollout] = field(default_factory=dict)
    """Missing rollouts that the batch does not contain: the step was planned again without them."""
    timings: dict[int, StepTiming] = field(default_factory=dict)
    """Reports of the step so far, by rank."""


class BatchesInFlight:
    """Batches in flight, oldest first, and their progress in training."""

    def __init__(self) -> None:
        self.next_step = 0
        """Number of the next new batch."""
        self.training_ages = TrainingAges()
        """Ages of rollouts when their training began."""
        # by step, ascending, since new steps have higher numbers
        self._flights: dict[int, _Flight] = {}
        self.again: set[int] = set()
        """Steps to be delivered again: older than anything new."""

    # -- dispatch and redelivery ---------------------------------------------------------------------------------------

    def dispatch(self, batch: Batch) -> None:
        """Put a new batch in flight."""
        self._flights[batch.step] = _Flight(batch)
        self.next_step += 1

    def next_redelivery(self) -> Batch | None:
        """The oldest batch to be delivered again; :meth:`redelivered` must follow."""
        return self._flights[min(self.again)].batch if self.again else None

    def redelivered(self, batch: Batch) -> None:
        """Note that the batch, or its plan for other ranks, was delivered."""
        self.again.remove(batch.step)
        flight = self._flights[batch.step]
        if len(flight.batch.ranks) != len(batch.ranks):
            # ranks of the old plan had other rollouts
            flight.timings = {}
        flight.batch = batch

    def redeliver(self, step: int) -> int:
        """Mark a batch that reached no rank, or was not trained on, for redelivery, older steps first. -> its number of
        rollouts, 0 if marked already. Raises ValueError for a step that is not in flight."""
        flight = self._flight(step)
        # marked twice, by a rank and by the user: delivered once
        number = 0 if step in self.again else flight.batch.num_rollouts
        flight.begun = flight.trained = False
        self.again.add(step)
        return number

    def restore(
        self, batches: Sequence[Batch], next_step: int, left_out: Mapping[int, Sequence[Rollout]] = MappingProxyType({})
    ) -> None:
        """Take another balancer's batches in flight, all to be delivered again. ``left_out``: see :meth:`left_out`."""
        for batch in batches:
            gone = {one.rollout_id: one for one in left_out.get(batch.step, ())}
            self._flights[batch.step] = _Flight(batch, missing=gone, left_out=dict(gone))
        # the progress of ranks in these steps is unknown
        self.again = set(self._flights)
        self.next_step = next_step

    # -- training and acknowledgement ----------------------------------------------------------------------------------

    def begin_training(self, version: int | None) -> None:
        """The trainer begins the oldest delivered, unfinished batch: record its age once. O(batches in flight)."""
        for step, flight in self._flights.items():
            # a batch that waits for redelivery is not trained on, however old it is
            if not flight.trained and step not in self.again:
                if not flight.begun:
                    flight.begun = True
                    self.training_ages.record(flight.batch, version)
                return

    def finish_training(self, step: int) -> bool:
        """The trainer has finished a batch, and acknowledges it later. False if it is not in flight."""
        if step in self._flights:
            self._flights[step].trained = True
        return step in self._flights

    def time(self, timing: StepTiming) -> list[StepTiming] | None:
        """Record the seconds of a rank. -> reports of all ranks of its step, in rank order; None while one is missing,
        and for a step that is not in flight. Raises ValueError for a rank outside the step's plan, and for negative or
        infinite seconds."""
        flight = self._flights.get(timing.step)
        if flight is None:
            return None
        last = len(flight.batch.ranks) - 1
        if not 0 <= timing.rank <= last:
            raise ValueError(f"rank {timing.rank} has no part in step {timing.step}: its ranks are 0 to {last}")
        for seconds in (timing.seconds, timing.waited_s or 0.0, timing.ready_s):
            if not 0.0 <= seconds < math.inf:
                raise ValueError(f"seconds of a rank must be >= 0 and finite, not {seconds}")
        # reported twice, after a broken link: the later report counts
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
        """Replace the plan of a step in flight, and drop reports of the old plan."""
        flight = self._flights[batch.step]
        flight.batch, flight.timings, flight.left_out = batch, {}, dict(flight.missing)

    def acknowledge(self, step: int) -> tuple[Batch, dict[str, Rollout]]:
        """Remove a batch that is done. -> the batch, and the missing rollouts of the step by id. Raises ValueError for
        a step that is not in flight."""
        flight = self._flight(step)
        del self._flights[step]
        # a checkpoint may contain a step that awaits redelivery
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
        """Unfinished batches: each may make a version before another batch is trained."""
        # batches to be delivered again count too
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
        """Unacknowledged batches, oldest first."""
        return tuple(flight.batch for flight in self._flights.values())

    def left_out(self, step: int) -> tuple[Rollout, ...]:
        """Rollouts that a new plan of the step left out. They are in flight until the step is acknowledged."""
        flight = self._flights.get(step)
        return () if flight is None else tuple(flight.left_out.values())

    @property
    def num_rollouts(self) -> int:
        """Unacknowledged rollouts, with the left-out ones."""
        return sum(flight.batch.num_rollouts + len(flight.left_out) for flight in self._flights.values())

    def delivered(self) -> tuple[Batch, ...]:
        """Delivered batches, without those to be delivered again. Oldest first."""
        return tuple(batch for batch in self.batches() if batch.step not in self.again)

    def steps_through(self, step: int) -> list[int]:
        """Steps in flight up to and including ``step``, ascending."""
        return [number for number in self._flights if number <= step]
