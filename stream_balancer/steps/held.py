"""Steps that one process holds, and its reports to the ledger. Pure: the port delivers orders, the loop calls methods.

    Work --> SENT --fetched, computed--> READY --Commit--> COMMITTED --met--> in the weights
                                                               `--failed--> FAILED --Work(new attempt)--> SENT

| the loop              | report                                                                                    |
|-----------------------|-------------------------------------------------------------------------------------------|
| the feed yields       | none (a loop without a barrier reported READY after the fetch, and waited for Commit)     |
| ``step.finish()``     | READY; returns at Commit, or None if a new attempt replaced this one                      |
| the next step         | finished; acked, if the feed acknowledges by itself                                       |
| ``step.failed()``     | FAILED; the process discards later steps                                                  |

Example: Work(5, attempt 1) arrives, payloads arrive, ``finish()`` reports READY. Commit(5, attempt 1) arrives: the rank
enters the all-reduce. The next ``next(feed)`` reports finished(5, attempt 1).

Reports wait in ``out`` while there is no connection. A join carries the whole state, and clears ``out``. `Held.take`
ignores orders of an older connection: the newer controller knows a newer state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from .state import Behind, Claim, Commit, Drop, End, Phase, Weights, Work


class Reported(NamedTuple):
    """The process is READY or FAILED."""

    step: int
    attempt: int
    phase: Phase


class Finished(NamedTuple):
    """The weights contain the step."""

    step: int
    attempt: int


class Acked(NamedTuple):
    """Saved weights contain all steps up to this one."""

    through: int


class Missing(NamedTuple):
    """These rollouts of the part have no payload."""

    step: int
    attempt: int
    ids: tuple[str, ...]


class Forgot(NamedTuple):
    """Answer to Drop and Behind: the process holds no step."""


class Loaded(NamedTuple):
    """The process loaded newer weights."""

    weights: Weights


Report: TypeAlias = Reported | Finished | Acked | Missing | Forgot | Loaded


@dataclass(slots=True)
class HeldStep:
    """One step on this process."""

    number: int
    attempt: int
    part: Any
    gone: frozenset[str]
    """Rollouts that the attempt leaves out on all ranks."""
    ranks: tuple[int, ...]
    needs_commit: bool
    phase: Phase
    is_fetched: bool = False
    is_missing: bool = False
    """Some payloads are missing: the process waits for an attempt without them."""
    masked: frozenset[str] = frozenset()
    """Rollouts without a payload, named by the Commit: the rank computes them with weight 0."""


@dataclass(slots=True)
class Held:
    """State of one process. ``barrier``: READY means computed; otherwise READY means fetched."""

    weights: Weights = field(default_factory=Weights)
    acked: int = -1
    barrier: bool = True
    steps: dict[int, HeldStep] = field(default_factory=dict)
    out: list[Report] = field(default_factory=list)
    link: int = -1
    term: int = -1
    """Term of the newest controller that the process has obeyed."""
    behind: int | None = None
    """The weights lack this step of another rank: load newer weights."""
    is_ended: bool = False

    # The connection.

    def join(self, link: int) -> Claim:
        """First message of a new connection."""
        self.link, self.behind = link, None
        self.out.clear()
        # A step without payloads counts as not held: the next Work repeats the fetch and its report.
        holds = {one.number: (one.attempt, Phase.NONE if one.is_missing else one.phase) for one in self.steps.values()}
        return Claim(self.weights, self.acked, holds, self.term < 0)

    def obeys(self, term: int) -> bool:
        """Answer to the controller's first message. False: the process has obeyed a newer controller."""
        if term < self.term:
            return False
        self.term = term
        return True

    def take(self, link: int, order: Work | Commit | Drop | Behind | End) -> None:
        """Obey an order of the newest connection."""
        if link != self.link:
            return
        match order:
            case Work():
                self._take_work(order)
            case Commit(step=number, attempt=attempt, masked=masked):
                held = self.steps.get(number)
                if held is not None and held.attempt == attempt and held.phase is Phase.READY:
                    held.phase, held.masked, held.is_missing = Phase.COMMITTED, frozenset(masked), False
            case Drop(step=number, lacking=lacking):
                # The weights may contain the step already.
                self.steps.pop(number, None)
                if lacking:
                    self._fall_behind(number)
            case Behind(step=number):
                self._fall_behind(number)
            case End():
                self.is_ended = True

    def _take_work(self, work: Work) -> None:
        held = self.steps.get(work.step)
        if held is not None and held.phase is Phase.COMMITTED:
            raise RuntimeError(f"Work replaced step {work.step}, which may be in a collective")
        # The process has loaded weights that contain the step.
        if work.step < self.weights.next_step:
            return
        # An older step failed. The controller repeats this Work after it has heard of the failure.
        if any(one.phase is Phase.FAILED and one.number < work.step for one in self.steps.values()):
            return
        self.behind = None
        is_same = held is not None and held.attempt == work.attempt and work.needs_commit
        if held is not None and is_same and not held.is_missing:
            # A repeated Work keeps the phase: the Commit may answer the first READY.
            if held.phase is Phase.READY:
                self._ready(held)
            return
        phase = Phase.SENT if work.needs_commit else Phase.COMMITTED
        self.steps[work.step] = HeldStep(*work[1:], phase)

    # Payloads.

    def fetched(self, number: int, attempt: int, missing: Iterable[str] = ()) -> None:
        """All payloads of the step have arrived, except the missing ones."""
        held = self.steps.get(number)
        if held is None or held.attempt != attempt or held.is_fetched:
            return
        if lost := tuple(missing):
            held.is_missing = True
            self.out.append(Missing(number, attempt, lost))
            if self.barrier:
                return
        held.is_fetched = True
        if held.needs_commit and not self.barrier:
            self._ready(held)

    # The loop.

    def oldest(self) -> HeldStep | None:
        """The step that the loop trains next, if the loop may begin it."""
        held = self.steps.get(min(self.steps, default=-1))
        if held is None or not held.is_fetched or held.phase is Phase.FAILED or self.behind is not None:
            return None
        return held if self.barrier or held.phase is Phase.COMMITTED else None

    def computed(self, held: HeldStep) -> None:
        """The loop called ``finish()``."""
        if held.phase is Phase.SENT:
            self._ready(held)

    def met(self, held: HeldStep) -> None:
        """The ranks met, and the optimizer stepped."""
        del self.steps[held.number]
        self.weights = Weights(held.number + 1, held.attempt)
        self.out.append(Finished(held.number, held.attempt))

    def failed(self, held: HeldStep) -> None:
        """The collective failed, and the trainer discarded the gradient."""
        held.phase = Phase.FAILED
        self._discard([number for number in self.steps if number > held.number])
        self.out.append(Reported(held.number, held.attempt, Phase.FAILED))

    def ack(self, through: int) -> None:
        """Saved weights contain all steps up to this one."""
        through = min(through, self.weights.next_step - 1)
        if through > self.acked:
            self.acked = through
            self.out.append(Acked(through))

    def load(self, weights: Weights) -> None:
        """The trainer loaded newer weights. Behind may name a later step, which these weights lack, too."""
        self.weights = weights
        if self.behind is not None and self.behind < weights.next_step:
            self.behind = None
        self._discard([number for number in self.steps if number < weights.next_step])
        self.out.append(Loaded(weights))

    def _fall_behind(self, step: int) -> None:
        """Discard every step: their gradients belong to the old weights."""
        self.steps.clear()
        self.out.append(Forgot())
        if step >= self.weights.next_step:
            self.behind = step

    def _ready(self, held: HeldStep) -> None:
        held.phase = Phase.READY
        self.out.append(Reported(held.number, held.attempt, Phase.READY))

    def _discard(self, numbers: list[int]) -> None:
        for number in numbers:
            del self.steps[number]
