"""Each rule of the ledger as a short case: facts in, orders out. Most were once a schedule or a search that failed."""

from __future__ import annotations

from typing import Any

import pytest

from stream_balancer.steps.held import Held, Missing, Reported
from stream_balancer.steps.ledger import Ledger
from stream_balancer.steps.state import (
    TRANSITIONS,
    Behind,
    Claim,
    Commit,
    Drop,
    End,
    Fact,
    Meets,
    Order,
    PeerRow,
    Phase,
    PlanRow,
    Process,
    Release,
    State,
    Step,
    Weights,
    Work,
    WritePeer,
    WritePlan,
)

A, B, C = Process(0), Process(1), Process(2)


def lay_out(step: int, rollouts: tuple[str, ...], ranks: list[int]) -> dict[int, tuple[str, ...]]:
    return {rank: rollouts[place :: len(ranks)] for place, rank in enumerate(ranks)}


def started(meets: Meets = Meets.BARRIER, ranks: int = 2, **options: Any) -> Ledger:
    ledger = Ledger(lay_out, meets=meets, **options)
    ledger.wanted = set(range(ranks))
    for rank in range(ranks):
        assert ledger.joined(Process(rank), 0, rank, Claim(is_start=True)) is None
    return ledger


def told(orders: list[Order], *wanted: type) -> list[tuple[type, int | None, int | None]]:
    """(class, rank, step) of the orders of some classes, in their order."""
    out = []
    for order in orders:
        row = order.row if isinstance(order, WritePlan) else order
        to = getattr(order, "to", None)
        out.append((type(order), to.rank if to else None, getattr(row, "step", None)))
    return [one for one in out if one[0] in wanted]


def rows_of(orders: list[Order]) -> tuple[list[PlanRow], list[PeerRow]]:
    """The log after these orders."""
    plans = [order.row for order in orders if isinstance(order, WritePlan)]
    return plans, list({order.row.rank: order.row for order in orders if isinstance(order, WritePeer)}.values())


def step_of(ledger: Ledger, *, ready: tuple[Process, ...] | list[Process] = ()) -> tuple[int, int]:
    """A planned step whose Work is out, and its attempt."""
    number = ledger.planned("abcd")
    ledger.orders()
    for process in ready:
        ledger.reported(process, process.rank, number, ledger.steps[number].attempt, Phase.READY)
    return number, ledger.steps[number].attempt


def work(step: int, attempt: int, needs_commit: bool = True) -> Work:
    return Work(A, step, attempt, ("a",), frozenset(), (0, 1), needs_commit)


def test_row_before_work_and_commit_after_all() -> None:
    ledger = started()
    ledger.planned("abcd")
    assert [type(order) for order in ledger.orders() if type(order) is not WritePeer] == [WritePlan, Work, Work]
    attempt = ledger.steps[0].attempt
    ledger.reported(A, 0, 0, attempt, Phase.READY)
    assert not ledger.orders()
    ledger.reported(B, 1, 0, attempt, Phase.READY)
    assert told(ledger.orders(), Commit) == [(Commit, 0, 0), (Commit, 1, 0)]


def test_rank_lost_in_the_collective_waits_until_it_is_given_up() -> None:
    ledger = started()
    number, attempt = step_of(ledger, ready=[A, B])
    ledger.orders()
    ledger.lost(B, 1)
    ledger.reported(A, 0, number, attempt, Phase.FAILED)
    assert not ledger.orders()
    ledger.gave_up(1)
    orders = ledger.orders()
    assert told(orders, WritePlan, Work) == [(WritePlan, None, 0), (Work, 0, 0)]
    assert orders[-1].part == tuple("abcd")


def test_no_new_attempt_while_an_absent_process_may_have_the_step() -> None:
    ledger = started()
    number, attempt = step_of(ledger, ready=[A, B])
    ledger.orders()
    ledger.lost(B, 1)
    assert ledger.joined(B, 0, 5, Claim(Weights(1, attempt))) is None
    ledger.orders()
    ledger.lost(B, 5)
    ledger.reported(A, 0, number, attempt, Phase.FAILED)
    assert not told(ledger.orders(), Drop, Work, WritePlan)


def test_the_last_acknowledgement_and_the_end_of_its_connection_may_come_in_one_turn() -> None:
    ledger = started(ranks=1)
    number, attempt = step_of(ledger, ready=[A])
    ledger.orders()
    ledger.is_ended = True
    ledger.finished(A, 0, number, attempt)
    assert told(ledger.orders(), End, Release) == [(End, 0, None)]
    ledger.acked(A, 0, number)
    ledger.lost(A, 0)
    assert told(ledger.orders(), Release) == [(Release, None, 0)]


