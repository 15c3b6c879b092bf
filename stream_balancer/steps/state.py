"""Records of steps in flight, and the phase of every process in every step.

An *attempt* is one plan of a whole step: a part for each rank, and the evicted rollouts. Only a new attempt changes a
step. A rank is one process, or several *seats* of a model-parallel group; all seats get the rank's part::

    NONE --Work--> SENT --READY--> READY --Commit--> COMMITTED --finished--> in the weights
      `----Work that needs no Commit-------------------^  `--FAILED--> FAILED --a new attempt--> NONE
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, NamedTuple, TypeAlias


class Meets(Enum):
    """How the ranks of a step come together."""

    OWN = "own"  # a plain loop: Work allows to train, and the ledger lets no rank wait for another rank
    BARRIER = "barrier"  # finish(): the ledger lets all ranks meet together
    TRAINER = "trainer"  # Work allows to meet; the trainer reports a failed meeting


class Phase(IntEnum):
    """Phase of one process in one attempt."""

    NONE = 0  # the process holds nothing of this attempt
    SENT = 1  # the process has its part and must not meet
    READY = 2  # computed (barrier), or all payloads fetched
    COMMITTED = 3  # the process may be in the collective now
    FAILED = 4  # the process discarded the gradient and all later steps
    DROPPED = 5  # the weights of the process lack a step of a connected process


class Fact(IntEnum):
    """Order or report that moves a process from one phase to the next."""

    WORK = 0
    WORK_TO_MEET = 1  # Work that needs no Commit.
    READY = 2
    COMMIT = 3
    FAILED = 4
    DROP = 5
    RECALL = 6  # An earlier step failed, or the weights are behind.


TRANSITIONS: Mapping[tuple[Phase, Fact], Phase] = {
    (Phase.NONE, Fact.WORK): Phase.SENT,
    (Phase.NONE, Fact.WORK_TO_MEET): Phase.COMMITTED,
    (Phase.SENT, Fact.READY): Phase.READY,
    (Phase.READY, Fact.COMMIT): Phase.COMMITTED,
    (Phase.COMMITTED, Fact.FAILED): Phase.FAILED,
    **{(at, Fact.DROP): Phase.DROPPED for at in (Phase.NONE, Phase.SENT, Phase.READY, Phase.FAILED)},
    **{(at, Fact.RECALL): Phase.NONE for at in (Phase.SENT, Phase.READY, Phase.COMMITTED, Phase.FAILED)},
}
"""Next phase after a fact. Every other pair keeps the phase. A join sets the claimed phase, a new attempt NONE."""


class Process(NamedTuple):
    """One process: a rank, or one seat of a model-parallel rank."""

    rank: int
    seat: int = 0


class Weights(NamedTuple):
    """Content of weights: all steps before ``next_step``, and the attempt of the last of them (0: not known)."""

    next_step: int = 0
    attempt: int = 0

    def agrees(self, other: Weights) -> bool:
        """False if both end with the same step under two attempts. A bare number agrees with every attempt."""
        same = self.attempt == other.attempt or not self.attempt or not other.attempt
        return same or self.next_step != other.next_step


class Claim(NamedTuple):
    """State of a process at its join. The claim replaces the ledger's belief."""

    weights: Weights = Weights()
    acked: int = -1
    holds: Mapping[int, tuple[int, Phase]] = {}  # Attempt and phase by step.
    is_start: bool = False  # The process has not joined before.


class PlanRow(NamedTuple):  # Row of the log: the newest attempt of one step.
    step: int
    rollouts: tuple[str, ...]
    attempt: int
    parts: Mapping[int, Any]
    gone: frozenset[str]
    remote: bool


class PeerRow(NamedTuple):  # Row of the log: the newest incarnation of one rank.
    rank: int
    incarnation: int
    seats: int
    fenced: int = -1
    ended: bool = False


class WritePlan(NamedTuple):  # Write the row before all later orders.
    row: PlanRow


class WritePeer(NamedTuple):  # Write the row before all later orders.
    row: PeerRow


class Release(NamedTuple):  # End of a step: delete its row, evict `gone`, acknowledge the other rollouts.
    step: int
    attempt: int
    gone: frozenset[str]
    lost_ranks: tuple[int, ...]  # Given-up ranks of a plain loop: no weights contain their parts.


class Work(NamedTuple):  # Train the part. `needs_commit`: report READY, and wait for Commit before the ranks meet.
    to: Process
    step: int
    attempt: int
    part: Any
    gone: frozenset[str]
    ranks: tuple[int, ...]
    needs_commit: bool


class Commit(NamedTuple):  # All ranks are READY: meet. `masked`: rollouts lost after the plan count with weight 0.
    to: Process
    step: int
    attempt: int
    masked: frozenset[str]


class Drop(NamedTuple):  # Discard the step. `lacking`: other weights contain it, so treat it like Behind.
    to: Process
    step: int
    attempt: int
    lacking: bool


class Behind(NamedTuple):  # The weights lack this step of another rank: discard all steps and load newer weights.
    to: Process
    step: int


class End(NamedTuple):  # The run ends for the process: no step follows.
    to: Process


