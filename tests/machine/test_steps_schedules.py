"""Schedules written by hand: each is a fault that the machine once found in the design, made short."""

from __future__ import annotations

from steps_play import Play, held

from stream_balancer.client.held import Held
from stream_balancer.core.steps.orders import SendWork
from stream_balancer.core.steps.state import StepSeal
from stream_balancer.net import messages as m


def test_a_rank_that_dies_after_one_of_its_items() -> None:
    play = Play()
    assert play.plan("0@0 1@0 2@1 3@1") == ["send 0 [0 1]", "send 1 [2 3]"]
    assert play.train("0", [0, 1]) == []
    assert play.done("1", 0, 1, [2]) == []
    play.lost("1")
    assert play.gave_up("1") == ["replan [2 3] over 0", "send 0 [12 13]"]
    assert play.train("0", [12, 13]) == ["seal 0 #1 of 0"]
    assert play.meet("0") == []
    assert play.ack("0") == ["note", "ack"]


def test_a_step_is_uncertain_while_a_living_rank_holds_its_seal() -> None:
    play = Play()
    play.plan("0@0 1@1")
    play.train("0", [0])
    assert play.train("1", [1]) == ["seal 0 #1 of 0 1", "seal 1 #1 of 0 1"]
    play.lost("1")
    assert play.gave_up("1") == []  # rank 0 may have met with it
    assert play.at_barrier("0", 0, 1, 1) == ["replan [1] over 0", "send 0 [11]"]  # "seal 1 failed, I am back"


def test_a_step_whose_only_holder_died_is_done_again_by_those_who_left_it() -> None:
    play = Play()
    play.plan("0@0 1@1")
    play.train("0", [0])
    play.train("1", [1])
    assert play.meet("1") == []
    assert play.at_barrier("0", 0, 1, 1) == ["drop 0 met"]
    play.lost("1")
    assert play.gave_up("1") == ["replan [1 0] over 0", "send 0 [10 11]"]


def test_a_rank_behind_takes_other_weights_and_says_so() -> None:
    play = Play()
    play.plan("0@0 1@1")
    play.train("0", [0])
    play.train("1", [1])
    play.meet("0", "1")
    play.ack("0", "1")
    play.lost("1")
    play.join("1", incarnation=1, weights=0)
    assert play.plan("0@0 1@1", 1) == ["send 0 s1 [0]", "behind 1"]
    assert play.finished("1", 0, 0) == ["send 1 s1 [1]"]


def test_who_waited_for_weights_is_looked_at_once_their_step_is_over() -> None:
    """A rank that left the step, and whose next one nobody else has a part in."""
    play = Play("0 1 2")
    play.plan("0@0 1@1 2@2")
    for rank in range(3):
        play.train(str(rank), [rank])
    play.ledger.resized([0])
    play.plan("0@0", 1)
    play.meet("1")
    play.ack("1")
    play.lost("1")
    assert play.at_barrier("0", 0, 1, 1) == ["drop 0 met"]
    play.lost("0")
    assert play.join("0", incarnation=1) == []
    play.meet("2")
    assert play.ack("2") == ["note", "ack", "behind 0"]


def test_who_does_not_say_its_weights_begins_once_they_can_be_had() -> None:
    play = Play()
    play.ledger.resized([0])
    play.plan("0@0")
    play.ledger.resized([1])
    play.join("1", incarnation=1, weights=None)
    assert play.plan("0@1", 1) == []
    play.train("0", [0])
    assert play.meet("0") == ["end 0", "send 1 s1 [0]"]


def test_who_went_on_to_the_next_step_puts_it_off_if_the_others_lose_the_one_before() -> None:
    """And whoever shares something in it with that rank. Both would wait, in two steps."""
    play = Play("0 1 2")
    play.plan("0@0 1@1")
    play.plan("0@0/5 1@1 2@2/5", 1)
    for rank, items in enumerate([[0], [1], []]):
        play.train(str(rank), items)
    play.lost("0")
    play.join("0", incarnation=1, weights=None)
    assert play.meet("1") == ["drop 0 met", "send 0 s1 [0]"]
    play.at_barrier("2", 0, 1, 1)
    play.taken("0", 1, 1)
    play.lost("1")
    orders = play.gave_up("1")
    assert orders[:2] == ["replan [1 0] over 0 2", "replan [1] over 0 2"]
    assert orders[2:6] == ["send 0 [11]", "rewind 0 s1 attempt 3", "rewind 2 s1 attempt 3", "send 0 s1 [0 11]"]