def test_a_second_seat_may_join_with_new_weights_after_the_first_has_loaded_others() -> None:
    ledger = started(Meets.OWN)
    number, attempt = step_of(ledger)
    for process, link in ((A, 0), (B, 1)):
        ledger.finished(process, link, number, attempt)
        ledger.acked(process, link, number)
    ledger.orders()
    ledger.wanted = {0, 1, 2}
    assert ledger.joined(Process(2, 0), 0, 5, Claim(is_start=True), num_seats=2) is None
    assert ledger.loaded(Process(2, 0), 5, Weights(1, attempt)) is None
    assert ledger.joined(Process(2, 1), 0, 6, Claim(is_start=True), num_seats=2) is None


def test_a_void_step_is_in_no_weights_and_nobody_lacks_it() -> None:
    ledger = started(Meets.OWN)
    ledger.planned("ab", remote=True)
    ledger.orders()
    ledger.missing(A, 0, 0, ledger.steps[0].attempt, "ab")
    assert told(ledger.orders(), Release) == [(Release, None, 0)]
    number, attempt = step_of(ledger)
    ledger.finished(A, 0, number, attempt)
    ledger.lost(B, 1)
    assert ledger.joined(B, 1, 5, Claim(is_start=True)) is None
    assert told(ledger.orders(), Behind, Work) == [(Work, 1, 1)]
    # Step 1 is in the weights of rank 0 alone, and step 2 is for both: rank 1 lacks step 1, not step 0.
    ledger.gave_up(1)
    ledger.acked(A, 0, 1)
    ledger.orders()
    assert ledger.joined(B, 2, 6, Claim(is_start=True)) is None
    step_of(ledger)
    assert not ledger.orders()
    assert ledger.ranks[1].seats[0].warned == 1


def test_a_planned_step_takes_room_before_it_is_sent() -> None:
    ledger = Ledger(lay_out)
    ledger.wanted = {0}
    assert ledger.joined(A, 0, 0, Claim(is_start=True), depth=1) is None
    assert ledger.wants_step()
    ledger.planned("ab")
    assert not ledger.wants_step()


def test_dead_holder_does_not_drop_the_others() -> None:
    # a whole restart: what a dead process had is believed until its rank joins again
    ledger = started()
    number, attempt = step_of(ledger, ready=[A, B])
    ledger.orders()
    ledger.finished(B, 1, number, attempt)
    ledger.lost(B, 1)
    ledger.joined(A, 1, 2, Claim(is_start=True))
    assert not told(ledger.orders(), Drop, Work, WritePlan)
    ledger.joined(B, 1, 3, Claim(is_start=True))
    orders = ledger.orders()
    assert told(orders, WritePlan, Work) == [(WritePlan, None, 0), (Work, 0, 0), (Work, 1, 0)]
    assert ledger.steps[0].attempt > attempt  # a new number: processes may have met under the old one


def test_restart_takes_unheard_processes_for_committed() -> None:
    ledger = started()
    ledger.planned("abcd")
    orders = ledger.orders()
    rows, peers = rows_of(orders)
    again = Ledger(lay_out, first_attempt=1 << 20, next_step=1, plans=rows, peers=peers)
    again.wanted = {0, 1}
    attempt = rows[0].attempt
    again.joined(A, 0, 5, Claim(holds={0: (attempt, Phase.READY)}))
    assert not told(again.orders(), WritePlan, Commit)
    again.joined(B, 0, 6, Claim(holds={0: (attempt, Phase.COMMITTED)}))
    assert told(again.orders(), Commit) == [(Commit, 0, 0)]


def test_missing_payload_makes_a_new_attempt_and_none_left_is_void() -> None:
    ledger = started()
    number = ledger.planned("abcd", remote=True)
    ledger.orders()
    ledger.missing(A, 0, number, ledger.steps[number].attempt, ["a"])
    orders = ledger.orders()
    assert told(orders, WritePlan, Work) == [(WritePlan, None, 0), (Work, 0, 0), (Work, 1, 0)]
    ledger.missing(A, 0, number, ledger.steps[number].attempt, "bcd")
    assert told(ledger.orders(), Release, Drop) == [(Release, None, 0), (Drop, 0, 0), (Drop, 1, 0)]


