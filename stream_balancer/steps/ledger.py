"""Ledger of steps in flight: facts go in, rows to write and messages to send come out.

The ledger treats an unheard process as if it were in the collective. After a restart of the controller, every process
of every logged step is COMMITTED. Each join replaces this belief by the truth.

No controller uses an attempt number twice, and the log holds an attempt before the first process receives it. A Commit
of one attempt therefore has the same meaning from every controller.

Example: ranks 0 and 1 get step 5: WritePlan(5, attempt 1, {0: ab, 1: cd}), Work to both. Both report READY: Commit to
both. Rank 1 dies in the all-reduce, and rank 0 reports FAILED. Rank 1 may have finished: ``orders()`` is empty. The
host gives rank 1 up: WritePlan(5, attempt 2, {0: abcd}), Work to rank 0. Rank 0 reports READY, gets Commit, finishes
and acknowledges: Release(5).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .advance import LayOut, advance, end_ranks, start_attempt
from .state import Claim, End, Fact, Meets, Order, PeerRow, Phase, PlanRow, Process, Rank, Seat, State, Step, Weights


class Ledger:
    """Steps in flight of one controller.

    ``lay_out(step, rollouts, ranks)`` makes the parts of an attempt; the ledger never looks into a part. ``plans`` and
    ``peers`` are the rows of the log. ``first_attempt`` is above every number of earlier controllers.
    """

    def __init__(
        self,
        lay_out: LayOut,
        *,
        meets: Meets = Meets.BARRIER,
        first_attempt: int = 0,
        next_step: int = 0,
        plans: Iterable[PlanRow] = (),
        peers: Iterable[PeerRow] = (),
    ) -> None:
        self._lay_out, self._state = lay_out, State(meets, attempts=first_attempt)
        self.steps, self.ranks, self.next_step, self.is_ended = self._state.steps, self._state.ranks, next_step, False
        for peer in peers:
            self.ranks[peer.rank] = Rank(peer.incarnation, peer.fenced, peer.seats, is_ended=peer.ended)
        for row in plans:
            step = Step(row.step, row.rollouts, row.remote, row.attempt, row.parts, row.gone, row.gone)
            # An unheard process may be in the collective.
            step.phases, step.was_committed = dict.fromkeys(self._state.processes(step), Phase.COMMITTED), True
            self.steps[row.step] = step

    @property
    def wanted(self) -> set[int]:
        """Ranks that take part from the next plan on."""
        return self._state.wanted

    @wanted.setter
    def wanted(self, ranks: set[int]) -> None:
        self._state.wanted = ranks

    # Questions.

    def members(self) -> list[int]:
        """Ranks of the next step."""
        return self._state.members()

    def wants_step(self) -> bool:
        """Every rank of the next step is connected and has room: the planner may choose now."""
        members = self.members()
        return bool(members) and not self.is_ended and all(self.has_room(number) for number in members)

    def waits_for(self, number: int) -> set[int]:
        """Ranks that must act before the step goes on. Absent ranks come alone: connected ranks may wait for them.

        Example: ranks 0 and 1 compute, and the connection of rank 1 breaks: {1}. Rank 1 joins again: {0, 1}. Rank 0
        reports READY: {1}. Rank 1 reports READY, both ranks finish, and rank 0 acknowledges: {1}.
        """
        state, step = self._state, self.steps[number]
        lacking = [one for one in state.processes(step) if not state.contains(one, step)]
        absent = {one.rank for one in lacking if not state.is_here(one)}
        late = {one.rank for one in lacking if step.at(one) not in (Phase.READY, Phase.FAILED)}
        unsaved = {one.rank for one in state.processes(step) if state.seat(one).acked < number}
        return absent or late or ({one.rank for one in lacking} if lacking else unsaved)

    def has_room(self, number: int) -> bool:
        """The rank is connected, and each of its processes may get another step. A planned step counts before it is
        sent."""
        rank, mine = self.ranks[number], [step.number for step in self.steps.values() if number in step.parts]
        ahead = [sum(one >= seat.weights.next_step for one in mine) < seat.depth for seat in rank.seats.values()]
        return rank.is_here and all(ahead)

    def is_trained(self, number: int) -> bool:
        """The weights of every process contain the step."""
        step = self.steps[number]
        return all(self._state.contains(process, step) for process in self._state.processes(step))

    def unacknowledged(self, number: int) -> list[int]:
        """Steps in flight with a part of this rank that some process of the rank has not acknowledged, ascending."""
        rank = self.ranks[number]
        acked = min((seat.acked for seat in rank.seats.values()), default=-1)
        return sorted(step.number for step in self.steps.values() if number in step.parts and step.number > acked)

    # Facts of the planner and the host.

    def planned(self, rollouts: Iterable[str], *, remote: bool = False, parts: Mapping[int, Any] | None = None) -> int:
        """Add a step and return its number. ``remote``: producers keep some payloads. ``parts``: a finished layout."""
        step = self.steps[self.next_step] = Step(self.next_step, tuple(rollouts), remote)
        self.next_step += 1
        start_attempt(self._state, step, self._lay_out, self.members(), parts)
        return step.number

    def gave_up(self, number: int) -> None:
        """The rank does not come back. Its processes may live behind a broken network; the ledger refuses them."""
        rank = self.ranks[number]
        rank.saved = min((seat.acked for seat in rank.seats.values()), default=-1)
        rank.incarnation = max(rank.incarnation, 0)
        rank.fenced, rank.seats = max(rank.fenced, rank.incarnation), {}
        self._state.save_rank(number)

    def acknowledged_by_user(self, numbers: Iterable[int]) -> None:
        """The controller's program confirms that saved weights contain these steps."""
        for number in numbers:
            self.steps[number].is_saved = True

    # Facts of processes.

    def joined(
        self, process: Process, incarnation: int, link: int, claim: Claim, *, num_seats: int = 1, depth: int = 3
    ) -> str | None:
        """Return the reason of a refusal, or None. The link replaces older links of the process."""
        state, rank = self._state, self.ranks[process.rank]
        if incarnation <= rank.fenced or incarnation < rank.incarnation:
            return f"rank {process.rank} was given up or replaced: start its processes under a higher incarnation"
        if incarnation > rank.incarnation or num_seats != rank.num_seats:
            self._replace(process.rank, Rank(incarnation, incarnation - 1, num_seats))
        rank = self.ranks[process.rank]
        if (why := self._why_not(process, claim)) is not None:
            return why
        if rank.is_ended:
            # The earlier End may be lost.
            state.out.append(End(process))
        # A known seat is the same process. A successor must not get an attempt in which its predecessor may have met.
        is_known, weights = process.seat in rank.seats, claim.weights
        rank.seats[process.seat] = Seat(link, weights, min(claim.acked, weights.next_step - 1), claim.is_start, depth)
        for number, (attempt, _) in claim.holds.items():
            # The step ended, or a new plan left this rank out, during the absence.
            if number not in self.steps or process.rank not in self.steps[number].parts:
                state.drop(process, number, attempt)
        for step in self.steps.values():
            phase = self._believed(process, step, *claim.holds.get(step.number, (0, Phase.NONE)))
            step.is_spent |= not is_known and step.at(process) is Phase.COMMITTED and phase is Phase.NONE
            step.phases[process] = phase
        state.save_rank(process.rank)
        return None

    def _replace(self, number: int, new: Rank) -> None:
        """Processes of one rank live and die together: a new one replaces all, even if the ledger refuses it."""
        self.ranks[number] = new
        for step in self.steps.values():
            dead = [one for one in step.phases if one.rank == number]
            step.is_spent |= Phase.COMMITTED in [step.phases.pop(one) for one in dead]

    def _believed(self, process: Process, step: Step, attempt: int, phase: Phase) -> Phase:
        state, first = self._state, self._state.seat(process).weights.next_step
        if attempt != step.attempt or first > step.number:
            return Phase.NONE
        # A later step counts only if every step between the weights and this step is in flight.
        before = [self.steps.get(number) for number in range(first, step.number)]
        follows = all(one is not None and process.rank in one.parts for one in before)
        return phase if follows or phase is Phase.COMMITTED or state.meets is Meets.OWN else Phase.NONE

    def _why_not(self, process: Process, claim: Claim) -> str | None:
        """Reason to refuse the weights, or a collective that the log does not know."""
        first, is_own = claim.weights.next_step, self._state.meets is Meets.OWN
        if first > self.next_step:
            return (
                f"the weights contain all steps before {first}, and the next step here is {self.next_step}: the "
                "controller was started without its journal, or from an older checkpoint. Start it with its journal, "
                "or the ranks with weights of that time"
            )
        if not is_own and self._differs(process, claim.weights):
            return f"the weights contain another attempt of step {first - 1}: load the state_dict() of a living rank"
        for number, (attempt, phase) in claim.holds.items():
            if phase is Phase.COMMITTED and number >= first and not self._is_current(number, attempt):
                return f"the log does not hold this attempt of step {number}, which may be in a collective: restart"
        if is_own and claim.is_start:
            for other, seat in self._state.living():
                differs = seat.link is not None and seat.is_fresh and seat.weights.next_step != first
                if other != process and differs:
                    there = seat.weights.next_step
                    return (
                        f"the weights of rank {process.rank} contain all steps before {first}, and rank {other.rank}'s "
                        f"all before {there}: they would train on different weights. Take all ranks back to one "
                        f"checkpoint, before step {min(first, there)} or earlier, and give each its next_step="
                    )
        return None

    def _differs(self, process: Process, weights: Weights) -> bool:
        """Another process has, or will have, different weights after the same number of steps."""
        for other, seat in self._state.living():
            if other != process and seat.link is not None and not seat.weights.agrees(weights):
                return True
        last = self.steps.get(weights.next_step - 1)
        if last is None or weights.attempt in (last.attempt, 0):
            return False
        others = [other for other in self._state.processes(last) if other != process]
        return any(last.at(one) is Phase.COMMITTED and not self._state.contains(one, last) for one in others)

    def _is_current(self, number: int, attempt: int) -> bool:
        """Always true for a released step, for a bare number, and in a plain loop."""
        step = self.steps.get(number)
        return step is None or attempt in (step.attempt, 0) or self._state.meets is Meets.OWN

    def lost(self, process: Process, link: int) -> None:
        """The connection broke. The process keeps its phases: a collective may run, and the process may join again."""
        if (seat := self._state.linked(process, link)) is not None:
            seat.link = None

    def reported(self, process: Process, link: int, number: int, attempt: int, phase: Phase) -> None:
        """The process is READY or FAILED. A report from before a Drop does not count."""
        state, step = self._state, self.steps.get(number)
        if state.linked(process, link) is None or step is None or step.attempt != attempt:
            return
        fact = Fact.READY if phase is Phase.READY else Fact.FAILED
        if state.move(process, step, fact) and fact is Fact.FAILED:
            for later in self.steps.values():
                # The process discards later steps, and ignores their Work on its way.
                if later.number > number:
                    state.move(process, later, Fact.RECALL)

    def missing(self, process: Process, link: int, number: int, attempt: int, ids: Iterable[str]) -> None:
        """These rollouts have no payload."""
        step = self.steps.get(number)
        if self._state.linked(process, link) is not None and step is not None and step.attempt == attempt:
            step.gone |= frozenset(ids)

    def finished(self, process: Process, link: int, number: int, attempt: int) -> str | None:
        """The weights contain the step. Return the reason of a refusal, or None."""
        if (seat := self._state.linked(process, link)) is None:
            return None
        if number >= self.next_step:
            return f"the weights contain step {number}, and the next step here is {self.next_step}: load older weights"
        if not self._is_current(number, attempt):
            return (
                f"the weights contain an attempt of step {number} that a newer plan replaced: restart from a checkpoint"
            )
        seat.weights, seat.is_fresh = Weights(number + 1, attempt), False
        return None

    def loaded(self, process: Process, link: int, weights: Weights) -> str | None:
        """The process loaded newer weights. Return the reason of a refusal, or None."""
        seat = self._state.linked(process, link)
        if seat is None or weights.next_step <= seat.weights.next_step:
            return None
        if (why := self._why_not(process, Claim(weights))) is not None:
            return why
        seat.weights, seat.warned, seat.is_forgetting, seat.is_fresh = weights, -1, False, False
        return None

    def forgot(self, process: Process, link: int) -> None:
        """Answer to Drop and Behind: later reports answer later Work."""
        if (seat := self._state.linked(process, link)) is not None:
            seat.is_forgetting = False

    def acked(self, process: Process, link: int, through: int) -> None:
        """Saved weights of the process contain all steps up to this one."""
        if (seat := self._state.linked(process, link)) is not None:
            seat.acked = max(seat.acked, min(through, seat.weights.next_step - 1))

    # Orders.

    def orders(self) -> list[Order]:
        """Rows to write and messages to send now, in this order. O(steps in flight x processes): ask once a turn."""
        for number in sorted(self.steps):
            advance(self._state, self.steps[number], self._lay_out)
        end_ranks(self._state, self.is_ended)
        out, self._state.out = self._state.out, []
        return out
