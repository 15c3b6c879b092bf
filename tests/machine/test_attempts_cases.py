"""Schedules that once failed, cut down to facts and orders. Run: python -m pytest test_cases.py"""
from __future__ import annotations

from stream_balancer.steps.held import Held, Missing, Reported
from stream_balancer.steps.ledger import Ledger
from stream_balancer.steps.state import (
    Behind, Claim, Commit, Drop, End, Meets, Order, PeerRow, Phase, PlanRow, Process, Release, Weights, Work, WritePeer, WritePlan,
)

A, B, C = Process(0), Process(1), Process(2)


def lay_out(step: int, rollouts: tuple[str, ...], ranks: list[int]) -> dict[int, tuple[str, ...]]:
    return {rank: rollouts[place :: len(ranks)] for place, rank in enumerate(ranks)}


def started(meets=Meets.BARRIER, ranks=2, **options):
    ledger = Ledger(lay_out, meets=meets, **options)
    ledger.wanted = set(range(ranks))
    for rank in range(ranks):
        assert ledger.joined(Process(rank), 0, rank, Claim(is_start=True)) is None
    return ledger


def kinds(orders, *wanted):
    return [(order.kind, tuple(order.to) if order.to else None, order.step) for order in orders if order.kind in wanted]


def step_of(ledger, *, ready=(), orders=()):
    number = ledger.planned("abcd")
    ledger.orders()
    for proc in ready:
        ledger.reported(proc, proc.rank, number, ledger.steps[number].attempt, Phase.READY)
    return number, ledger.steps[number].attempt


def test_row_before_work_and_commit_after_all():
    ledger = started()
    ledger.planned("abcd")
    assert [order.kind for order in ledger.orders() if order.kind != "peer"] == ["plan", "work", "work"]
    attempt = ledger.steps[0].attempt
    ledger.reported(A, 0, 0, attempt, Phase.READY)
    assert not ledger.orders()
    ledger.reported(B, 1, 0, attempt, Phase.READY)
    assert kinds(ledger.orders(), "commit") == [("commit", (0, 0), 0), ("commit", (1, 0), 0)]


def test_rank_lost_in_the_collective_waits_until_it_is_given_up():
    ledger = started()
    number, attempt = step_of(ledger, ready=[A, B])
    ledger.orders()
    ledger.lost(B, 1)
    ledger.reported(A, 0, number, attempt, Phase.FAILED)
    assert not ledger.orders()
    ledger.gave_up(1)
    orders = ledger.orders()
    assert kinds(orders, "plan", "work") == [("plan", None, 0), ("work", (0, 0), 0)]
    assert orders[-1].body[0] == tuple("abcd")


def test_dead_holder_does_not_drop_the_others():
    # a whole restart: what a dead process had is believed until its rank joins again
    ledger = started()
    number, attempt = step_of(ledger, ready=[A, B])
    ledger.orders()
    ledger.finished(B, 1, number, attempt)
    ledger.lost(B, 1)
    ledger.joined(A, 1, 2, Claim(is_start=True))
    assert not kinds(ledger.orders(), "drop", "work", "plan")
    ledger.joined(B, 1, 3, Claim(is_start=True))
    orders = ledger.orders()
    assert kinds(orders, "plan", "work") == [("plan", None, 0), ("work", (0, 0), 0), ("work", (1, 0), 0)]
    assert ledger.steps[0].attempt > attempt  # a new number: processes may have met under the old one


def test_restart_takes_unheard_processes_for_committed():
    ledger = started()
    ledger.planned("abcd")
    orders = ledger.orders()
    rows, peers = [o.body for o in orders if o.kind == "plan"], [o.body for o in orders if o.kind == "peer"]
    again = Ledger(lay_out, first_attempt=1 << 20, next_step=1, plans=rows, peers={p.rank: p for p in peers}.values())
    again.wanted = {0, 1}
    attempt = rows[0].attempt
    again.joined(A, 0, 5, Claim(holds={0: (attempt, Phase.READY)}))
    assert not kinds(again.orders(), "plan", "commit")
    again.joined(B, 0, 6, Claim(holds={0: (attempt, Phase.COMMITTED)}))
    assert kinds(again.orders(), "commit") == [("commit", (0, 0), 0)]