def test_no_seal_goes_to_ranks_at_the_barrier_that_are_given_more() -> None:
    """Who owns an item that is not done is not at the barrier."""
    play = Play("0 1 2")
    play.plan("0@0 1@1 2@2 3@2")
    play.train("0", [0])
    play.train("1", [1])
    play.lost("2")
    assert play.gave_up("2") == ["replan [2 3] over 0 1", "send 0 [12]", "send 1 [13]"]
    assert play.train("0", [12]) == []
    assert play.train("1", [13]) == ["seal 0 #1 of 0 1", "seal 1 #1 of 0 1"]


def test_a_seal_is_sent_once_and_the_next_one_when_all_are_back_from_it() -> None:
    play = Play(seats=2)
    play.plan("0@0 1@1")
    for who in ("0.0", "0.1", "1.0", "1.1"):
        sealed = play.train(who, [int(who[0])])
    assert sealed == [f"seal {who} #1 of 0 1" for who in ("0.0", "0.1", "1.0", "1.1")]
    for who in ("0.0", "1.0", "1.1"):
        assert play.at_barrier(who, 0, 1, 1) == []
    assert play.at_barrier("0.1", 0, 1, 1) == [one.replace("#1", "#2") for one in sealed]


def test_no_seal_is_given_while_one_who_is_back_from_the_last_is_away() -> None:
    """It would have taken the others from the barrier, and gone to nobody."""
    play = Play()
    play.plan("0@0 1@1")
    play.train("0", [0])
    play.train("1", [1])
    assert play.at_barrier("1", 0, 1, 1) == []
    play.lost("1")
    assert play.at_barrier("0", 0, 1, 1) == []
    last = StepSeal(0, 1, (0, 1))
    again = held("1+", waiting=True, came_back=1, seal=last)
    assert play.join("1", has={0: again}) == ["seal 0 #2 of 0 1", "seal 1 #2 of 0 1"]


def test_what_an_uncertain_step_held_back_is_sent_once_its_seal_is_void() -> None:
    play = Play()
    play.plan("0@0 1@1")
    play.train("0", [0])
    play.train("1", [1])
    play.lost("1")
    assert play.join("1", incarnation=1) == []  # rank 0 may have met with the one before
    assert play.at_barrier("0", 0, 1, 1) == ["send 1 [1]"]


def test_weights_that_are_copied_acknowledge_nothing() -> None:
    play = Play()
    play.plan("0@0 1@1")
    play.train("0", [0])
    play.train("1", [1])
    play.meet("0", "1")
    play.lost("1")
    play.join("1", incarnation=1, weights=1)
    assert play.ack("0") == ["note"]
    assert play.ack("1") == ["note", "ack"]


def test_the_seat_with_the_oldest_weights_speaks_for_its_rank() -> None:
    play = Play("0", seats=2)
    play.join("0", 0, incarnation=1, weights=3)
    play.join("0", 1, incarnation=1, weights=1)
    assert play.ledger.rank(0).weights == 1


def test_a_rank_has_met_if_one_of_its_seats_has() -> None:
    """Whatever another of them still says."""
    play = Play(seats=2)
    play.plan("0@0 1@1")
    for who in ("0.0", "0.1", "1.0", "1.1"):
        play.train(who, [int(who[0])])
    play.finished("0.0", 0, 1)
    play.lost("0.1")
    play.join("0", 1, has={0: held("0+", waiting=True)})
    play.at_barrier("1.0", 0, 1, 1)
    assert play.at_barrier("1.1", 0, 1, 1) == ["drop 1.0 met", "drop 1.1 met"]


def test_a_seat_that_is_sent_its_work_again_leaves_the_other_at_the_barrier() -> None:
    play = Play("0", seats=2)
    play.plan("0@0 1@0")
    play.train("0.1", [0, 1])
    play.lost("0.0")
    assert play.join("0", 0) == ["send 0.0 [0 1]"]
    assert play.train("0.0", [0, 1]) == ["seal 0.0 #1 of 0", "seal 0.1 #1 of 0"]


def test_who_comes_after_all_were_given_up_does_what_was_left() -> None:
    play = Play()
    play.plan("0@0 1@1")
    for rank in ("0", "1"):
        play.lost(rank)
        assert play.gave_up(rank) == (["replan [0] over 1", "send 1 [10]"] if rank == "0" else [])
    assert play.join("1", incarnation=1)[0].startswith("replan")