def test_weights_that_lack_a_step_of_others_are_told() -> None:
    ledger = started()
    number, attempt = step_of(ledger, ready=[A, B])
    ledger.orders()
    ledger.finished(A, 0, number, attempt)
    ledger.finished(B, 1, number, attempt)
    for process in (A, B):
        ledger.acked(process, process.rank, number)
    ledger.orders()
    ledger.planned("efgh")
    ledger.joined(B, 1, 9, Claim(is_start=True))  # next_step not said: 0
    assert told(ledger.orders(), Behind) == [(Behind, 1, 0)]
    ledger.loaded(B, 9, Weights(1, attempt))
    assert (Work, 1, 1) in told(ledger.orders(), Work)


def test_all_silent_after_release_go_on_and_compare_their_numbers() -> None:
    ledger = started(Meets.OWN)
    number, attempt = step_of(ledger)
    for process in (A, B):
        ledger.finished(process, process.rank, number, attempt)
        ledger.acked(process, process.rank, number)
    ledger.orders()
    ledger.planned("efgh")
    ledger.joined(A, 1, 5, Claim(is_start=True))
    assert told(ledger.orders(), Behind) == [(Behind, 0, 0)]  # B is believed to have step 0
    ledger.forgot(A, 5)
    ledger.joined(B, 1, 6, Claim(is_start=True))
    works = [order for order in ledger.orders() if isinstance(order, Work)]
    assert {order.to for order in works} == {A, B}
    assert all(order.needs_commit for order in works)


def test_plain_ranks_that_start_from_two_checkpoints_are_refused() -> None:
    ledger = started(Meets.OWN)
    step_of(ledger)
    ledger.joined(A, 1, 5, Claim(is_start=True))
    assert "differ" in (ledger.joined(B, 1, 6, Claim(Weights(1), is_start=True)) or "")


def test_given_up_process_stays_out_after_a_restart() -> None:
    ledger = started()
    step_of(ledger)
    ledger.gave_up(1)
    _, peers = rows_of(ledger.orders())
    again = Ledger(lay_out, next_step=1, peers=peers)
    assert "given up" in (again.joined(B, 0, 7, Claim()) or "")
    assert again.joined(B, 1, 8, Claim(is_start=True)) is None


def test_new_seat_replaces_all_seats_of_its_rank() -> None:
    ledger = Ledger(lay_out)
    ledger.wanted = {0}
    for seat in (0, 1):
        ledger.joined(Process(0, seat), 0, seat, Claim(is_start=True), num_seats=2)
    ledger.planned("ab")
    assert [order.to for order in ledger.orders() if isinstance(order, Work)] == [(0, 0), (0, 1)]
    ledger.joined(Process(0, 1), 1, 5, Claim(is_start=True), num_seats=2)
    assert not ledger.ranks[0].is_here
    assert "given up" in (ledger.joined(Process(0, 0), 0, 6, Claim(), num_seats=2) or "")


def test_work_sent_before_a_failure_was_heard_is_not_taken() -> None:
    held = Held(barrier=False)
    held.join(0)
    held.take(0, work(0, 1, False))
    held.failed(held.steps[0])
    held.take(0, work(1, 2, False))
    assert list(held.steps) == [0]
    held.take(0, work(0, 9, False))
    held.take(0, work(1, 2, False))
    assert list(held.steps) == [0, 1]


def test_a_process_that_is_behind_forgets_its_gradients() -> None:
    held = Held()
    held.join(0)
    held.take(0, work(4, 7))
    held.fetched(4, 7)
    held.take(0, Behind(A, 3))
    assert not held.steps
    assert held.behind == 3
    assert held.join(1).holds == {}


def test_loaded_weights_may_lack_a_later_step() -> None:
    # Schedule 5652: Drop(0) and Drop(1) arrived, and then weights without step 1. The process waited without a word.
    held = Held()
    held.join(0)
    held.take(0, Drop(A, 0, 1, lacking=True))
    held.take(0, Drop(A, 1, 2, lacking=True))
    held.load(Weights(1, 1))
    assert held.behind == 1
    held.load(Weights(2, 2))
    assert held.behind is None


def test_older_connections_and_controllers_are_ignored() -> None:
    held = Held()
    held.join(0)
    assert held.obeys(5)
    held.take(9, work(0, 1))
    assert not held.steps
    assert not held.obeys(4)
    ledger = started()
    number, attempt = step_of(ledger)
    ledger.joined(A, 0, 7, Claim(holds={0: (attempt, Phase.SENT)}))
    ledger.reported(A, 0, number, attempt, Phase.READY)
    assert ledger.steps[0].at(A) is Phase.SENT


