"""The ledger of requests: one reply each, in order, within the limits, whatever happens to the controller."""

from __future__ import annotations

import pytest

import stream_balancer as sb
from stream_balancer.errors import WireError
from stream_balancer.testing import make_rollout
from stream_balancer.transport.replies import error_of, reason_of
from stream_balancer.transport.request_ledger import Limits, RequestLedger
from stream_balancer.transport.requests import Mode, PendingRequest, Request, RequestCancelled

LIMITS = Limits(staged_bytes=30, max_put_bytes=100)


def a_put(name: str, size: int = 10) -> PendingRequest:
    return PendingRequest(Request(Mode.PUT, [make_rollout(1, name)]), lambda: None, total_bytes=size, wire_bytes=size)


def ledger(*puts: PendingRequest, limits: Limits = LIMITS) -> RequestLedger[PendingRequest]:
    book = RequestLedger[PendingRequest]()
    book.open(limits)
    for put in puts:
        book.add(put)
    return book


def test_puts_are_sent_in_order_as_far_as_staged_bytes_go() -> None:
    puts = [a_put(f"r{n}") for n in range(5)]
    book = ledger(*puts)
    assert book.take() == (puts[:3], [])
    assert book.take() == ([], [])
    book.resolve(1, None)
    assert book.take() == (puts[3:4], [])
    assert [put.number for put in puts] == [0, 1, 2, 3, None]
    assert (puts[1].done, puts[1].error, book.num_sent) == (True, None, 3)


def test_a_larger_put_travels_alone_and_one_above_max_put_bytes_not_at_all() -> None:
    small, large, giant, last = a_put("small"), a_put("large", 90), a_put("giant", 101), a_put("last")
    book = ledger(small, large, giant, last)
    assert book.take() == ([small], [])
    book.resolve(0, None)
    assert book.take() == ([large], [])
    book.resolve(1, None)
    assert book.take() == ([last], [])
    assert isinstance(giant.error, sb.RolloutError)
    assert "max_put_bytes" in str(giant.error)


def test_a_bundle_ends_at_its_bytes_and_puts() -> None:
    puts = [a_put(f"r{n}", 1) for n in range(5)]
    book = RequestLedger[PendingRequest](bundle_bytes=3, bundle_puts=2)
    book.open(LIMITS)
    for put in puts:
        book.add(put)
    assert [len(book.take()[0]) for _ in range(4)] == [2, 2, 1, 0]


def test_cancelled_while_it_waits_it_is_done_once_sent_the_reply_decides() -> None:
    waits, sent, late = a_put("waits", 30), a_put("sent"), a_put("late")
    book = ledger(sent, waits, late)
    assert book.take() == ([sent], [])
    book.cancel(waits, "why")
    assert isinstance(waits.error, RequestCancelled)
    assert str(waits.error) == "why"
    book.cancel(sent)
    book.cancel(sent)
    assert (sent.done, book.take()) == (False, ([late], [0, 0]))
    book.resolve(0, None)
    assert (sent.done, sent.error) == (True, None)
    book.cancel(sent)
    assert book.take() == ([], [])


def test_what_has_no_reply_is_sent_again_and_first() -> None:
    sent, waits = [a_put(f"t{n}") for n in range(3)], a_put("later")
    book = ledger(*sent, limits=Limits())
    book.take()
    book.resolve(1, None)
    book.cancel(sent[2])
    book.add(waits)
    book.resend()
    assert book.take() == ([], []), "the new controller has not answered how much it takes"
    book.cancel(sent[0])
    assert not sent[0].done, "whether the controller that died accepted it is not known"
    book.open(Limits())
    assert book.take() == ([sent[0], sent[2], waits], [3, 4]), "cancelled under their new numbers"
    duplicate = sb.DuplicateRolloutError("it is held")
    book.resolve(3, duplicate)
    book.resolve(4, RequestCancelled())
    book.resolve(5, duplicate)
    assert sent[0].error is None, "the first time it was accepted, and the reply lost"
    assert isinstance(sent[2].error, RequestCancelled)
    assert waits.error is duplicate


def test_closed_it_cancels_what_is_sent_and_takes_no_more() -> None:
    sent, waits, late = a_put("sent", 30), a_put("waits"), a_put("late")
    book = ledger(sent, waits)
    book.take()
    book.close()
    assert book.closed
    assert book.take() == ([], [0])
    book.add(late)
    for put in (waits, late):
        assert isinstance(put.error, sb.ClosedResourceError)
    book.resolve(0, RequestCancelled())
    assert isinstance(sent.error, sb.ClosedResourceError), "nobody cancelled it but the closing"


def test_the_end_is_told_to_each_with_what_is_known_of_it() -> None:
    sent, waits, late = a_put("sent", 30), a_put("waits"), a_put("late")
    book = ledger(sent, waits)
    book.take()
    book.end(lambda put: put.lost("it fell over"))
    book.add(late)
    assert "outcome" in str(sent.error) or "is not known" in str(sent.error)
    for put in (waits, late):
        assert "had not been sent, so it was not accepted" in str(put.error)
    assert all(isinstance(put.error, sb.BrokenResourceError) for put in (sent, waits, late))


def test_a_reply_that_was_not_asked_for_is_refused() -> None:
    book = ledger(a_put("r"))
    with pytest.raises(WireError, match="not on its way"):
        book.resolve(0, None)
    book.take()
    book.resolve(0, None)
    with pytest.raises(WireError, match="not on its way"):
        book.resolve(0, None)


ERRORS = [
    (RequestCancelled(), "cancelled"),
    (sb.RolloutError("a"), "rollout"),
    (sb.DuplicateRolloutError("b"), "duplicate"),
    (sb.ClosedResourceError("c"), "ended"),
    (sb.WouldBlock(), "full"),
    (TypeError("d"), "type"),
    (ValueError("e"), "value"),
    (sb.JournalError("f"), "journal"),
]


@pytest.mark.parametrize(("error", "reason"), ERRORS)
def test_a_refusal_keeps_its_kind_and_words(error: Exception, reason: str) -> None:
    assert reason_of(error) == (reason, str(error))
    again = error_of(*reason_of(error))
    assert (type(again), str(again)) == (type(error), str(error))


def test_other_errors_say_whose_they_were() -> None:
    again = error_of(*reason_of(KeyError("x")))
    assert (type(again), str(again)) == (sb.BrokenResourceError, "the controller's put failed: KeyError: 'x'")
    with pytest.raises(WireError, match="unknown reason"):
        error_of("wrong", "text")  # type: ignore[arg-type]
