"""Both ends of a producer's conversation, state by state, over a channel that only keeps what was sent."""

from __future__ import annotations

import gc
import logging
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

import anyio
import msgspec
import pytest
import torch
from guard import GUARD_S
from lockstep import in_lockstep
from sessions import OWNER, FakeChannel, outgoing, producer_session, send

import stream_balancer as sb
from stream_balancer.core.groups import GroupSize
from stream_balancer.errors import ConfigError, WireError, refused_error
from stream_balancer.testing import make_rollout
from stream_balancer.transport.channel import PeerClosed, PeerGone
from stream_balancer.transport.event_loop import loop_caller
from stream_balancer.transport.leases import Leases
from stream_balancer.transport.offers import Offer
from stream_balancer.transport.producer_port import ProducerPort
from stream_balancer.transport.producer_session import ProducerSession
from stream_balancer.transport.request_ledger import Limits
from stream_balancer.transport.request_messages import EncodedRequest
from stream_balancer.transport.requests import Mode, Request, RequestCancelled
from stream_balancer.transport.sockets.framing import frame
from stream_balancer.transport.sockets.hub import Hub
from stream_balancer.transport.sockets.producers import welcome_producer
from stream_balancer.wire import messages as m
from stream_balancer.wire.partial_batch import RemoteRollout

TO_CONTROLLER = (m.Put, m.PutGroup, m.DeclareGroup, m.Cancel)
TO_PRODUCER = (m.Accepted, m.PutRefused, m.DropPayloads, m.End)


def a_put(name: str = "r", *, tokens: int = 3, kept: bool = False, mode: Mode = Mode.PUT) -> EncodedRequest:
    return EncodedRequest(Request(mode, [make_rollout(tokens, name)]), lambda: None, kept=kept)


def put_into(session: ProducerSession, number: int, name: str = "r", *, key: int | None = None, **options: Any) -> None:
    put = a_put(name, kept=key is not None, **options)
    send(session, *outgoing(put, number, key or 0))


SIZE = a_put().wire_bytes
OTHERS: list[m.Message] = [
    m.ProbeMemory(1, 2, b""), m.MapBuffer(1, 2, 64), m.SharedBuffers((1,)), m.ReleaseBuffers((1,)),
    m.Batch(0, 0, 1, 8, 0, 64, 64), m.PartialBatch(0, 0, 1, 8, 0, 64, 1), m.Taken(1), m.StepReport(0, 1.0),
    m.StepHeld(0, 1.0), m.PayloadsFetched(0), m.Denominators(0, 1, 1, 1, 1), m.WantPayloads(0, (1,)), m.Payloads(0),
    m.DeclareGroup(5, "g", "closed"), m.Cancel(5), m.Accepted((5,)), m.PutRefused(5, "full", ""),
    m.DropPayloads((5,)), m.End(),
]  # fmt: skip


# --- the controller's end ---------------------------------------------------------------------------------------------


def test_puts_come_in_the_order_of_their_numbers_and_get_one_reply_each() -> None:
    channel = FakeChannel(at_once=False)
    session = producer_session(channel)
    for number in range(4):
        put_into(session, number, f"r{number}")
    offers = [session.take() for _ in range(4)]
    assert [offer.number for offer in offers if isinstance(offer, Offer)] == [0, 1, 2, 3]
    assert session.take() is None
    for number in (2, 0, 3):
        session.answer(number, None)
        session.answer(number, sb.RolloutError("too late"))
    session.answer(1, sb.WouldBlock())
    session.answer(9, None)
    session.end()
    session.end()
    channel.turn()
    assert channel.sent == [m.Accepted((2, 0, 3)), m.PutRefused(1, "full", ""), m.End()]