# -- payloads that are with their producers ----------------------------------------------------------------------------


def test_a_seat_that_comes_again_from_an_older_attempt_is_sent_the_new_one_once() -> None:
    play = Play(seats=2)
    play.plan("0@0/5 1@1/5")
    for who in ("0.0", "0.1", "1.0", "1.1"):
        play.taken(who, 0, 1)
    play.lost("0.1")
    play.lost("1.0")
    assert play.join("1", incarnation=1) == ["rewind 0.0 attempt 2"]
    play.join("1", 1, incarnation=1)
    orders = play.join("0", 1, has={0: held("0")})
    assert orders == ["rewind 0.1 attempt 2", "send 0.0 [0]", "send 0.1 [0]"]
    assert play.join("0", 1, has={0: held("0", attempt=2)}) == []


def test_all_who_compute_a_remote_item_begin_once_all_have_it_and_mask_the_same() -> None:
    """Seats of a rank, ranks that share it."""
    play = Play("0", seats=2)
    assert play.plan("0@0*") == ["send 0.0 [0]", "send 0.1 [0]"]
    assert play.fetched("0.0", 0, 1, [0], ["r0"]) == []
    assert play.fetched("0.1", 0, 1, [0], []) == ["go 0.0 [0]", "go 0.1 [0]"]
    assert play.ledger.steps[0].gone == {"r0"}
    assert play.train("0.0", [0]) == []
    assert play.train("0.1", [0]) == ["note", "seal 0.0 #1 of 0", "seal 0.1 #1 of 0"]
    play = Play()
    play.plan("0@0/5* 1@1/5*")
    assert play.fetched("0", 0, 1, [0], []) == []
    assert play.fetched("1", 0, 1, [1], ["r1"]) == ["go 0 [0]", "go 1 [1]"]


def test_what_a_dead_process_had_fetched_is_fetched_again() -> None:
    play = Play("0", seats=2)
    play.plan("0@0*")
    play.fetched("0.0", 0, 1, [0], [])
    play.lost("0.0")
    for seat in (0, 1):
        play.join("0", seat, incarnation=1)
    assert play.fetched("0.1", 0, 1, [0], []) == []
    assert play.fetched("0.0", 0, 1, [0], []) == ["go 0.0 [0]", "go 0.1 [0]"]


def test_who_comes_again_says_what_it_has_fetched() -> None:
    play = Play("0", seats=2)
    play.plan("0@0*")
    play.fetched("0.0", 0, 1, [0], [])
    play.lost("0.1")
    assert play.join("0", 1, has={0: held("0")}) == []
    assert play.fetched("0.1", 0, 1, [0], []) == ["go 0.0 [0]", "go 0.1 [0]"]


def test_the_last_payload_of_a_plain_step_seals_it_for_all() -> None:
    play = Play(meets=False)
    assert play.plan("0@0 1@1*") == ["send 0 [0]", "send 1 [1]"]
    assert play.fetched("1", 0, 1, [1], []) == ["seal 0 #1 of 0 1", "seal 1 #1 of 0 1"]


def test_a_second_answer_on_a_payload_takes_no_mask_away() -> None:
    play = Play("0")
    play.plan("0@0* 1@0")
    play.fetched("0", 0, 1, [0], ["r0"])
    play.fetched("0", 0, 1, [0], [])
    assert play.ledger.steps[0].gone == {"r0"}


def test_what_is_lost_after_a_plain_seal_is_in_the_journal() -> None:
    """Whoever was started again fetches it again, and others have divided by then."""
    play = Play("0 1", meets=False)
    play.plan("0@0 1@1*")
    play.fetched("1", 0, 1, [1], [])
    play.lost("1")
    play.join("1", incarnation=1)
    assert play.fetched("1", 0, 1, [1], ["r1"]) == ["note"]
    assert play.fetched("1", 0, 1, [1], ["r1"]) == []


def test_in_plain_loops_an_acknowledgement_is_its_own_rank_s_and_of_its_own_life() -> None:
    play = Play(meets=False)
    play.plan("0@0 1@1")
    play.done("0", 0, 1, [0])
    play.finished("0", 0, 1)
    assert play.ack("0") == ["note"]
    play.lost("1")
    assert play.join("1", incarnation=1) == ["send 1 [1]", "seal 1 #1 of 0 1"]
    play = Play("0", seats=2, meets=False)
    play.plan("0@0")
    for who in ("0.0", "0.1"):
        play.done(who, 0, 1, [0])
        play.finished(who, 0, 1)
    play.ack("0.0")
    play.lost("0.0")
    for seat in (0, 1):
        play.join("0", seat, incarnation=1)
    play.done("0.1", 0, 1, [0])
    play.finished("0.1", 0, 1)
    assert play.ack("0.1") == []