def test_thrown_away_attempts_are_refused() -> None:
    ledger = started()
    number, attempt = step_of(ledger, ready=[A, B])
    ledger.orders()
    assert "newer plan replaced" in (ledger.finished(A, 0, number, attempt + 50) or "")
    ledger.finished(A, 0, number, attempt)
    ledger.orders()
    assert "another attempt" in (ledger.joined(B, 1, 8, Claim(Weights(1, attempt + 50), is_start=True)) or "")


def test_ready_of_what_was_forgotten_does_not_count() -> None:
    ledger = started()
    number, attempt = step_of(ledger, ready=[A, B])
    ledger.orders()
    later = ledger.planned("efgh")
    ledger.orders()
    ledger.finished(A, 0, number, attempt)
    ledger.joined(B, 1, 8, Claim(is_start=True))
    ledger.orders()  # B lacks step 0, which A has
    ledger.reported(B, 8, later, ledger.steps[later].attempt, Phase.READY)
    assert ledger.steps[later].at(B) is Phase.NONE


def test_unequal_weights_never_meet() -> None:
    ledger = started(next_step=3)
    number, _ = step_of(ledger)
    for process, weights in ((A, Weights(3, 1)), (B, Weights(2, 1))):
        ledger.ranks[process.rank].seats[0].weights = weights
        ledger.steps[number].phases[process] = Phase.READY
    assert told(ledger.orders(), Commit, Behind) == [(Behind, 1, 2)]


def test_released_only_when_all_have_acknowledged_and_then_ended() -> None:
    ledger = started()
    number, attempt = step_of(ledger, ready=[A, B])
    ledger.orders()
    ledger.is_ended = True
    ledger.finished(A, 0, number, attempt)
    assert not told(ledger.orders(), End)
    ledger.finished(B, 1, number, attempt)
    assert len(told(ledger.orders(), End)) == 2
    ledger.acked(A, 0, number)
    assert not told(ledger.orders(), Release)
    ledger.acked(B, 1, number)
    assert told(ledger.orders(), Release)


def test_a_newcomer_waits_for_the_next_plan() -> None:
    ledger = started(ranks=2)
    number, attempt = step_of(ledger, ready=[A, B])
    ledger.orders()
    ledger.wanted = {0, 1, 2}
    ledger.joined(Process(2), 0, 5, Claim(is_start=True))
    ledger.reported(A, 0, number, attempt, Phase.FAILED)
    ledger.reported(B, 1, number, attempt, Phase.FAILED)
    ledger.orders()
    assert set(ledger.steps[0].parts) == {0, 1}


def test_absent_holder_keeps_the_step() -> None:
    ledger = started()
    number, attempt = step_of(ledger, ready=[A, B])
    ledger.orders()
    ledger.finished(B, 1, number, attempt)
    ledger.lost(B, 1)
    ledger.reported(A, 0, number, attempt, Phase.FAILED)
    assert not told(ledger.orders(), WritePlan, Work)


def test_a_repeated_work_does_not_lose_the_commit() -> None:
    # schedules 20898 and 52417: READY, the same Work again, then the Commit that answers the first READY
    held = Held()
    held.join(0)
    held.take(0, work(0, 1))
    held.fetched(0, 1)
    held.computed(held.steps[0])
    held.out.clear()
    held.take(0, work(0, 1))
    assert held.out == [Reported(0, 1, Phase.READY)]
    held.take(0, Commit(A, 0, 1, frozenset()))
    assert held.steps[0].phase is Phase.COMMITTED


def test_old_weights_are_behind_at_the_end_of_the_run() -> None:
    # schedule 28133: a process that joined for the end took the weights of its checkpoint for the result
    ledger = started()
    number, attempt = step_of(ledger, ready=[A, B])
    ledger.orders()
    ledger.is_ended = True
    ledger.finished(A, 0, number, attempt)
    ledger.finished(B, 1, number, attempt)
    for process in (A, B):
        ledger.acked(process, process.rank, number)
    ledger.orders()
    ledger.joined(B, 1, 9, Claim(is_start=True))
    assert told(ledger.orders(), Behind, End)[-1] == (Behind, 1, 0)