def test_missing_payload_makes_a_new_attempt_and_none_left_is_void():
    ledger = started()
    number = ledger.planned("abcd", remote=True)
    ledger.orders()
    ledger.missing(A, 0, number, ledger.steps[number].attempt, ["a"])
    orders = ledger.orders()
    assert kinds(orders, "plan", "work") == [("plan", None, 0), ("work", (0, 0), 0), ("work", (1, 0), 0)]
    ledger.missing(A, 0, number, ledger.steps[number].attempt, "bcd")
    assert kinds(ledger.orders(), "release", "drop") == [("drop", (0, 0), 0), ("drop", (1, 0), 0), ("release", None, 0)]


def test_weights_that_lack_a_step_of_others_are_told():
    ledger = started()
    number, attempt = step_of(ledger, ready=[A, B])
    ledger.orders()
    ledger.finished(A, 0, number, attempt)
    ledger.finished(B, 1, number, attempt)
    for proc in (A, B):
        ledger.acked(proc, proc.rank, number)
    ledger.orders()
    ledger.planned("efgh")
    ledger.joined(B, 1, 9, Claim(is_start=True))  # next_step not said: 0
    assert kinds(ledger.orders(), "behind") == [("behind", (1, 0), 0)]
    ledger.loaded(B, 9, Weights(1, attempt))
    assert ("work", (1, 0), 1) in kinds(ledger.orders(), "work")


def test_all_silent_after_release_go_on_and_compare_their_numbers():
    ledger = started(Meets.OWN)
    number, attempt = step_of(ledger)
    for proc in (A, B):
        ledger.finished(proc, proc.rank, number, attempt)
        ledger.acked(proc, proc.rank, number)
    ledger.orders()
    ledger.planned("efgh")
    ledger.joined(A, 1, 5, Claim(is_start=True))
    assert kinds(ledger.orders(), "behind") == [("behind", (0, 0), 0)]  # B is believed to have step 0
    ledger.forgot(A, 5)
    ledger.joined(B, 1, 6, Claim(is_start=True))
    works = [order for order in ledger.orders() if order.kind == "work"]
    assert {order.to for order in works} == {A, B} and all(order.body[3] for order in works)


def test_plain_ranks_that_start_from_two_checkpoints_are_refused():
    ledger = started(Meets.OWN)
    step_of(ledger)
    ledger.joined(A, 1, 5, Claim(is_start=True))
    assert "differ" in (ledger.joined(B, 1, 6, Claim(Weights(1), is_start=True)) or "")


def test_given_up_process_stays_out_after_a_restart():
    ledger = started()
    step_of(ledger)
    ledger.gave_up(1)
    peers = [order.body for order in ledger.orders() if order.kind == "peer"]
    again = Ledger(lay_out, next_step=1, peers=peers)
    assert "given up" in (again.joined(B, 0, 7, Claim()) or "")
    assert again.joined(B, 1, 8, Claim(is_start=True)) is None


def test_new_seat_replaces_all_seats_of_its_rank():
    ledger = Ledger(lay_out)
    ledger.wanted = {0}
    for seat in (0, 1):
        ledger.joined(Process(0, seat), 0, seat, Claim(is_start=True), num_seats=2)
    ledger.planned("ab")
    assert kinds(ledger.orders(), "work") == [("work", (0, 0), 0), ("work", (0, 1), 0)]
    ledger.joined(Process(0, 1), 1, 5, Claim(is_start=True), num_seats=2)
    assert not ledger.ranks[0].is_here
    assert "given up" in (ledger.joined(Process(0, 0), 0, 6, Claim(), num_seats=2) or "")


def test_work_sent_before_a_failure_was_heard_is_not_taken():
    held = Held(barrier=False)
    held.join(0, 0)
    work = lambda step: Order("work", A, step, step + 1, ((), frozenset(), (0,), False))
    held.take(0, work(0))
    held.failed(held.steps[0])
    held.take(0, work(1))
    assert list(held.steps) == [0]
    held.take(0, Order("work", A, 0, 9, ((), frozenset(), (0,), False)))
    held.take(0, work(1))
    assert list(held.steps) == [0, 1]


