"""A rank whose controller is started again: it joins the new one, and trains on no step twice. Over memory, no loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sessions import at_once
from stream_balancer.testing.scripted import make_rows
from stream_balancer.testing.transports import make_batch
from stream_balancer.transport.channel import Channel, PeerGone
from stream_balancer.transport.memory_channel import Wire
from stream_balancer.transport.rank_port import RankPort
from stream_balancer.transport.rank_session import RankSession

import stream_balancer as sb
from stream_balancer.errors import WireError
from stream_balancer.types import RankBatch
from stream_balancer.wire import messages as m

JOIN = m.JoinRank(0, 1, 0, depth=2, max_batch_bytes=2**20)


def batch(step: int, num_tokens: int = 5) -> RankBatch:
    return make_batch(step, 1, num_tokens=num_tokens).ranks[0]


class Controllers:
    """One after the other, each of which has let the rank in."""

    def __init__(self) -> None:
        self.wires: list[Wire] = []
        self.sessions: list[RankSession] = []

    def connect(self) -> Channel:
        self.wires.append(Wire())
        here, there = self.wires[-1].ends
        self.sessions.append(RankSession(here, JOIN, at_once))
        here.start(self.sessions[-1])
        return there

    @property
    def present(self) -> RankSession:
        return self.sessions[-1]

    def crash(self) -> None:
        self.wires[-1].cut("the process is dead")


@pytest.fixture
def controllers() -> Controllers:
    return Controllers()


@pytest.fixture
def port(controllers: Controllers) -> RankPort:
    port = RankPort(controllers.connect(), JOIN, reconnect=controllers.connect)
    port.start()
    return port


def taken(port: RankPort, at_most: int = 100) -> list[int]:
    steps: list[int] = []
    while len(steps) < at_most and (one := port.take()) is not None:
        steps.append(one.step)
    return steps


def test_a_step_that_the_rank_has_is_not_given_twice(controllers: Controllers, port: RankPort) -> None:
    controllers.present.send(batch(0))
    controllers.present.send(batch(1))
    first = port.take()
    assert first is not None
    controllers.crash()
    assert len(controllers.sessions) == 2
    for step in (0, 1):
        controllers.present.send(batch(step))
    assert controllers.present.credits == 1, "step 0 is with the trainer, step 1 in the queue"
    assert taken(port) == [1]
    controllers.present.send(batch(2))
    assert taken(port) == [2]
    assert controllers.present.credits == 2


def test_a_step_that_came_in_rows_is_known_when_the_next_controller_gives_the_whole_of_it(
    controllers: Controllers, port: RankPort
) -> None:
    rows = [batch.ranks[0] for batch in make_rows(0, 1, 3)]
    whole = replace(rows[-1], micro_batches=tuple(mb for row in rows for mb in row.micro_batches))
    for row in rows[:2]:
        controllers.present.send(row)
    assert taken(port, 1) == [0]
    controllers.present.send(rows[2])
    controllers.crash()
    controllers.present.send(whole)
    assert controllers.present.credits == 1
    assert taken(port) == [0, 0], "two rows were in the queue, and nothing else comes of the step"
    assert controllers.present.credits == 2
    port.report(m.StepReport(0, 1.0))
    assert controllers.present.report() == m.StepReport(0, 1.0)


def test_a_controller_that_is_lost_between_two_rows_is_not_waited_for(controllers: Controllers, port: RankPort) -> None:
    controllers.present.send(make_rows(0, 1, 2)[0].ranks[0])
    assert taken(port) == [0]
    controllers.crash()
    assert len(controllers.sessions) == 1
    with pytest.raises(sb.RankLostError):  # the next one forms other rows
        port.take()


def test_rows_of_two_steps_do_not_mix(controllers: Controllers, port: RankPort) -> None:
    controllers.present.send(make_rows(0, 1, 2)[0].ranks[0])
    controllers.present.send(batch(1))
    assert taken(port, 1) == [0]
    with pytest.raises(WireError, match="got step 1 before the last row of step 0"):
        port.take()


def test_what_was_said_of_a_step_is_said_again_in_the_order_of_the_steps(
    controllers: Controllers, port: RankPort
) -> None:
    for step in (0, 1):
        controllers.present.send(batch(step))
    assert taken(port) == [0, 1]
    port.report(m.StepReport(0, 1.0))
    assert controllers.present.report() == m.StepReport(0, 1.0)
    port.report(m.StepHeld(1, 2.0))
    controllers.crash()
    port.report(m.StepReport(1, 3.0))
    assert controllers.present.report() is None, "it has not given that step yet"
    controllers.present.send(batch(0))
    controllers.present.send(batch(1))
    assert [controllers.present.report() for _ in range(3)] == [m.StepReport(0, 1.0), m.StepReport(1, 3.0), None]


def test_batches_of_the_one_before_cost_no_credit_of_the_next(controllers: Controllers, port: RankPort) -> None:
    for step in (0, 1):
        controllers.present.send(batch(step))
    controllers.crash()
    assert taken(port) == [0, 1], "what had arrived is handed out meanwhile"
    for step in (0, 1, 2, 3):
        controllers.present.send(batch(step))
    assert controllers.present.credits == 0
    assert taken(port) == [2, 3]


@pytest.mark.parametrize("known", [True, False], ids=["another batch", "long forgotten"])
def test_a_controller_without_its_journal_is_lost(controllers: Controllers, port: RankPort, known: bool) -> None:
    """Else the rank would report as done what nobody has trained on."""
    for step in range(1 if known else 1500):
        controllers.present.send(batch(step))
        port.take()
        port.report(m.StepReport(step, 1.0))
    controllers.crash()
    controllers.present.send(make_batch(0, 1, micro_batches=3).ranks[0])
    with pytest.raises(sb.RankLostError, match="without its journal"):
        port.take()
    with pytest.raises(sb.RankLostError):
        controllers.present.report()


@pytest.mark.parametrize("error", [PeerGone("for good"), WireError("damaged"), ValueError("another dp_size")])
def test_what_will_not_come_back_is_not_waited_for(controllers: Controllers, port: RankPort, error: Exception) -> None:
    port.ended(error)
    assert len(controllers.sessions) == 1
    with pytest.raises((sb.RankLostError, type(error))):
        port.take()


def test_after_the_end_the_next_controller_is_joined_to_hear_what_was_done(
    controllers: Controllers, port: RankPort
) -> None:
    controllers.present.send(batch(0))
    controllers.present.end()
    assert taken(port, 1) == [0]
    controllers.present.channel.abort()  # so that the report below is lost
    with pytest.raises(sb.EndOfStream):
        port.take()
    port.report(m.StepReport(0, 1.0))
    port.leave()
    controllers.present.send(batch(0))
    controllers.present.end()
    assert controllers.present.report() == m.StepReport(0, 1.0)
    with pytest.raises(sb.EndOfStream):
        controllers.present.report()


def test_who_is_refused_for_what_it_sent_does_not_come_again_with_the_same(
    controllers: Controllers, port: RankPort
) -> None:
    controllers.present.send(batch(0))
    port.take()
    port.report(m.StepReport(0, float("nan")))
    assert len(controllers.sessions) == 1
    with pytest.raises(sb.RefusedError, match="impossible durations") as refused:
        port.take()
    assert refused.value.reason == "protocol"
    with pytest.raises(sb.RankLostError, match="broke the protocol"):
        controllers.present.report()


def test_the_controller_learns_why_a_rank_refuses_a_batch(controllers: Controllers, port: RankPort) -> None:
    controllers.present.send(replace(make_batch(3, 2).ranks[1], dp_size=1))
    with pytest.raises(WireError, match="got a batch for rank 1 of 1"):
        port.take()
    with pytest.raises(sb.RankLostError, match="it refused what it was sent: rank 0: got a batch for rank 1 of 1"):
        controllers.present.report()


def test_who_has_asked_what_it_takes_over_joins_nobody(controllers: Controllers, port: RankPort) -> None:
    """The next controller does not know what was reassigned, and would have it trained on twice."""
    controllers.present.send(make_batch(0, 1).ranks[0])
    assert port.take() is not None
    assert port.next_part(0) is None
    controllers.present.reassign(make_batch(0, 1).ranks[0])
    assert port.next_part(0) is not None
    controllers.crash()
    with pytest.raises(sb.RankLostError):
        port.next_part(0)
    assert len(controllers.sessions) == 1


@pytest.mark.parametrize("was_asked", [False, True])
def test_who_was_asked_what_it_can_spare_joins_nobody(
    was_asked: bool, controllers: Controllers, port: RankPort
) -> None:
    """The next controller knows the step as it was planned; nobody would train on what was given back."""
    controllers.present.send(make_batch(0, 1).ranks[0])
    assert port.take() is not None
    assert port.begin(0, 3) == 0
    if was_asked:
        controllers.present.notify(m.Release(0, 1))
        assert controllers.present.report() == m.Released(0, 1)
    controllers.crash()
    assert len(controllers.sessions) == (1 if was_asked else 2)
    if not was_asked:
        controllers.present.notify(m.Release(9, 1))
        assert controllers.present.report() == m.Released(9, 0)
        controllers.crash()
        assert len(controllers.sessions) == 3, "of a step that it does not have nothing is kept"
        assert port.begin(0, 3) == 1, "all of them are its own, under the next controller, too"


def test_who_has_left_joins_nobody(controllers: Controllers, port: RankPort) -> None:
    controllers.present.end()
    port.leave()
    controllers.crash()
    with pytest.raises(sb.EndOfStream):
        port.take()
    port.close()
    assert len(controllers.sessions) == 1


def test_who_has_left_without_an_answer_joins_nobody(controllers: Controllers, port: RankPort) -> None:
    controllers.wires[-1].hold()
    port.leave()
    controllers.crash()
    assert len(controllers.sessions) == 1


@pytest.mark.parametrize("ended", [False, True])
def test_who_was_aborted_joins_nobody(controllers: Controllers, port: RankPort, ended: bool) -> None:
    """Its channel may report its end all the same."""
    if ended:
        controllers.present.end()
    port.abort()
    port.ended(ConnectionResetError("the process is dead"))
    assert len(controllers.sessions) == 1


def test_without_being_asked_to_a_rank_does_not_wait(controllers: Controllers) -> None:
    port = RankPort(controllers.connect(), JOIN)
    port.start()
    controllers.crash()
    with pytest.raises(sb.RankLostError, match="open a new RankFeed"):
        port.take()
    assert len(controllers.sessions) == 1


def test_the_next_controller_is_asked_for_parts_once_it_has_given_the_step(
    controllers: Controllers, port: RankPort
) -> None:
    """Before that it would break off: the rank owes it nothing yet."""
    controllers.present.send(batch(0))
    assert taken(port) == [0]
    controllers.crash()
    answers = [port.next_part(0)]
    port.subscribe(lambda: answers.append(port.next_part(0)))  # as a feed that waits
    assert controllers.present.report() is None
    controllers.present.send(batch(0))
    assert controllers.present.report() == m.PartsDone(0, 0), "the feed is woken, and asks again"
    assert controllers.present.report() is None
    controllers.present.complete(m.StepComplete(0, (0,)))
    assert answers[-1] == m.StepComplete(0, (0,))