def test_a_plan_without_a_rank_drops_an_unbelieved_step() -> None:
    # schedules 102634 and 104820: the process held a step of which the ledger did not believe the claim
    ledger = started()
    number, _ = step_of(ledger)
    ledger.joined(A, 0, 5, Claim())
    ledger.joined(B, 0, 6, Claim(holds={number: (99, Phase.READY)}))
    ledger.wanted = {0}
    ledger.steps[number].was_committed = True
    assert (Drop, 1, 0) in told(ledger.orders(), Drop)


def test_a_restarted_controller_waits_for_an_ended_rank() -> None:
    # search, 1 step, 1 fault: rank 0 came again with old weights, and trained alone what rank 1 had
    ledger = started()
    number, _attempt = step_of(ledger, ready=[A, B])
    rows = [ledger.steps[number].row()]
    peers = [PeerRow(0, 0, 1, ended=True), PeerRow(1, 0, 1, ended=True)]
    again = Ledger(lay_out, next_step=1, plans=rows, peers=peers, first_attempt=1 << 20)
    again.wanted = {0, 1}
    again.joined(A, 1, 5, Claim(is_start=True))
    assert not told(again.orders(), WritePlan, Work)


def test_a_lost_work_goes_out_again_under_the_same_attempt() -> None:
    # search, 1 step, 1 fault: rank 0 of a TRAINER loop waited for the time-out of its collective
    ledger = started(Meets.TRAINER)
    _number, attempt = step_of(ledger)
    ledger.joined(B, 0, 6, Claim())
    orders = ledger.orders()
    assert told(orders, WritePlan, Work) == [(Work, 1, 0)]
    assert orders[-1].attempt == attempt


def test_a_successor_of_an_unheard_process_gets_a_new_attempt() -> None:
    # schedule 211946: the controller died between the row Peer of the successor and the row Plan of its new attempt
    ledger = started(Meets.TRAINER)
    number, attempt = step_of(ledger)
    rows, peers = [ledger.steps[number].row()], [PeerRow(0, 1, 1), PeerRow(1, 1, 1)]
    again = Ledger(lay_out, meets=Meets.TRAINER, next_step=1, plans=rows, peers=peers, first_attempt=1 << 20)
    again.wanted = {0, 1}
    again.joined(A, 1, 5, Claim())
    assert not told(again.orders(), Work)
    again.joined(B, 1, 6, Claim())
    orders = again.orders()
    assert told(orders, WritePlan, Work)[0] == (WritePlan, None, 0)
    assert orders[-1].attempt > attempt


def test_a_masked_step_stays_committed_after_a_reconnect() -> None:
    held = Held(barrier=False)
    held.join(0)
    held.take(0, work(0, 1))
    held.fetched(0, 1, ["a"])
    held.take(0, Commit(A, 0, 1, frozenset("a")))
    assert held.join(1).holds == {0: (1, Phase.COMMITTED)}


# deliberate faults that no random schedule found: the rule itself is the case


def test_a_join_clears_waiting_reports() -> None:
    held = Held()
    held.join(0)
    held.take(0, work(0, 1))
    held.fetched(0, 1)
    held.computed(held.steps[0])
    assert held.join(1).holds == {0: (1, Phase.READY)}
    assert not held.out


def test_a_missing_payload_is_reported_again_after_a_reconnect() -> None:
    held = Held()
    held.join(0)
    held.take(0, work(0, 1))
    held.fetched(0, 1, ["a"])
    assert held.join(1).holds == {0: (1, Phase.NONE)}
    held.take(1, work(0, 1))
    held.fetched(0, 1, ["a"])
    assert held.out == [Missing(0, 1, ("a",))]


def test_a_claim_with_a_gap_is_not_believed() -> None:
    ledger = started(next_step=3)
    number, attempt = step_of(ledger)
    ledger.joined(B, 0, 6, Claim(Weights(2), holds={number: (attempt, Phase.READY)}))
    assert ledger.steps[number].at(B) is Phase.NONE


def test_no_work_before_forgot() -> None:
    ledger = started(next_step=1)
    for process in (A, B):
        ledger.joined(process, 0, process.rank + 5, Claim(Weights(1)))
    _number, _ = step_of(ledger)
    ledger.joined(B, 1, 9, Claim(is_start=True))
    assert told(ledger.orders(), Behind) == [(Behind, 1, 0)]
    ledger.joined(A, 1, 10, Claim(is_start=True))
    assert told(ledger.orders(), Work) == [(Work, 0, 1)]
    ledger.forgot(B, 9)
    assert told(ledger.orders(), Work) == [(Work, 1, 1)]