@pytest.mark.parametrize("number", [0, 6, 7])
def test_a_number_twice_or_behind_is_refused_before_anything_is_allocated(number: int) -> None:
    session = producer_session(FakeChannel())
    put_into(session, 7)
    message, buffers = outgoing(a_put(), number)
    with pytest.raises(WireError, match="expected put number 8 or later"):
        session.admit(message, [buffers[0].numel()])


def test_staged_bytes_are_bounded_until_the_reply_and_one_larger_put_comes_alone() -> None:
    session = producer_session(FakeChannel(), Limits(2 * SIZE, 5 * SIZE))
    put_into(session, 0)
    put_into(session, 1)
    with pytest.raises(WireError, match="may stage"):
        put_into(session, 2)
    session.answer(0, None)
    session.answer(1, sb.RolloutError("no"))
    large = a_put(tokens=60)
    assert 2 * SIZE < large.wire_bytes < 5 * SIZE
    send(session, *outgoing(large, 2))
    with pytest.raises(WireError, match="may stage"):
        put_into(session, 3)
    session.answer(2, None)
    with pytest.raises(WireError, match="may stage"):
        put_into(session, 3, tokens=200)


def test_a_cancel_is_passed_on_and_only_of_what_was_sent() -> None:
    session = producer_session(FakeChannel())
    with pytest.raises(WireError, match="Cancel"):
        send(session, m.Cancel(0))
    put_into(session, 0)
    send(session, m.Cancel(0))
    assert isinstance(session.take(), Offer)
    assert session.take() == m.Cancel(0)


@pytest.mark.parametrize("message", [one for one in OTHERS if not isinstance(one, TO_CONTROLLER)], ids=repr)
def test_what_a_producer_never_sends_is_refused(message: m.Message) -> None:
    session = producer_session(FakeChannel())
    with pytest.raises(WireError, match=type(message).__name__):
        send(session, message)
    with pytest.raises(WireError, match=type(message).__name__):
        session.admit(message, (64,))


@pytest.mark.parametrize("change", [{"meta_bytes": 0}, {"meta_bytes": 2**20}, {"wire_bytes": 64}, {"total_bytes": 1}])
def test_a_header_that_cannot_be_true_is_refused(change: dict[str, int]) -> None:
    session = producer_session(FakeChannel())
    message, buffers = outgoing(a_put(), 0)
    message = msgspec.structs.replace(message, rollout=msgspec.structs.replace(message.rollout, **change))
    with pytest.raises(WireError, match="impossible sizes"):
        session.admit(message, [buffers[0].numel()])


def test_texts_of_refusals_fit_whatever_they_hold() -> None:
    channel = FakeChannel()
    session = producer_session(channel)
    put_into(session, 0)
    session.answer(0, ValueError("\ud800" + "x" * m.MAX_TEXT))
    refused = channel.sent[0]
    assert isinstance(refused, m.PutRefused)
    assert m.decode_message(m.encode_message(refused)) == ((), refused)
    assert len(refused.text) == m.MAX_TEXT


def test_unanswered_offers_come_again_to_the_next_who_subscribes() -> None:
    session = producer_session(FakeChannel())
    for number in range(3):
        put_into(session, number)
    session.take(), session.take()
    session.answer(0, None)
    session.subscribe(lambda: None, lambda offer: None)
    offers = [session.take() for _ in range(2)]
    assert [offer.number for offer in offers if isinstance(offer, Offer)] == [1, 2]
    assert session.take() is None


def test_a_put_without_waiting_is_answered_at_once_only_where_one_loop_is_all() -> None:
    for threads in (False, True):
        session = producer_session(FakeChannel(threads=threads))
        now: list[int] = []
        session.subscribe(lambda: None, lambda offer, now=now: now.append(offer.number))  # type: ignore[misc]
        put_into(session, 0, mode=Mode.NOWAIT)
        put_into(session, 1)
        assert now == ([] if threads else [0])
        offer = session.take()
        assert isinstance(offer, Offer)
        assert offer.number == (0 if threads else 1)