def test_whoever_shares_with_those_that_begin_again_begins_again_too() -> None:
    """Rank 1 has its part of what it computes with rank 2 to do again, and waits for it there."""
    play = Play("0 1 2")
    play.plan("0@0/5 1@1/5 2@1/6 3@2/6")
    play.lost("0")
    orders = play.gave_up("0")
    assert orders[:3] == ["replan [0 1] over 1 2", "rewind 1 attempt 2", "rewind 2 attempt 2"]
    assert orders[3:] == ["send 1 [2 10]", "send 2 [3 11]"]


def test_an_acknowledgement_of_a_step_that_is_not_finished_does_not_count() -> None:
    play = Play()
    play.plan("0@0 1@1")
    assert play.ack("0") == []
    play.train("0", [0])
    play.train("1", [1])
    play.meet("0", "1")
    assert play.ack("1") == ["note"]
    assert play.ack("0") == ["note", "ack"]


def test_who_has_acknowledged_and_is_given_up_does_not_do_it_for_another() -> None:
    play = Play("0 1 2")
    play.plan("0@0 1@1 2@2")
    for rank in range(3):
        play.train(str(rank), [rank])
    play.meet("0", "1", "2")
    assert play.ack("0") == ["note"]
    play.lost("0")
    play.gave_up("0")
    assert play.ack("1") == ["note"]
    assert play.ack("2") == ["note", "ack"]


def test_a_report_that_crosses_a_drop_is_not_of_the_new_plan() -> None:
    play = Play("0", meets=False, restarted=True)
    play.plan("0@0")
    other = held("0 1", uid=7)
    assert play.join("0", has={0: other}) == ["drop 0", "send 0 [0]", "seal 0 #1000 of 0"]
    play.taken("0", 0, 1)
    assert play.ledger.steps[0].shares[0].taken == 0
    play.taken("0", 0, 2)
    assert play.ledger.steps[0].shares[0].taken == 1


# -- a controller that was started again -------------------------------------------------------------------------------


def test_what_was_masked_before_a_restart_is_masked_when_it_is_sent_again() -> None:
    play = Play("0", restarted=True)
    play.restore("0@0* 1@0", "0", gone=["r0"])
    play.ledger.joined(0, 0, 0, {})
    (send,) = play.ledger.orders()
    assert isinstance(send, SendWork)
    assert send.gone == {"r0"}


def test_who_waits_after_a_restart_is_sent_the_seal_that_another_holds() -> None:
    """The holder waits for it in the meeting."""
    play = Play(restarted=True)
    play.restore("0@0 1@1", "0 1")
    seal = StepSeal(0, 5, (0, 1))
    assert play.join("0", has={0: held("0+", seal=seal)}) == []
    assert play.join("1", has={0: held("1+", waiting=True)}) == ["seal 1 #5 of 0 1"]


def test_attempts_go_on_after_a_restart_from_those_that_processes_have() -> None:
    """And a step that was changed before begins again."""
    play = Play(restarted=True)
    play.restore("0@0 1@1", "0 1")
    play.join("0", has={0: held("0+", attempt=3, waiting=True)})
    orders = play.join("1", has={0: held("1+", attempt=3)})
    assert orders == ["rewind 0 attempt 4", "rewind 1 attempt 4", "send 0 [0]", "send 1 [1]"]


def test_work_that_seats_have_in_another_order_is_not_as_it_was_planned() -> None:
    for has, orders in (("0 1", []), ("1 0", ["rewind 0 attempt 2", "send 0 [0 1]"])):
        play = Play("0", restarted=True)
        play.restore("0@0 1@0", "0")
        assert play.join("0", has={0: held(has)}) == orders


def test_a_step_that_is_in_all_weights_after_a_restart_is_sent_to_nobody() -> None:
    play = Play(restarted=True)
    play.restore("0@0 1@1", "0 1")
    assert play.join("0", weights=1) == play.join("1", weights=1) == []
    assert play.ack("0") == ["note"]
    assert play.ack("1") == ["note", "ack"]