def test_a_dropped_process_gets_a_new_attempt() -> None:
    ledger = started()
    _number, _attempt = step_of(ledger, ready=[A])
    ledger.joined(B, 1, 6, Claim(Weights(1), is_start=True))
    assert told(ledger.orders(), Drop) == [(Drop, 0, 0)]
    ledger.forgot(A, 0)
    ledger.joined(B, 2, 7, Claim(is_start=True))
    orders = ledger.orders()
    assert told(orders, WritePlan, Work) == [(WritePlan, None, 0), (Work, 0, 0), (Work, 1, 0)]


def test_no_commit_with_a_mask_of_one_rank_only() -> None:
    ledger = started(Meets.TRAINER)
    number = ledger.planned("abcd", remote=True)
    ledger.orders()
    attempt = ledger.steps[number].attempt
    again = Ledger(lay_out, meets=Meets.TRAINER, next_step=1, plans=[ledger.steps[number].row()], first_attempt=1 << 20)
    again.wanted = {0, 1}
    again.joined(A, 0, 5, Claim(holds={number: (attempt, Phase.COMMITTED)}))
    again.joined(B, 0, 6, Claim(holds={number: (attempt, Phase.READY)}))
    again.missing(B, 6, number, attempt, "b")
    assert not told(again.orders(), Commit)


def test_no_drop_during_the_collective() -> None:
    ledger = started()
    number, attempt = step_of(ledger, ready=[A, B])
    ledger.orders()
    ledger.finished(A, 0, number, attempt)
    assert not told(ledger.orders(), Drop)
    ledger.reported(B, 1, number, attempt, Phase.FAILED)
    assert told(ledger.orders(), Drop) == [(Drop, 1, 0)]


def test_no_drop_of_a_later_step_during_the_collective_of_an_older_step() -> None:
    # Read: the Drop of step 1 would also have discarded step 0, which was in its collective.
    ledger = started()
    number, attempt = step_of(ledger, ready=[A, B])
    ledger.orders()
    step_of(ledger)
    ledger.joined(B, 1, 9, Claim(Weights(2), is_start=True))
    assert not told(ledger.orders(), Drop)
    ledger.reported(A, 0, number, attempt, Phase.FAILED)
    assert told(ledger.orders(), Drop) == [(Drop, 0, 0), (Drop, 0, 1)]


def test_restarted_plain_loops_get_a_new_number() -> None:
    ledger = started(Meets.OWN)
    _number, attempt = step_of(ledger)
    ledger.joined(A, 1, 5, Claim(is_start=True))
    ledger.joined(B, 1, 6, Claim(is_start=True))
    orders = ledger.orders()
    assert told(orders, WritePlan, Work)[0] == (WritePlan, None, 0)
    assert orders[-1].attempt > attempt


def test_a_dead_seat_that_may_have_met_spends_the_attempt_of_its_rank() -> None:
    # schedule 529188: the new seat 0 got the attempt in which the dead seat 1 was COMMITTED
    ledger = Ledger(lay_out, meets=Meets.TRAINER)
    ledger.wanted = {0}
    for seat in (0, 1):
        ledger.joined(Process(0, seat), 0, seat, Claim(is_start=True), num_seats=2)
    number, _ = step_of(ledger)
    ledger.steps[number].phases[Process(0, 0)] = Phase.NONE
    ledger.joined(Process(0, 0), 1, 5, Claim(is_start=True), num_seats=2)
    orders = ledger.orders()
    assert told(orders, WritePlan, Work)[:1] in ([], [(WritePlan, None, 0)])
    assert ledger.steps[number].is_spent or ledger.steps[number].attempt > 1


# Rules without a schedule of their own.


def test_transitions_keep_the_phase_of_every_other_pair() -> None:
    assert len(TRANSITIONS) == 13
    for at, fact in TRANSITIONS:
        # A process in the collective leaves it by its own report, or after an earlier failure.
        assert at is not Phase.COMMITTED or fact in (Fact.FAILED, Fact.RECALL)
    state, step = State(Meets.BARRIER), Step(0, ("a",))
    assert not state.move(A, step, Fact.READY)
    assert step.at(A) is Phase.NONE