ENDS = [
    (PeerClosed(""), sb.EndOfStream, "", False),
    (ConnectionResetError("reset by peer"), sb.BrokenResourceError, "producer a producer was lost: reset", False),
    (WireError("nonsense"), sb.BrokenResourceError, "nonsense", True),
]


@pytest.mark.parametrize(("cause", "kind", "text", "warns"), ENDS)
def test_the_end_comes_after_what_arrived(
    cause: Exception, kind: type[Exception], text: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    session = producer_session(FakeChannel())
    put_into(session, 0)
    session.ended(cause)
    assert isinstance(session.take(), Offer)
    for _ in range(2):
        with pytest.raises(kind, match=text or None):
            session.take()
    assert bool(caplog.records) == warns


# --- payloads that stay with their producer ---------------------------------------------------------------------------


def test_payloads_that_two_threads_release_at_the_same_time_are_dropped() -> None:
    channel = FakeChannel(at_once=False)
    session = producer_session(channel, owner=OWNER)
    held: list[list[object]] = []
    for number in range(2):
        put_into(session, number, f"r{number}", key=number)
        held.append([session.take()])
        session.answer(number, None)
    in_lockstep(Leases._on_released, *(one.clear for one in held))
    channel.turn()
    assert sorted(key for one in channel.sent if isinstance(one, m.DropPayloads) for key in one.keys) == [0, 1]


def test_a_kept_payload_is_dropped_once_nobody_holds_its_rollout() -> None:
    channel = FakeChannel()
    session = producer_session(channel, owner=OWNER)
    for number in range(3):
        put_into(session, number, f"r{number}", key=number)
    offers = [session.take() for _ in range(3)]
    held = [offer.rollouts[0] for offer in offers if isinstance(offer, Offer)]
    assert all(isinstance(rollout, RemoteRollout) and rollout.owner == OWNER for rollout in held)
    assert session.keeps_payloads
    del offers
    for number in range(3):
        session.answer(number, None)
    assert m.DropPayloads not in map(type, channel.sent)
    gc.disable()  # by counting alone, not whenever a collection comes
    try:
        del held[1:]
        assert sorted(key for one in channel.sent if isinstance(one, m.DropPayloads) for key in one.keys) == [1, 2]
        held.clear()
    finally:
        gc.enable()
    assert not session.keeps_payloads


def test_a_rollout_may_die_while_the_session_is_at_work() -> None:
    """Finalizers run inside a garbage collection, which may begin anywhere: with the session's lock taken, too."""
    session = producer_session(FakeChannel(), owner=OWNER)
    put_into(session, 0, key=0)
    offers = [session.take()]

    def let_go() -> None:
        with session._lock:
            offers.clear()
            session._taken.clear()

    thread = threading.Thread(target=let_go, daemon=True)
    thread.start()
    thread.join(GUARD_S)
    assert not thread.is_alive(), "it waits for its own lock"
    assert not session.keeps_payloads


def test_payloads_are_kept_only_by_who_can_be_reached_once_each_and_up_to_a_size() -> None:
    with pytest.raises(WireError, match="may not"):
        put_into(producer_session(FakeChannel()), 0, key=0)
    session = producer_session(FakeChannel(), owner=OWNER)
    put_into(session, 0, key=7)
    with pytest.raises(WireError, match="may not"):
        put_into(session, 1, key=7)
    with pytest.raises(WireError, match="may not"):
        put_into(producer_session(FakeChannel(), Limits(2**20, SIZE), owner=OWNER), 0, key=0, tokens=200)
    group = EncodedRequest(
        Request(Mode.GROUP, [make_rollout(3, f"g{n}", group_id="g") for n in range(2)]), lambda: None, kept=True
    )
    message, buffers = outgoing(group, 0)
    twice = tuple(msgspec.structs.replace(header, payload=3) for header in message.rollouts)
    with pytest.raises(WireError, match="may not"):
        send(producer_session(FakeChannel(), owner=OWNER), m.PutGroup(0, twice), buffers)


# --- the producer's end -----------------------------------------------------------------------------------------------

WELCOME = m.WelcomeProducer(2 * SIZE, 10 * SIZE)


class Kept(dict[int, sb.Rollout]):
    """Payloads that stay here."""

    def keep(self, key: int, rollout: sb.Rollout) -> None:
        self[key] = rollout

    def drop(self, keys: Any) -> None:
        for key in keys:
            self.pop(key, None)


def opened(*, at_once: bool = True, **options: Any) -> tuple[ProducerPort, FakeChannel]:
    port, channel = ProducerPort(**options), FakeChannel(at_once=at_once)
    port.opened(channel, WELCOME)
    return port, channel


def numbers(channel: FakeChannel) -> list[tuple[type[m.Message], int]]:
    return [(type(one), one.number) for one in channel.sent if isinstance(one, TO_CONTROLLER)]


def test_puts_wait_for_the_channel_and_for_room_and_keep_their_order() -> None:
    port, channel = ProducerPort(), FakeChannel()
    puts = [a_put(f"r{n}") for n in range(3)]
    for put in puts:
        port.ask(put)
    assert channel.sent == []
    port.opened(channel, WELCOME)
    assert numbers(channel) == [(m.Put, 0), (m.Put, 1)]
    port.receive(m.Accepted((1, 0)), (), ())
    assert numbers(channel)[2:] == [(m.Put, 2)]
    assert [(put.done, put.error) for put in puts] == [(True, None), (True, None), (False, None)]


def test_how_it_was_put_travels() -> None:
    port, channel = opened()
    group = EncodedRequest(
        Request(Mode.GROUP, [make_rollout(1, f"g{n}", group_id="g") for n in range(2)]), lambda: None
    )
    port.ask(group)
    port.receive(m.Accepted((0,)), (), ())
    port.ask(a_put("n", mode=Mode.NOWAIT))
    first, second = channel.sent
    assert isinstance(first, m.PutGroup)
    assert [header.total_bytes for header in first.rollouts] == [group.wire_bytes // 2] * 2
    assert isinstance(second, m.Put)
    assert not second.wait


def test_what_is_declared_of_a_group_travels_in_the_order_of_the_puts() -> None:
    port, channel = opened()
    session = producer_session(FakeChannel())
    puts = [
        a_put("a"),
        EncodedRequest(Request(Mode.DECLARE, declared=GroupSize("g", 3)), lambda: None),
        EncodedRequest(Request(Mode.DECLARE, declared=GroupSize("g", None)), lambda: None),
        EncodedRequest(Request(Mode.ABANDON, declared=GroupSize("g", None)), lambda: None),
        EncodedRequest(
            Request(Mode.GROUP, [make_rollout(1, "c", group_id="g")], declared=GroupSize("g", None)), lambda: None
        ),
    ]
    for number, put in enumerate(puts):
        port.ask(put)
        send(session, *outgoing(put, number, 0))
        offer = session.take()
        assert isinstance(offer, Offer)
        assert (offer.number, offer.mode, offer.declared) == (number, put.request.mode, put.request.declared)
        assert [r.rollout_id for r in offer.rollouts] == [r.rollout_id for r in put.request.rollouts]
    assert channel.sent[1:4] == [
        m.DeclareGroup(1, "g", "expected", 3),
        m.DeclareGroup(2, "g", "closed"),
        m.DeclareGroup(3, "g", "abandoned"),
    ]
    for number in (0, 3):  # twice, or behind
        with pytest.raises(WireError, match="DeclareGroup"):
            send(session, m.DeclareGroup(number, "g", "closed"))
    assert "what was declared of group 'g' waited: gone" in str(puts[1].lost("gone"))


def test_a_cancel_follows_its_put_and_the_reply_decides() -> None:
    port, channel = opened(at_once=False)
    sent, waits, third = a_put("sent"), a_put("waits", tokens=20), a_put("third")
    for put in (sent, waits, third):
        port.ask(put)
    port.cancel(sent)
    port.cancel(waits)
    channel.turn()
    assert isinstance(sent.error, RequestCancelled), "not sent yet: it is done at once"
    assert isinstance(waits.error, RequestCancelled)
    assert numbers(channel) == [(m.Put, 0)]
    port.cancel(third)
    channel.turn()
    assert numbers(channel)[1:] == [(m.Cancel, 0)]
    assert not third.done
    port.receive(m.Accepted((0,)), (), ())
    assert third.done
    assert third.error is None


def test_puts_without_a_reply_go_to_the_next_controller_and_their_cancels_after_them() -> None:
    tries: list[None] = []
    port, channel = ProducerPort(reconnect=lambda: tries.append(None)), FakeChannel()
    port.opened(channel, WELCOME)
    first, second, third = a_put("first"), a_put("second"), a_put("third")
    port.ask(first)
    port.ask(second)
    port.cancel(second)
    assert numbers(channel) == [(m.Put, 0), (m.Put, 1), (m.Cancel, 1)]
    port.ended(ConnectionResetError("the network broke"))
    port.ask(third)
    assert (len(tries), first.done, second.done) == (1, False, False)
    channel = FakeChannel()
    port.opened(channel, WELCOME)
    assert numbers(channel) == [(m.Put, 2), (m.Put, 3), (m.Cancel, 3)]
    port.receive(m.PutRefused(2, "duplicate", "it is held"), (), ())
    assert first.done
    assert first.error is None
    assert numbers(channel)[3:] == [(m.Put, 4)]


FINAL = [PeerGone("it is dead for good"), PeerClosed("it ends"), ConnectionAbortedError("closed here"), WireError()]


@pytest.mark.parametrize("error", FINAL, ids=lambda error: type(error).__name__)
def test_a_producer_joins_again_only_where_somebody_may_come_back(error: Exception) -> None:
    port, put = ProducerPort(reconnect=lambda: pytest.fail("nobody is there")), a_put()
    port.opened(FakeChannel(), WELCOME)
    port.ask(put)
    port.ended(error)
    assert isinstance(put.error, sb.BrokenResourceError)


def test_a_producer_that_is_closed_does_not_join_again() -> None:
    port, channel = ProducerPort(reconnect=lambda: pytest.fail("it leaves")), FakeChannel()
    port.opened(channel, WELCOME)
    port.close()
    port.ended(ConnectionResetError())


def test_a_cancel_while_nothing_is_connected_says_what_hinders() -> None:
    port = ProducerPort(problem=lambda: "nobody answers")
    put = a_put()
    port.ask(put)
    port.cancel(put)
    assert str(put.error) == "not connected: nobody answers"


@pytest.mark.parametrize("message", [m.Accepted((0,)), m.PutRefused(0, "full", "")], ids=repr)
def test_a_reply_without_a_put_is_refused(message: m.Message) -> None:
    port, _ = opened()
    with pytest.raises(WireError, match="not on its way"):
        send(port, message)


@pytest.mark.parametrize("message", [one for one in OTHERS if not isinstance(one, TO_PRODUCER)], ids=repr)
def test_what_a_controller_never_sends_is_refused(message: m.Message) -> None:
    port, _ = opened()
    for buffers in ([], [torch.zeros(1, dtype=torch.uint8)]):
        with pytest.raises(WireError, match=type(message).__name__):
            send(port, message, buffers)
    with pytest.raises(WireError, match="DropPayloads"):
        send(port, m.DropPayloads((1,)))


def test_the_end_ends_every_put_and_closes_once_nothing_is_kept() -> None:
    kept = Kept()
    port, channel = opened(kept=kept)
    put = EncodedRequest(Request(Mode.PUT, [make_rollout(3, "r")]), lambda: None, kept=True)
    port.ask(put)
    port.receive(m.Accepted((0,)), (), ())
    late = EncodedRequest(Request(Mode.PUT, [make_rollout(3, "late")]), lambda: None, kept=True)
    port.ask(late)
    released: list[int] = []
    port.when_released(lambda: released.append(1))
    port.receive(m.End(), (), ())
    assert put.error is None
    assert isinstance(late.error, sb.ClosedResourceError)
    assert (channel.closed, released, sorted(kept)) == (None, [], [0, 1])
    port.receive(m.DropPayloads((0,)), (), ())
    assert (channel.closed, released) == (None, [])
    port.receive(m.DropPayloads((1, 5)), (), ())
    assert (channel.closed, released) == ("", [1])


LOSSES = [
    (ConnectionResetError("connection closed by peer"), sb.BrokenResourceError, "waited: connection closed by peer"),
    (PeerClosed(""), sb.BrokenResourceError, "waited: the controller closed the connection"),
    (PeerClosed("it was tired\nof it"), sb.BrokenResourceError, "waited: it was tired;"),
    (ConfigError("there is no host"), ValueError, "there is no host"),
    (ValueError("a stray one is nobody's knob"), sb.BrokenResourceError, "waited: a stray one"),
    (
        refused_error("authentication", "another token"),
        sb.RefusedError,
        "another token; ",
    ),
    (WireError("nonsense"), WireError, "nonsense"),
]


@pytest.mark.parametrize(("cause", "kind", "text"), LOSSES)
def test_a_loss_says_what_became_of_each_put(cause: Exception, kind: type[Exception], text: str) -> None:
    port, _ = opened(kept=Kept())
    sent, waits, later = a_put("sent", tokens=20), a_put("waits"), a_put("later")
    port.ask(sent)
    port.ask(waits)
    port.ended(cause)
    port.ask(later)
    for put in (sent, waits, later):
        assert isinstance(put.error, kind)
        assert text in str(put.error)
    if kind is sb.BrokenResourceError:
        assert "is not known" in str(sent.error)
        for put in (waits, later):
            assert "had not been sent, so it was not accepted" in str(put.error)
    released: list[int] = []
    port.when_released(lambda: released.append(1))
    assert released == [1], "who needed the payloads is gone"


def test_closing_cancels_what_is_sent_waits_for_the_replies_and_releases_all() -> None:
    hung_up: list[int] = []
    port, channel = opened(hang_up=lambda: hung_up.append(1))
    sent, waits = a_put("sent", tokens=20), a_put("waits")
    port.ask(sent)
    port.ask(waits)
    closing = threading.Thread(target=port.close, daemon=True)
    closing.start()
    while (m.Cancel, 0) not in numbers(channel):
        assert closing.is_alive()
    assert channel.closed is None
    port.receive(m.PutRefused(0, "cancelled", ""), (), ())
    closing.join(GUARD_S)
    assert (channel.closed, channel.aborted, hung_up) == ("", True, [1])
    for put in (sent, waits):
        assert isinstance(put.error, sb.ClosedResourceError)
    port.close()


def test_closing_does_not_wait_longer_than_linger_s_or_for_a_channel_that_never_came() -> None:
    port, channel = opened(linger_s=0.01)
    put = a_put()
    port.ask(put)
    port.close()
    assert channel.aborted
    assert "is not known" in str(put.error)
    hung_up: list[int] = []
    port = ProducerPort(hang_up=lambda: hung_up.append(1))
    put = a_put()
    port.ask(put)
    port.close()
    assert hung_up == [1]
    assert isinstance(put.error, sb.ClosedResourceError)


def test_a_reply_from_within_send_does_not_overtake_the_puts_in_hand() -> None:
    """As in memory, where the controller may answer before ``send`` returns."""
    port = ProducerPort(threads=False)

    class Answering(FakeChannel):
        answered = 0

        def turn(self) -> None:
            super().turn()
            while self.answered < len(self.sent):
                put = self.sent[self.answered]
                self.answered += 1
                assert isinstance(put, m.Put)
                port.receive(m.Accepted((put.number,)), (), ())

    channel = Answering(threads=False)
    puts = [a_put(f"r{n}") for n in range(6)]
    for put in puts:
        port.ask(put)
    port.opened(channel, WELCOME)
    assert [put.number for put in channel.sent if isinstance(put, m.Put)] == list(range(6))
    assert all(put.done for put in puts)


# --- both, in their threads -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_session_lives_in_two_threads(backend: Literal["asyncio", "trio"]) -> None:
    """``admit`` and ``receive`` in the channel's, everything else in the event loop; no reply is lost or doubled."""
    count, channel, replies = 300, FakeChannel(), queue.SimpleQueue[int]()
    limits = Limits(8 * SIZE, 8 * SIZE)

    async def main() -> None:
        news = anyio.Event()
        session = producer_session(channel, limits, loop_caller())
        session.subscribe(lambda: news.set(), lambda offer: None)
        thread = threading.Thread(target=producer, args=(session,), daemon=True)
        thread.start()

        async def attend() -> None:
            nonlocal news
            while True:
                news = anyio.Event()
                while (item := session.take()) is not None:
                    if isinstance(item, Offer):
                        session.answer(item.number, None if item.number % 3 else sb.WouldBlock())
                while channel.sent:
                    reply = channel.sent.pop(0)
                    assert isinstance(reply, (m.Accepted, m.PutRefused))
                    for number in reply.numbers if isinstance(reply, m.Accepted) else (reply.number,):
                        replies.put(number)
                await news.wait()

        with pytest.raises(sb.EndOfStream):
            await attend()
        await anyio.to_thread.run_sync(thread.join)

    def producer(session: ProducerSession) -> None:
        for number in range(count):
            if number >= 4:
                seen.append(replies.get(timeout=GUARD_S))
            put_into(session, number, f"r{number}")
            send(session, m.Cancel(number))
        while len(seen) < count:
            seen.append(replies.get(timeout=GUARD_S))
        session.ended(PeerClosed(""))

    seen: list[int] = []
    anyio.run(main, backend=backend)
    assert seen == list(range(count))


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub("sb-hub", lambda: True)
    hub.start()
    yield hub
    hub.close()


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


def test_puts_that_are_read_together_wake_the_event_loop_together(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one call. Were it woken for each, the loop's thread and the hub's would take turns at every put."""
    received: list[m.Message] = []
    receive = ProducerSession.receive

    def note(session: ProducerSession, message: m.Message, *rest: Any) -> None:
        received.append(message)
        receive(session, message, *rest)

    monkeypatch.setattr(ProducerSession, "receive", note)
    received_by_then: list[int] = []
    done = threading.Event()

    def in_loop(function: Callable[[], object]) -> None:
        function()
        received_by_then.append(len(received))
        done.set()

    one, other = connected()
    with other:
        for number in range(10):
            message, [buffer] = outgoing(a_put(f"r{number}"), number)
            other.sendall(frame(message, (buffer.numel(),)) + bytes(buffer.numpy()))
        session = welcome_producer(hub, one, m.JoinProducer("a producer"), Limits(), in_loop, linger_s=1.0)
        assert done.wait(GUARD_S)
        taken = [offer.number for offer in iter(session.take, None) if isinstance(offer, Offer)]
        assert (taken, received_by_then) == (list(range(10)), [10])


def test_whom_a_hub_has_served_learns_that_it_is_closed(hub: Hub) -> None:
    one, other = connected()
    with other:
        session = welcome_producer(hub, one, m.JoinProducer("a producer"), Limits(), lambda f: f(), linger_s=1.0)
        hub.close()
        with pytest.raises(sb.BrokenResourceError, match="closed on this side"):
            session.take()