ToProcess: TypeAlias = Work | Commit | Drop | Behind | End
"""Order that is a message to one process."""
Order: TypeAlias = WritePlan | WritePeer | Release | ToProcess


@dataclass(slots=True)
class Step:
    """One step in flight."""

    number: int
    rollouts: tuple[str, ...]
    remote: bool = False
    attempt: int = 0
    parts: Mapping[int, Any] = field(default_factory=dict)
    planned_gone: frozenset[str] = frozenset()  # Rollouts that this attempt leaves out.
    gone: frozenset[str] = frozenset()  # Rollouts without a payload.
    phases: dict[Process, Phase] = field(default_factory=dict)
    is_lossy: bool = False  # No weights contain some released step: the ledger compares weights before a Commit.
    is_spent: bool = False  # A process died after its Commit: its successor must not meet in this attempt.
    was_committed: bool = False  # Some process may have met: restarted processes get another number.
    is_saved: bool = False  # The program says that saved weights contain the step.

    def at(self, process: Process) -> Phase:
        return self.phases.get(process, Phase.NONE)

    def row(self) -> PlanRow:
        return PlanRow(self.number, self.rollouts, self.attempt, dict(self.parts), self.gone, self.remote)


@dataclass(slots=True)
class Seat:
    """One process of a rank."""

    link: int | None = None
    weights: Weights = field(default_factory=Weights)
    acked: int = -1
    is_fresh: bool = True  # The process has finished no step since its start.
    depth: int = 3  # The most steps that the process holds outside its weights.
    warned: int = -1  # Step of the newest Behind.
    is_forgetting: bool = False  # The process has not answered `forgot` to Drop or Behind.


@dataclass(slots=True)
class Rank:
    """One rank. Its processes live and die together: the incarnation belongs to the rank."""

    incarnation: int = -1
    fenced: int = -1  # The ledger refuses incarnations up to this one.
    num_seats: int = 1
    seats: dict[int, Seat] = field(default_factory=dict)
    is_ended: bool = False
    saved: int = -1  # Last step that all seats had acknowledged at the give-up.

    @property
    def is_here(self) -> bool:
        """All seats are connected."""
        return len(self.seats) == self.num_seats and all(seat.link is not None for seat in self.seats.values())

    @property
    def is_given_up(self) -> bool:
        return 0 <= self.incarnation <= self.fenced

    @property
    def may_live(self) -> bool:
        """False after a give-up, and after End with the last acknowledgement. True for a rank that never came."""
        if self.is_given_up or not self.is_ended or not self.seats:
            return not self.is_given_up
        return any(seat.link is not None or seat.acked < seat.weights.next_step - 1 for seat in self.seats.values())


_ABSENT = Seat()


@dataclass(slots=True)
class State:
    """All records of one ledger."""

    meets: Meets
    steps: dict[int, Step] = field(default_factory=dict)
    ranks: defaultdict[int, Rank] = field(default_factory=lambda: defaultdict(Rank))
    wanted: set[int] = field(default_factory=set)
    attempts: int = 0  # Newest attempt of this controller.
    void: set[int] = field(default_factory=set)  # Released steps without a rollout: no weights contain them.
    out: list[Order] = field(default_factory=list)

    def members(self) -> list[int]:
        """Ranks of the next step."""
        return [rank for rank in sorted(self.wanted) if self.ranks[rank].may_live]

    def seat(self, process: Process) -> Seat:
        return self.ranks[process.rank].seats.get(process.seat, _ABSENT)

    def linked(self, process: Process, link: int) -> Seat | None:
        """The process, if ``link`` is its newest connection."""
        seat = self.seat(process)
        return seat if seat.link == link else None

    def is_here(self, process: Process) -> bool:
        return self.seat(process).link is not None

    def contains(self, process: Process, step: Step) -> bool:
        """The weights contain the step."""
        return self.seat(process).weights.next_step > step.number

    def holds(self, process: Process, step: Step) -> bool:
        return Phase.NONE < step.at(process) < Phase.DROPPED and not self.contains(process, step)

    def processes(self, step: Step) -> Iterator[Process]:
        """Living processes of the step's attempt."""
        for number in step.parts:
            if (rank := self.ranks[number]).may_live:
                yield from (Process(number, seat) for seat in range(rank.num_seats))

    def living(self) -> Iterator[tuple[Process, Seat]]:
        """Processes that have joined and may live."""
        for number, rank in self.ranks.items():
            if rank.may_live:
                yield from ((Process(number, place), seat) for place, seat in rank.seats.items())

    def room(self, process: Process) -> int:
        return self.seat(process).depth - sum(self.holds(process, step) for step in self.steps.values())

    def move(self, process: Process, step: Step, fact: Fact) -> bool:
        """Apply `TRANSITIONS`. False: the fact does not count in this phase."""
        after = TRANSITIONS.get((step.at(process), fact))
        if after is None:
            return False
        step.phases[process] = after
        return True

    def drop(self, process: Process, number: int, attempt: int) -> None:
        self.out.append(Drop(process, number, attempt, lacking=False))

    def save_rank(self, number: int) -> None:
        rank = self.ranks[number]
        self.out.append(WritePeer(PeerRow(number, rank.incarnation, rank.num_seats, rank.fenced, rank.is_ended)))