def test_the_user_acknowledges_and_holders_get_a_void_drop() -> None:
    ledger = started()
    number, attempt = step_of(ledger, ready=[A])
    ledger.acknowledged_by_user([number])
    orders = [order for order in ledger.orders() if isinstance(order, Drop | Release)]
    assert orders == [Release(0, attempt, frozenset(), ()), Drop(A, 0, attempt, False), Drop(B, 0, attempt, False)]


def test_a_void_drop_keeps_other_steps_and_a_lacking_drop_keeps_none() -> None:
    for lacking, left in ((False, [1]), (True, [])):
        held = Held()
        held.join(0)
        held.take(0, work(0, 1))
        held.take(0, work(1, 2))
        held.take(0, Drop(A, 0, 1, lacking))
        assert list(held.steps) == left
        assert held.behind == (0 if lacking else None)


def test_a_leaving_rank_does_not_hold_up_a_release() -> None:
    ledger = started()
    number, attempt = step_of(ledger, ready=[A, B])
    ledger.orders()
    ledger.wanted = {0}
    for process in (A, B):
        ledger.finished(process, process.rank, number, attempt)
    assert told(ledger.orders(), End) == [(End, 1, None)]
    later, attempt = step_of(ledger, ready=[A])
    ledger.orders()
    ledger.finished(A, 0, later, attempt)
    ledger.acked(A, 0, later)
    assert told(ledger.orders(), Release) == [(Release, None, 0), (Release, None, 1)]


def test_a_checkpoint_of_given_up_processes_is_the_truth_if_no_other_has_the_step() -> None:
    ledger = started()
    number, attempt = step_of(ledger, ready=[A, B])
    ledger.orders()
    ledger.gave_up(1)
    ledger.reported(A, 0, number, attempt, Phase.FAILED)
    ledger.orders()
    assert ledger.steps[number].attempt > attempt
    # Rank 0 restarts from the checkpoint that rank 1 wrote under the first attempt.
    assert ledger.joined(A, 1, 5, Claim(Weights(1, attempt), acked=0, is_start=True)) is None
    assert told(ledger.orders(), Release) == [(Release, None, 0)]


def test_all_phases_of_a_dead_incarnation_go() -> None:
    ledger = Ledger(lay_out, meets=Meets.TRAINER)
    ledger.wanted = {0}
    for seat in (0, 1):
        ledger.joined(Process(0, seat), 0, seat, Claim(is_start=True), num_seats=2)
    number, _ = step_of(ledger)
    assert set(ledger.steps[number].phases.values()) == {Phase.COMMITTED}
    ledger.joined(Process(0, 0), 1, 5, Claim(is_start=True), num_seats=2)
    assert ledger.steps[number].at(Process(0, 1)) is Phase.NONE


# The end of the run.


def ended(meets: Meets) -> tuple[Ledger, int]:
    """The last step is in the weights of both ranks, and rank 1 has left after its acknowledgement."""
    ledger = started(meets)
    number, attempt = step_of(ledger, ready=[A, B])
    ledger.orders()
    ledger.is_ended = True
    for process in (A, B):
        ledger.finished(process, process.rank, number, attempt)
    return ledger, attempt


@pytest.mark.parametrize("meets", [Meets.BARRIER, Meets.OWN])
def test_a_plain_rank_with_old_weights_is_behind_at_the_end(meets: Meets) -> None:
    # Search, 1 step, 1 fault: rank 1 restarted alone, and took the weights of its checkpoint for the result.
    ledger, _ = ended(meets)
    ledger.acked(A, 0, 0)
    ledger.acked(B, 1, 0)
    ledger.orders()
    ledger.joined(B, 1, 9, Claim(is_start=True))
    assert told(ledger.orders(), Behind, End) == [(Behind, 1, 0)]


@pytest.mark.parametrize("meets", [Meets.BARRIER, Meets.OWN])
def test_no_end_while_an_absent_process_has_newer_weights(meets: Meets) -> None:
    # Search, 1 step, 1 fault: the holder of the last step was not connected, and old weights became the result.
    ledger = started(meets)
    number, attempt = step_of(ledger, ready=[A])
    ledger.gave_up(1)
    orders = ledger.orders()
    if meets is Meets.BARRIER:
        number, attempt = 0, ledger.steps[0].attempt
        ledger.reported(A, 0, number, attempt, Phase.READY)
        orders = ledger.orders()
    attempt = ledger.steps[0].attempt
    ledger.finished(A, 0, number, attempt)
    ledger.lost(A, 0)
    ledger.is_ended = True
    ledger.joined(B, 1, 9, Claim(is_start=True))
    assert not told(ledger.orders(), End, Behind)
    # The holder is dead: its rank restarts from a checkpoint, and both ranks train the step.
    ledger.joined(A, 1, 10, Claim(is_start=True))
    orders = ledger.orders()
    assert (Work, 0, 0) in told(orders, Work)
    assert not told(orders, End)