def test_a_process_that_is_behind_forgets_its_gradients():
    held = Held()
    held.join(0, 0)
    held.take(0, Order("work", A, 4, 7, ((), frozenset(), (0,), True)))
    held.fetched(4, 7)
    held.take(0, Order("behind", A, 3))
    assert not held.steps and held.behind == 3
    assert held.join(1, 0).holds == {}


def test_older_connections_and_controllers_are_ignored():
    held = Held()
    assert held.join(0, 5) is not None
    held.take(9, Order("work", A, 0, 1, ((), frozenset(), (0,), True)))
    assert not held.steps
    assert held.join(1, 4) is None
    ledger = started()
    number, attempt = step_of(ledger)
    ledger.joined(A, 0, 7, Claim(holds={0: (attempt, Phase.SENT)}))
    ledger.reported(A, 0, number, attempt, Phase.READY)
    assert ledger.steps[0].at(A) is Phase.SENT


def test_thrown_away_attempts_are_refused():
    ledger = started()
    number, attempt = step_of(ledger, ready=[A, B])
    ledger.orders()
    assert "thrown away" in (ledger.finished(A, 0, number, attempt + 50) or "")
    ledger.finished(A, 0, number, attempt)
    ledger.orders()
    assert "another attempt" in (ledger.joined(B, 1, 8, Claim(Weights(1, attempt + 50), is_start=True)) or "")


def test_ready_of_what_was_forgotten_does_not_count():
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


def test_unequal_weights_never_meet():
    ledger = started()
    number, attempt = step_of(ledger, ready=[A, B])
    ledger.steps[number].phase[B] = Phase.READY
    ledger.ranks[1].seats[0].weights = Weights(0)
    ledger.ranks[0].seats[0].weights = Weights(0)
    other = started()
    other.next_step = 3
    number, attempt = step_of(other)
    other.ranks[0].seats[0].weights, other.ranks[1].seats[0].weights = Weights(3, 1), Weights(2, 1)
    for proc in (A, B):
        other.steps[number].phase[proc] = Phase.READY
    assert kinds(other.orders(), "commit", "behind") == [("behind", (1, 0), 2)]


def test_released_only_when_all_have_acknowledged_and_then_ended():
    ledger = started()
    number, attempt = step_of(ledger, ready=[A, B])
    ledger.orders()
    ledger.is_ended = True
    ledger.finished(A, 0, number, attempt)
    assert not kinds(ledger.orders(), "end")
    ledger.finished(B, 1, number, attempt)
    assert len(kinds(ledger.orders(), "end")) == 2
    ledger.acked(A, 0, number)
    assert not kinds(ledger.orders(), "release")
    ledger.acked(B, 1, number)
    assert kinds(ledger.orders(), "release")


def test_a_newcomer_waits_for_the_next_plan():
    ledger = started(ranks=2)
    number, attempt = step_of(ledger, ready=[A, B])
    ledger.orders()
    ledger.wanted = {0, 1, 2}
    ledger.joined(Process(2), 0, 5, Claim(is_start=True))
    ledger.reported(A, 0, number, attempt, Phase.FAILED)
    ledger.reported(B, 1, number, attempt, Phase.FAILED)
    ledger.orders()
    assert set(ledger.steps[0].parts) == {0, 1}


def test_absent_holder_keeps_the_step():
    ledger = started()
    number, attempt = step_of(ledger, ready=[A, B])
    ledger.orders()
    ledger.finished(B, 1, number, attempt)
    ledger.lost(B, 1)
    ledger.reported(A, 0, number, attempt, Phase.FAILED)
    assert not kinds(ledger.orders(), "plan", "work")


def work(step, attempt, needs_commit=True):
    return Order("work", A, step, attempt, (("a",), frozenset(), (0, 1), needs_commit))


def test_a_repeated_work_does_not_lose_the_commit():
    # schedules 20898 and 52417: READY, the same Work again, then the Commit that answers the first READY
    held = Held()
    held.join(0, 0)
    held.take(0, work(0, 1))
    held.fetched(0, 1)
    held.computed(held.steps[0])
    held.out.clear()
    held.take(0, work(0, 1))
    assert held.out == [("reported", 0, 1, Phase.READY)]
    held.take(0, Order("commit", A, 0, 1, frozenset()))
    assert held.steps[0].phase is Phase.COMMITTED


