"""Both ends of a rank's conversation, state by state, over a channel that only remembers. No event loop, no sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from guard import GUARD_S
from hypothesis import given
from sessions import FakeChannel, at_once

import stream_balancer as sb
from stream_balancer.errors import ConfigError, WireError, WouldBlock, refused_error
from stream_balancer.testing.transports import make_batch, same_rollout
from stream_balancer.transport.admission import Admission
from stream_balancer.transport.channel import Outgoing, PeerClosed, Receiver, Source
from stream_balancer.transport.late_columns import GivenColumns, pack_columns
from stream_balancer.transport.rank_port import RankPort
from stream_balancer.transport.rank_session import RankSession
from stream_balancer.types import RankBatch
from stream_balancer.wire import messages as m
from stream_balancer.wire.messages import Message
from stream_balancer.wire.partial_batch import WantedPayload

JOIN = m.JoinRank(0, 1, 0, depth=2, max_batch_bytes=2**20)


def deliver(outgoing: Outgoing, receiver: Receiver) -> None:
    """As a channel does."""
    sizes = [source.size for source in outgoing.sources]
    buffers = [receiver.allocate(size) for size in receiver.admit(outgoing.message, sizes)]
    for source, buffer in zip(outgoing.sources, buffers, strict=True):
        for _ in source.fill(buffer):
            pass
    receiver.receive(outgoing.message, buffers, outgoing.references)


@pytest.fixture
def channel() -> FakeChannel:
    return FakeChannel(threads=False)


@pytest.fixture
def session(channel: FakeChannel) -> RankSession:
    return RankSession(channel, JOIN, at_once)


@pytest.fixture
def port(channel: FakeChannel) -> RankPort:
    return RankPort(channel, JOIN)


def batch(step: int) -> RankBatch:
    return make_batch(step, 1).ranks[0]


def packed(step: int, *, confirm: bool = False) -> Outgoing:
    """What a session sends for a batch."""
    channel = FakeChannel()
    RankSession(channel, JOIN, at_once).send(batch(step), confirm=confirm)
    return channel.outgoing[0]


# --- the controller's end ---------------------------------------------------------------------------------------------


def test_credits_are_what_was_taken_and_not_sent_since(session: RankSession, channel: FakeChannel) -> None:
    changes: list[int] = []
    session.subscribe(lambda: changes.append(session.credits))
    assert session.credits == 2
    session.send(batch(0))
    session.send(batch(1))
    with pytest.raises(WouldBlock):
        session.send(batch(2))
    deliver(Outgoing(m.Taken(2)), session)
    assert (session.credits, changes) == (2, [2])
    assert [type(message) for message in channel.sent] == [m.Batch, m.Batch]


@pytest.mark.parametrize("total", [0, 3, 2**40])
def test_an_impossible_number_of_taken_batches_is_refused(session: RankSession, total: int) -> None:
    session.send(batch(0))
    session.send(batch(1))
    deliver(Outgoing(m.Taken(1)), session)
    with pytest.raises(WireError, match="taken"):
        deliver(Outgoing(m.Taken(total)), session)


def test_reports_come_in_order_and_before_the_loss(session: RankSession) -> None:
    reports: list[Message] = [m.StepHeld(0, 1.0), m.StepReport(0, 1.0), m.PayloadsFetched(1)]
    for report in reports:
        deliver(Outgoing(report), session)
    session.ended(ConnectionResetError("connection reset by peer"))
    assert not session.live
    assert [session.report() for _ in range(3)] == reports
    with pytest.raises(sb.RankLostError, match=r"rank 0 \(incarnation 0\) was lost: connection reset by peer"):
        session.report()


@pytest.mark.parametrize(
    "report",
    [
        m.StepReport(0, float("nan")),
        m.StepReport(0, -1.0),
        m.StepReport(0, 1.0, float("inf")),
        m.StepHeld(0, 1.0, None, -0.5),
    ],
)
def test_durations_that_no_clock_gives_are_refused(session: RankSession, report: Message) -> None:
    with pytest.raises(WireError, match="impossible durations"):
        deliver(Outgoing(report), session)
    assert session.report() is None


@pytest.mark.parametrize("message", [m.End(), m.Denominators(0, 1, 1, 1, 1), m.Cancel(0), m.Accepted((1,))])
def test_what_only_others_may_send_is_refused(session: RankSession, message: Message) -> None:
    with pytest.raises(WireError, match=type(message).__name__):
        deliver(Outgoing(message), session)


def test_no_rank_sends_buffers(session: RankSession) -> None:
    with pytest.raises(WireError, match="no buffers behind it, not 1"):
        session.admit(m.Taken(0), (100,))


def test_after_the_end_nothing_is_sent_and_a_close_is_an_end(session: RankSession, channel: FakeChannel) -> None:
    session.end()
    session.end()
    assert channel.sent == [m.End()]
    with pytest.raises(sb.ClosedResourceError):
        session.send(batch(0))
    session.ended(PeerClosed())
    with pytest.raises(sb.EndOfStream):
        session.report()


def test_a_close_before_the_end_is_a_loss(session: RankSession) -> None:
    session.ended(PeerClosed())
    with pytest.raises(sb.RankLostError, match="closed its feed"):
        session.report()


def test_a_batch_that_cannot_be_packed_is_its_own_error(session: RankSession) -> None:
    session.ended(sb.RolloutError("rollout 'r7' was changed"))
    with pytest.raises(sb.RolloutError, match="r7"):
        session.report()


def test_a_newer_incarnation_supersedes_an_older_one() -> None:
    admission, channels = Admission(1), [FakeChannel(), FakeChannel()]
    for incarnation, channel in enumerate(channels):
        join = msgspec.structs.replace(JOIN, incarnation=incarnation)
        assert admission.refusal(join) is None
        assert admission.admit(RankSession(channel, join, at_once))
    assert channels[0].closed == "superseded by incarnation 1"
    assert admission.sessions["", 0].incarnation == 1
    for incarnation in (0, 1):
        refused = admission.refusal(msgspec.structs.replace(JOIN, incarnation=incarnation))
        assert refused is not None
        assert refused.reason == "busy"
    assert not admission.admit(RankSession(FakeChannel(), JOIN, at_once)), "it was slower than a newer one"


def test_a_feed_takes_the_place_of_its_own_connection_and_of_no_other() -> None:
    admission, channels = Admission(1), [FakeChannel(), FakeChannel()]
    join = msgspec.structs.replace(JOIN, feed_id=b"one feed")
    sessions = [RankSession(channel, join, at_once) for channel in channels]
    for session in sessions:
        assert admission.refusal(join) is None
        assert admission.admit(session)
    assert channels[0].closed == "the rank has connected again"
    with pytest.raises(sb.RankLostError, match="the rank has connected again"):
        sessions[0].report()
    for other in (b"another feed", b""):
        refused = admission.refusal(msgspec.structs.replace(JOIN, feed_id=other))
        assert refused is not None
        assert refused.reason == "busy"


def test_feeds_that_do_not_say_who_they_are_are_not_one(session: RankSession) -> None:
    admission = Admission(1)
    assert admission.admit(session)
    refused = admission.refusal(JOIN)
    assert refused is not None
    assert refused.reason == "busy"


@pytest.mark.parametrize(
    ("field", "value"), [("dp_size", 2), ("rank", 1), ("rank", -1), ("depth", 0), ("incarnation", -1)]
)
def test_impossible_requests_are_refused(field: str, value: int) -> None:
    refused = Admission(1).refusal(msgspec.structs.replace(JOIN, **{field: value}))
    assert refused is not None
    assert refused.reason == "value"


def test_who_is_held_is_judged_again_once_the_other_has_settled() -> None:
    admission, again = Admission(1), []
    assert admission.begin(JOIN, lambda: None)
    assert not admission.begin(JOIN, lambda: again.append("same"))
    assert admission.begin(msgspec.structs.replace(JOIN, incarnation=1), lambda: None), "a newer one need not wait"
    admission.settle(JOIN)
    assert again == ["same"]
    assert not admission.begin(JOIN, lambda: again.append("older"))
    admission.close()
    assert again == ["same", "older"]
    refused = admission.refusal(JOIN)
    assert refused is not None
    assert refused.reason == "closed"


@pytest.mark.parametrize(
    ("message", "sizes", "text"),
    [
        (m.StepColumns(7, 1.0, columns=(m.LateColumn("x", 9),)), [88], "step 7, whose columns are not asked for"),
        (m.StepColumns(0, 1.0, columns=(m.LateColumn("x", 5),)), [2**40], r"columns of \[1099511627776\] bytes"),
        (m.StepColumns(0, 1.0, columns=(m.LateColumn("x", 5),)), [], "columns of"),
        (m.StepColumns(0, 1.0, columns=(m.LateColumn("x", 99),)), [176], "unknown dtype"),
        (m.StepColumns(0, 1.0, columns=(m.LateColumn("x", 5),) * 2), [176, 176], "a column comes twice"),
        (m.StepColumns(0, float("nan"), columns=(m.LateColumn("x", 5),)), [176], "impossible durations"),
        (m.StepReport(0, 1.0), [], "StepReport message may not come from a rank with a role"),
    ],
)
def test_columns_that_were_not_asked_for_are_refused_before_anything_is_allocated(
    channel: FakeChannel, message: Message, sizes: list[int], text: str
) -> None:
    session = RankSession(channel, msgspec.structs.replace(JOIN, role="ref"), at_once)
    session.send(batch(0))
    assert batch(0).num_tokens * 8 == 176
    with pytest.raises(WireError, match=text):
        deliver(Outgoing(message, [Source(size, lambda _: iter(())) for size in sizes]), session)


def test_columns_come_once(channel: FakeChannel) -> None:
    session = RankSession(channel, msgspec.structs.replace(JOIN, role="ref"), at_once)
    session.send(batch(0))
    done = pack_columns(m.StepReport(0, 1.0), {"x": torch.arange(22)})
    deliver(done, session)
    report = session.report()
    assert isinstance(report, GivenColumns)
    assert torch.equal(report.columns["x"], torch.arange(22))
    with pytest.raises(WireError, match="step 0, whose columns are not asked for"):
        deliver(done, session)


# --- the rank's end ---------------------------------------------------------------------------------------------------


def test_batches_are_taken_in_order_and_each_taking_is_told(port: RankPort, channel: FakeChannel) -> None:
    news: list[int] = []
    port.subscribe(lambda: news.append(1))
    assert port.take() is None
    for step in (3, 7):
        deliver(packed(step), port)
    taken = [port.take(), port.take()]
    assert [got and got.step for got in taken] == [3, 7]
    assert channel.sent == [m.Taken(1), m.Taken(2)]
    assert len(news) == 2
    for got in taken:
        assert got is not None
        assert all(same_rollout(a, b) for a, b in zip(got.rollouts, batch(got.step).rollouts, strict=True))


def replaced(outgoing: Outgoing, **fields: Any) -> Outgoing:
    return outgoing._replace(message=msgspec.structs.replace(outgoing.message, **fields))


@pytest.mark.parametrize("confirm", [False, True])
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"rank": 1}, "for rank 1 of 1"),
        ({"dp_size": 0}, "for rank 0 of 0"),
        ({"step": 4}, "got step 4 after step 4"),
        ({"wire_bytes": 64}, "impossible sizes"),
        ({"meta_bytes": 0}, "impossible sizes"),
        ({"meta_bytes": 2**30}, "impossible sizes"),
        ({"meta_crc": 0}, "checksum"),
    ],
)
def test_hostile_batches_are_refused(port: RankPort, fields: dict[str, int], text: str, confirm: bool) -> None:
    deliver(packed(4), port)
    with pytest.raises(WireError, match=text):
        deliver(replaced(packed(5, confirm=confirm), **fields), port)


def test_a_batch_above_max_batch_bytes_is_refused_before_memory_is_spent(port: RankPort) -> None:
    message = msgspec.structs.replace(packed(0).message, total_bytes=2**20 + 1)
    with pytest.raises(WireError, match="more than max_batch_bytes"):
        port.admit(message, (message.wire_bytes,))


def test_a_batch_without_a_credit_is_refused(port: RankPort) -> None:
    for step in range(2):
        deliver(packed(step), port)
    with pytest.raises(WireError, match="without a credit"):
        deliver(packed(2), port)
    assert port.take() is not None
    deliver(packed(2), port)


def test_bytes_that_changed_on_their_way_are_refused(port: RankPort) -> None:
    with pytest.raises(WireError, match="checksum of step 0 is wrong"):
        deliver(replaced(packed(0), wire_crc=1), port)


@pytest.mark.parametrize("message", [m.Taken(0), m.StepReport(0, 1.0), m.Accepted((1,)), m.Denominators(0, 1, 1, 1, 1)])
def test_what_only_a_rank_may_send_is_refused(port: RankPort, message: Message) -> None:
    with pytest.raises(WireError, match=type(message).__name__):
        deliver(Outgoing(message), port)


def test_the_end_comes_after_what_was_sent(port: RankPort) -> None:
    deliver(packed(0), port)
    deliver(Outgoing(m.End()), port)
    port.ended(PeerClosed())
    assert port.take() is not None
    with pytest.raises(sb.EndOfStream):
        port.take()
    with pytest.raises(WireError, match="after the end"):
        deliver(packed(1), port)


@pytest.mark.parametrize(
    ("error", "raised", "text"),
    [
        (PeerClosed("superseded by incarnation 1"), sb.RankLostError, "superseded by incarnation 1"),
        (PeerClosed(), sb.RankLostError, "it closed"),
        (ConnectionResetError("connection reset"), sb.RankLostError, "connection reset"),
        (WireError("damaged"), WireError, "damaged"),
        (refused_error("busy", "connected"), sb.AlreadyInUseError, "connected"),
        (refused_error("value", "dp_size"), ValueError, "dp_size"),
        (ConfigError("there is no host"), ValueError, "there is no host"),
        (ValueError("a stray one is nobody's knob"), sb.RankLostError, "a stray one"),
    ],
)
def test_a_lost_controller_is_raised_after_what_had_come(
    port: RankPort, error: Exception, raised: type[Exception], text: str
) -> None:
    for step in range(2):
        deliver(packed(step), port)
    assert port.take() is not None
    port.ended(error)
    assert port.take() is not None
    with pytest.raises(raised, match=text) as caught:
        port.take()
    if isinstance(caught.value, sb.RankLostError):
        assert caught.value.step == 0, "it was working on step 0"


def test_an_answer_that_nobody_took_does_not_outlive_a_part(port: RankPort, channel: FakeChannel) -> None:
    """Another rank was lost after the answer, and this one takes over."""
    deliver(packed(0), port)
    assert port.take() is not None
    assert port.next_part(0) is None
    deliver(Outgoing(m.StepComplete(0, (0, 1))), port)
    elsewhere = FakeChannel()
    RankSession(elsewhere, JOIN, at_once).reassign(batch(0))
    deliver(elsewhere.outgoing[0], port)
    assert isinstance(port.next_part(0), RankBatch)
    assert port.next_part(0) is None
    assert channel.sent == [m.Taken(1), m.PartsDone(0, 0), m.PartsDone(0, 1)]


@given(st.lists(st.one_of(st.just("begin"), st.integers(0, 9)), max_size=30), st.integers(1, 12))
def test_a_micro_batch_is_begun_here_or_given_back_and_never_both(moves: list[str | int], number: int) -> None:
    channel = FakeChannel(threads=False)
    port = RankPort(channel, JOIN)
    deliver(packed(0), port)
    port.take()
    begun: list[int] = []
    idle, left = 0, number  # as the controller counts
    for move in moves:
        channel.sent.clear()
        spare = 0
        if move == "begin":
            index = port.begin(0, number)
            assert (index is None) == (len(begun) == left)
            begun += [] if index is None else [index]
            if idle and len(begun) == 1 and index == 0:
                spare = left - 1
        elif isinstance(move, int):
            idle = move
            deliver(Outgoing(m.Release(0, idle)), port)
            spare = left - len(begun) if begun else 0
        moved = spare - spare // (idle + 1)  # each idle rank gets as many as it keeps, or one more
        if move != "begin" or (idle and begun == [0] and spare):
            assert channel.sent == [m.Released(0, moved)]
        left -= moved
    channel.sent.clear()
    while (index := port.begin(0, number)) is not None:
        begun.append(index)
    left -= sum(one.moved for one in channel.sent if isinstance(one, m.Released))
    assert begun == list(range(left))


def test_who_has_done_a_part_asks_again(port: RankPort, channel: FakeChannel) -> None:
    """Though its first question had no other reply than that part."""
    deliver(packed(0), port)
    assert port.take() is not None
    assert port.next_part(0) is None
    elsewhere = FakeChannel()
    RankSession(elsewhere, JOIN, at_once).reassign(batch(0))
    deliver(elsewhere.outgoing[0], port)
    assert isinstance(port.next_part(0), RankBatch)
    assert port.next_part(0) is None
    assert port.next_part(0) is None, "asked, and no reply has come yet"
    assert channel.sent == [m.Taken(1), m.PartsDone(0, 0), m.PartsDone(0, 1)]


# --- batches that are confirmed ---------------------------------------------------------------------------------------


def agreed(step: int) -> m.Denominators:
    one = batch(step)
    return m.Denominators(
        step, one.global_num_rollouts, one.global_num_tokens, one.global_num_loss_tokens, one.global_num_executions
    )


def test_a_batch_to_be_confirmed_is_held_with_all_behind_it(port: RankPort, channel: FakeChannel) -> None:
    deliver(packed(0, confirm=True), port)
    deliver(packed(1), port)
    assert channel.sent == [m.PayloadsFetched(0)]
    assert port.take() is None
    deliver(Outgoing(agreed(0)), port)
    taken = [port.take(), port.take()]
    assert [got and got.step for got in taken] == [0, 1]
    got = taken[0]
    assert got is not None
    assert all(same_rollout(a, b) for a, b in zip(got.rollouts, batch(0).rollouts, strict=True))


@pytest.mark.parametrize("step", [0, 1, 9])
def test_denominators_that_nobody_waits_for_are_refused(port: RankPort, step: int) -> None:
    deliver(packed(0, confirm=True), port)
    deliver(Outgoing(agreed(0)), port)
    with pytest.raises(WireError, match="Denominators"):
        deliver(Outgoing(agreed(step)), port)


def test_what_is_held_when_the_controller_is_lost_is_not_handed_out(port: RankPort) -> None:
    deliver(packed(0, confirm=True), port)
    deliver(Outgoing(m.End()), port)
    port.ended(ConnectionResetError("gone"))
    with pytest.raises(sb.RankLostError):
        port.take()


class _Source:
    """Payloads that an owner has, or has not."""

    def __init__(self, gone: Mapping[int, str]) -> None:
        self.gone, self.closed = gone, threading.Event()

    def read(self, wanted: Sequence[WantedPayload]) -> Mapping[int, str]:
        for one in wanted:
            for piece in one.pieces:
                piece.fill_(1)
        return self.gone

    def close(self) -> None:
        self.closed.set()


def test_receiving_has_a_thread_and_all_else_another_one(channel: FakeChannel) -> None:
    """A session hides the thread it runs in: nothing but a queue may be between them."""
    loop: list[Callable[[], object]] = []
    session = RankSession(channel, JOIN, loop.append)
    session.send(batch(0))

    def receive() -> None:
        for message in (m.Taken(1), m.StepReport(0, 1.0)):
            deliver(Outgoing(message), session)
        session.stalled(31.0)
        session.ended(PeerClosed())

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    thread.join()
    assert (session.credits, session.report(), session.live, session.stalled_s) == (1, None, True, 0.0)
    for function in loop:
        function()
    assert session.report() == m.StepReport(0, 1.0)
    assert (session.live, session.stalled_s) == (False, 31.0)


def test_a_rank_fetches_in_a_thread_of_its_own_and_is_closed_while_it_does(channel: FakeChannel) -> None:
    channel.threads = True
    reading, source = threading.Event(), _Source({})

    def read(*_: object) -> Mapping[int, str]:
        reading.set()
        source.closed.wait(GUARD_S)
        raise sb.ClosedResourceError

    source.read = read  # type: ignore[method-assign]
    port = RankPort(channel, JOIN, payloads=source)
    deliver(_with_a_payload_elsewhere(), port)
    assert reading.wait(GUARD_S), "receive() must not wait for the owner"
    port.close()
    assert source.closed.is_set(), "the thread was waited for, not woken"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sb-fetch")]


def _with_a_payload_elsewhere() -> Outgoing:
    from stream_balancer.wire.partial_batch import Lease, RemoteRollout

    whole = batch(0).rollouts[0]
    remote = RemoteRollout(
        tokens={
            name: torch.empty(column.shape, dtype=column.dtype, device="meta") for name, column in whole.tokens.items()
        },
        scalars=whole.scalars,
        rollout_id=whole.rollout_id,
        owner=m.Owner("host", 1, "token", "worker 3"),
        key=5,
        lease=Lease(),
        loss_tokens=whole.num_loss_tokens,
    )
    first = batch(0)
    rollouts = [remote, *first.micro_batches[0].rollouts[1:]]
    share = replace(first, micro_batches=(sb.MicroBatch.of(rollouts), *first.micro_batches[1:]))
    channel = FakeChannel()
    RankSession(channel, JOIN, at_once).send(share)
    return channel.outgoing[0]


def test_a_payload_that_is_gone_leaves_a_padding_copy(channel: FakeChannel) -> None:
    port = RankPort(channel, JOIN, payloads=_Source({0: "the process is gone"}))
    deliver(_with_a_payload_elsewhere(), port)
    name = batch(0).rollouts[0].rollout_id
    missing = m.MissingRollout(0, name, "worker 3", "the process is gone")
    assert channel.sent == [m.PayloadsFetched(0, (missing,))]
    deliver(Outgoing(m.Denominators(0, 3, 95, 45, 3)), port)
    got = port.take()
    assert got is not None
    assert (got.global_num_rollouts, got.global_num_tokens, got.global_num_loss_tokens) == (3, 95, 45)
    assert [rollout.is_padding for rollout in got.rollouts] == [True, False, False, False]
    assert not got.rollouts[0].tokens["input_ids"].any()
    assert got.micro_batches[0].packed().rollout_weights.tolist() == [0.0, 1.0]
    for a, b in zip(got.rollouts[1:], batch(0).rollouts[1:], strict=True):
        assert same_rollout(a, b)


def test_denominators_come_once_also_while_payloads_are_read(channel: FakeChannel) -> None:
    class Slow(_Source):
        def read(self, wanted: Sequence[WantedPayload]) -> Mapping[int, str]:
            deliver(Outgoing(m.Denominators(0, 4, 100, 50, 4)), port)
            with pytest.raises(WireError, match="does not wait for it"):
                deliver(Outgoing(m.Denominators(0, 1, 1, 1, 1)), port)
            return super().read(wanted)

    port = RankPort(channel, JOIN, payloads=Slow({}))
    deliver(_with_a_payload_elsewhere(), port)
    got = port.take()
    assert got is not None
    assert got.global_num_tokens == 100


def test_a_payload_that_is_there_is_read_into_its_place(channel: FakeChannel) -> None:
    port = RankPort(channel, JOIN, payloads=_Source({}))
    deliver(_with_a_payload_elsewhere(), port)
    deliver(Outgoing(m.Denominators(0, 4, 100, 50, 4)), port)
    got = port.take()
    assert got is not None
    assert not any(rollout.is_padding for rollout in got.rollouts)
    assert got.rollouts[0].tokens["input_ids"].view(torch.uint8).unique().tolist() == [1]
    for a, b in zip(got.rollouts[1:], batch(0).rollouts[1:], strict=True):
        assert same_rollout(a, b)