def test_a_rank_that_joins_after_the_end_is_told() -> None:
    ledger, _ = ended(Meets.BARRIER)
    ledger.orders()
    ledger.acked(A, 0, 0)
    ledger.acked(B, 1, 0)
    ledger.orders()
    ledger.joined(C, 0, 7, Claim(Weights(1), is_start=True))
    assert told(ledger.orders(), End) == [(End, 2, None)]


def test_a_step_that_was_never_planned_is_in_no_weights() -> None:
    ledger = started()
    assert "the next step here is 0" in (ledger.finished(A, 0, 10**9, 1) or "")
    assert ledger.ranks[0].seats[0].weights == Weights()


# Questions, and ranks that were given up.


def test_waits_for_names_absent_ranks_then_late_ranks_then_ranks_without_an_acknowledgement() -> None:
    ledger = started()
    number, attempt = step_of(ledger)
    assert ledger.waits_for(number) == {0, 1}
    ledger.lost(B, 1)
    assert ledger.waits_for(number) == {1}
    ledger.joined(B, 0, 7, Claim(holds={number: (attempt, Phase.SENT)}))
    ledger.reported(A, 0, number, attempt, Phase.READY)
    assert ledger.waits_for(number) == {1}
    ledger.reported(B, 7, number, attempt, Phase.READY)
    ledger.orders()
    for process, link in ((A, 0), (B, 7)):
        ledger.finished(process, link, number, attempt)
    ledger.acked(A, 0, number)
    assert ledger.waits_for(number) == {1}


def test_room_is_the_least_of_the_seats() -> None:
    ledger = Ledger(lay_out)
    ledger.wanted = {0}
    for seat, depth in ((0, 3), (1, 1)):
        ledger.joined(Process(0, seat), 0, seat, Claim(is_start=True), num_seats=2, depth=depth)
    assert ledger.wants_step()
    step_of(ledger)
    assert not ledger.wants_step()


def test_a_rank_that_never_came_can_be_given_up() -> None:
    ledger = Ledger(lay_out)
    ledger.wanted = {0, 1}
    ledger.joined(A, 0, 0, Claim(is_start=True))
    assert not ledger.wants_step()
    ledger.gave_up(1)
    assert ledger.members() == [0]
    assert ledger.wants_step()
    assert "given up" in (ledger.joined(B, 0, 1, Claim(is_start=True)) or "")


def test_lost_are_given_up_ranks_of_a_plain_loop_without_an_acknowledgement() -> None:
    for is_acked, lost in ((False, (1,)), (True, ())):
        ledger = started(Meets.OWN)
        number, attempt = step_of(ledger)
        for process in (A, B) if is_acked else (A,):
            ledger.finished(process, process.rank, number, attempt)
            ledger.acked(process, process.rank, number)
            if process is B:
                break
        if is_acked:
            ledger.ranks[0].seats[0].acked = -1
        ledger.gave_up(1)
        ledger.acked(A, 0, number)
        orders = [order for order in ledger.orders() if isinstance(order, Release)]
        assert [order.lost_ranks for order in orders] == [lost]


def test_a_rank_that_left_after_the_end_is_not_lost() -> None:
    ledger, _ = ended(Meets.OWN)
    ledger.acked(B, 1, 0)
    ledger.orders()
    ledger.lost(B, 1)
    ledger.acked(A, 0, 0)
    assert [order.lost_ranks for order in ledger.orders() if isinstance(order, Release)] == [()]


def test_parts_of_the_caller_are_the_first_attempt() -> None:
    ledger = started()
    ledger.planned("abcd", parts={0: "whole", 1: "none"})
    assert [order.part for order in ledger.orders() if isinstance(order, Work)] == ["whole", "none"]


def test_weights_of_a_newer_run_are_refused() -> None:
    ledger = started()
    assert "the next step here is 0" in (ledger.joined(B, 1, 5, Claim(Weights(7), is_start=True)) or "")
    assert "restart" in (ledger.joined(B, 2, 6, Claim(holds={0: (3, Phase.COMMITTED)})) or "restart")