def test_old_weights_are_behind_at_the_end_of_the_run():
    # schedule 28133: a process that joined for the end took the weights of its checkpoint for the result
    ledger = started()
    number, attempt = step_of(ledger, ready=[A, B])
    ledger.orders()
    ledger.is_ended = True
    ledger.finished(A, 0, number, attempt)
    ledger.finished(B, 1, number, attempt)
    for proc in (A, B):
        ledger.acked(proc, proc.rank, number)
    ledger.orders()
    ledger.joined(B, 1, 9, Claim(is_start=True))
    assert kinds(ledger.orders(), "behind", "end")[-1] == ("behind", (1, 0), 0)


def test_a_plan_without_a_rank_drops_an_unbelieved_step():
    # schedules 102634 and 104820: the process held a step of which the ledger did not believe the claim
    ledger = started()
    number, _ = step_of(ledger)
    ledger.joined(A, 0, 5, Claim())
    ledger.joined(B, 0, 6, Claim(holds={number: (99, Phase.READY)}))
    ledger.wanted = {0}
    ledger.steps[number].was_committed = True
    assert ("drop", (1, 0), 0) in kinds(ledger.orders(), "drop")


def test_a_restarted_controller_waits_for_an_ended_rank():
    # search, 1 step, 1 fault: rank 0 came again with old weights, and trained alone what rank 1 had
    ledger = started()
    number, attempt = step_of(ledger, ready=[A, B])
    rows = [ledger._row(ledger.steps[number])]
    peers = [PeerRow(0, 0, 1, ended=True), PeerRow(1, 0, 1, ended=True)]
    again = Ledger(lay_out, next_step=1, plans=rows, peers=peers, first_attempt=1 << 20)
    again.wanted = {0, 1}
    again.joined(A, 1, 5, Claim(is_start=True))
    assert not kinds(again.orders(), "plan", "work")


def test_a_lost_work_goes_out_again_under_the_same_attempt():
    # search, 1 step, 1 fault: rank 0 of a TRAINER loop waited for the time-out of its collective
    ledger = started(Meets.TRAINER)
    number, attempt = step_of(ledger)
    ledger.joined(B, 0, 6, Claim())
    orders = ledger.orders()
    assert kinds(orders, "plan", "work") == [("work", (1, 0), 0)] and orders[-1].attempt == attempt


def test_a_successor_of_an_unheard_process_gets_a_new_attempt():
    # schedule 211946: the controller died between the row Peer of the successor and the row Plan of its new attempt
    ledger = started(Meets.TRAINER)
    number, attempt = step_of(ledger)
    rows, peers = [ledger._row(ledger.steps[number])], [PeerRow(0, 1, 1), PeerRow(1, 1, 1)]
    again = Ledger(lay_out, meets=Meets.TRAINER, next_step=1, plans=rows, peers=peers, first_attempt=1 << 20)
    again.wanted = {0, 1}
    again.joined(A, 1, 5, Claim())
    assert not kinds(again.orders(), "work")
    again.joined(B, 1, 6, Claim())
    orders = again.orders()
    assert kinds(orders, "plan", "work")[0] == ("plan", None, 0) and orders[-1].attempt > attempt


def test_a_masked_step_stays_committed_after_a_reconnect():
    held = Held(barrier=False)
    held.join(0, 0)
    held.take(0, work(0, 1))
    held.fetched(0, 1, ["a"])
    held.take(0, Order("commit", A, 0, 1, frozenset("a")))
    assert held.join(1, 0).holds == {0: (1, Phase.COMMITTED)}


# deliberate faults that no random schedule found: the rule itself is the case


def test_a_join_clears_waiting_reports():
    held = Held()
    held.join(0, 0)
    held.take(0, work(0, 1))
    held.fetched(0, 1)
    held.computed(held.steps[0])
    assert held.join(1, 0).holds == {0: (1, Phase.READY)} and not held.out