def test_after_a_restart_a_later_step_stands_behind_an_older_one() -> None:
    play = Play(restarted=True)
    for step in (0, 1):
        play.restore("0@0 1@1", "0 1", step)
    play.join("0", incarnation=1, has={1: held("0", uid=1)})
    orders = play.join("1", has={0: held("1"), 1: held("1", uid=1)})
    assert orders == ["send 0 [0]", "rewind 0 s1 attempt 2", "send 0 s1 [0]"]


def test_a_fenced_rank_is_no_member_before_it_comes_again() -> None:
    play = Play("0 1", restarted=True)
    play.ledger.restore_rank(1, 3, fenced=True)
    assert play.ledger.members == [0]
    play.join("1", incarnation=4)
    assert play.ledger.members == [0, 1]


def test_others_do_the_whole_of_what_was_shared_with_a_rank_that_was_lost_before_a_restart() -> None:
    play = Play("0 2", restarted=True)
    play.restore("0@0/9 1@1/9 2@2", "0 2")
    play.join("0", incarnation=1)
    assert play.join("2", incarnation=1)[0] == "replan [1 0] over 0 2"


def test_ranks_that_took_over_all_of_a_step_before_a_restart_begin_it_again() -> None:
    play = Play("0 1", restarted=True)
    play.restore("0@2", "")
    assert play.join("0", has={0: held("20+")}) == []
    assert play.join("1") == ["replan [0] over 0 1", "rewind 0 attempt 2", "send 0 [10]", "send 1 []"]


def test_a_process_that_does_not_say_its_weights_has_no_part_in_steps_before_its_first() -> None:
    """A controller that was started again lacks the acknowledgements of a step that the one before had not given it."""
    play = Play("0 1 2", restarted=True)
    play.restore("0@0 1@1 2@2", "0 1 2")
    play.restore("0@0 1@1 2@2", "0 1 2", 1)
    first, second, third = ({1: held(str(rank), uid=1)} for rank in range(3))
    play.join("0", has=first, weights=1)
    play.join("1", has=second, weights=1)
    assert play.join("2", incarnation=1, has=third, weights=None) == []
    assert play.ack("0") == ["note"]
    assert play.ack("1") == ["note", "ack"]


def test_others_do_what_a_process_that_begins_later_does_not() -> None:
    """The others were started again too, and lack the step."""
    play = Play("0 1 2", restarted=True)
    play.restore("0@0 1@1 2@2", "0 1 2")
    play.restore("0@0 1@1 2@2", "0 1 2", 1)
    play.join("2", incarnation=1, has={1: held("2", uid=1)}, weights=None)
    play.join("0", incarnation=1)
    assert "replan [2] over 0 1" in play.join("1", incarnation=1)


def test_nobody_leaves_a_step_that_is_met_before_all_have_said_what_they_have_after_a_restart() -> None:
    """The one that had met is started again, too: its weights lack the step, and all do it."""
    play = Play("0 1 2", restarted=True)
    play.restore("0@0 1@1 2@2", "0 1 2")
    play.join("0", weights=1)
    assert play.join("2", incarnation=1, weights=None) == []
    play.lost("0")
    play.join("0", incarnation=1)
    assert play.join("1", incarnation=1) == ["send 0 [0]", "send 1 [1]", "send 2 [2]"]


# -- a process ---------------------------------------------------------------------------------------------------------


def test_a_step_that_was_never_its_own_leaves_a_process_behind_if_its_weights_are_older() -> None:
    drop = m.Drop(2, True, "the others have met without it")
    news, older = Held(meets=True), Held(meets=True, weights=2)
    for process in (news, older):
        process.take(drop)
    assert news.left_behind is None
    assert older.left_behind == drop


def test_a_rewind_that_is_said_twice_takes_nothing_of_the_new_attempt() -> None:
    process, head = Held(meets=True), m.StepHead(1, 1.0, meets=True)
    process.take(m.Work(0, 0, 1, (m.WorkItem(0),), head))
    process.take(m.Rewind(0, 2))
    process.take(m.Work(0, 0, 2, (m.WorkItem(1),)))
    process.take(m.Rewind(0, 2))
    assert list(process.parts[0].work) == [1]


def test_another_plan_of_a_number_is_told_apart_though_it_is_made_later() -> None:
    play = Play("0", meets=False, restarted=True)
    assert play.join("0", has={0: held("0 1", uid=7)}) == ["drop 0"]
    assert play.plan("0@0") == ["send 0 [0]", "seal 0 #1000 of 0"]
    play.taken("0", 0, 1)  # of the other plan
    assert play.ledger.steps[0].shares[0].taken == 0