def test_a_missing_payload_is_reported_again_after_a_reconnect():
    held = Held()
    held.join(0, 0)
    held.take(0, work(0, 1))
    held.fetched(0, 1, ["a"])
    assert held.join(1, 0).holds == {0: (1, Phase.NONE)}
    held.take(1, work(0, 1))
    held.fetched(0, 1, ["a"])
    assert held.out == [("missing", 0, 1, ("a",))]


def test_a_claim_with_a_gap_is_not_believed():
    ledger = started(next_step=3)
    number, attempt = step_of(ledger)
    ledger.joined(B, 0, 6, Claim(Weights(2), holds={number: (attempt, Phase.READY)}))
    assert ledger.steps[number].at(B) is Phase.NONE


def test_no_work_before_forgot():
    ledger = started(next_step=1)
    for proc in (A, B):
        ledger.joined(proc, 0, proc.rank + 5, Claim(Weights(1)))
    number, _ = step_of(ledger)
    ledger.joined(B, 1, 9, Claim(is_start=True))
    assert kinds(ledger.orders(), "behind") == [("behind", (1, 0), 0)]
    ledger.joined(A, 1, 10, Claim(is_start=True))
    assert kinds(ledger.orders(), "work") == [("work", (0, 0), 1)]
    ledger.forgot(B, 9)
    assert kinds(ledger.orders(), "work") == [("work", (1, 0), 1)]


def test_a_dropped_process_gets_a_new_attempt():
    ledger = started()
    number, attempt = step_of(ledger, ready=[A])
    ledger.joined(B, 1, 6, Claim(Weights(1), is_start=True))
    assert kinds(ledger.orders(), "drop") == [("drop", (0, 0), 0)]
    ledger.forgot(A, 0)
    ledger.joined(B, 2, 7, Claim(is_start=True))
    orders = ledger.orders()
    assert kinds(orders, "plan", "work") == [("plan", None, 0), ("work", (0, 0), 0), ("work", (1, 0), 0)]


def test_no_commit_with_a_mask_of_one_rank_only():
    ledger = started(Meets.TRAINER)
    number = ledger.planned("abcd", remote=True)
    ledger.orders()
    attempt = ledger.steps[number].attempt
    again = Ledger(lay_out, meets=Meets.TRAINER, next_step=1, plans=[ledger._row(ledger.steps[number])], first_attempt=1 << 20)
    again.wanted = {0, 1}
    again.joined(A, 0, 5, Claim(holds={number: (attempt, Phase.COMMITTED)}))
    again.joined(B, 0, 6, Claim(holds={number: (attempt, Phase.READY)}))
    again.missing(B, 6, number, attempt, "b")
    assert not kinds(again.orders(), "commit")


def test_no_drop_during_the_collective():
    ledger = started()
    number, attempt = step_of(ledger, ready=[A, B])
    ledger.orders()
    ledger.finished(A, 0, number, attempt)
    assert not kinds(ledger.orders(), "drop")
    ledger.reported(B, 1, number, attempt, Phase.FAILED)
    assert kinds(ledger.orders(), "drop") == [("drop", (1, 0), 0)]


def test_restarted_plain_loops_get_a_new_number():
    ledger = started(Meets.OWN)
    number, attempt = step_of(ledger)
    ledger.joined(A, 1, 5, Claim(is_start=True))
    ledger.joined(B, 1, 6, Claim(is_start=True))
    orders = ledger.orders()
    assert kinds(orders, "plan", "work")[0] == ("plan", None, 0) and orders[-1].attempt > attempt


def test_a_dead_seat_that_may_have_met_spends_the_attempt_of_its_rank():
    # schedule 529188: the new seat 0 got the attempt in which the dead seat 1 was COMMITTED
    ledger = Ledger(lay_out, meets=Meets.TRAINER)
    ledger.wanted = {0}
    for seat in (0, 1):
        ledger.joined(Process(0, seat), 0, seat, Claim(is_start=True), num_seats=2)
    number, _ = step_of(ledger)
    ledger.steps[number].phase[Process(0, 0)] = Phase.NONE
    ledger.joined(Process(0, 0), 1, 5, Claim(is_start=True), num_seats=2)
    orders = ledger.orders()
    assert kinds(orders, "plan", "work")[:1] in ([], [("plan", None, 0)])
    assert ledger.steps[number].is_spent or ledger.steps[number].attempt > 1
