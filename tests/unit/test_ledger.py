"""The ledger of steps, fact by fact: words that come twice or too late, and who waits for a rank that is given up. What
holds in any order is in tests/machine."""

from __future__ import annotations

from stream_balancer.core.steps.ledger import Ledger
from stream_balancer.core.steps.orders import Behind, SendEnd, SendSeal, SendWork
from stream_balancer.core.steps.state import HeldStep, Item, Share

ZERO, ONE = 0, 1


def ledger_of(*ranks: int) -> Ledger:
    """Ranks that meet, have come, and have nothing."""
    ledger = Ledger(lambda *_: [], meets=True)
    ledger.resized(ranks)
    for rank in ranks:
        ledger.joined(rank, 0, 0, {})
    return ledger


def item(number: int, owner: int) -> Item:
    return Item(number, owner, (f"r{number}",))


def share(ledger: Ledger, rank: int, step: int = 0) -> Share:
    found = ledger.share_of(rank, 0, step)
    assert found is not None
    return found


def test_a_late_word_on_an_older_seal_does_not_give_the_newer_one_back() -> None:
    """Who holds the newer one may be in the collective, and no other is made meanwhile."""
    ledger = ledger_of(ZERO, ONE)
    ledger.planned(0, [item(0, ZERO), item(1, ONE)])
    ledger.orders()
    for rank in (ZERO, ONE):
        ledger.done(share(ledger, rank), 0, [rank])
    for failed in (0, 1):
        for rank in (ZERO, ONE):
            ledger.at_barrier(share(ledger, rank), 0, failed)
        assert {one.seal.number for one in ledger.orders() if isinstance(one, SendSeal)} == {failed + 1}
    ledger.at_barrier(share(ledger, ZERO), 0, 1)
    ledger.at_barrier(share(ledger, ONE), 0, 2)
    assert ledger.orders() == []
    ledger.at_barrier(share(ledger, ZERO), 0, 2)
    assert [one.seal.number for one in ledger.orders() if isinstance(one, SendSeal)] == [3, 3]


def test_a_late_word_on_an_older_step_does_not_turn_weights_back() -> None:
    """Else the rank is told that it lacks what it has."""
    ledger = ledger_of(ZERO, ONE)
    for number in (0, 1):
        ledger.planned(number, [item(2 * number, ZERO), item(2 * number + 1, ONE)])
        for rank in (ZERO, ONE):
            ledger.finished(rank, 0, number, 1)
    ledger.finished(ZERO, 0, 0, 1)
    assert ledger.rank(ZERO).weights == 2


def test_who_comes_again_is_told_of_the_end_again() -> None:
    """Its connection may have broken with the word on its way."""
    ledger = ledger_of(ZERO, ONE)
    ledger.end()
    assert {one.rank for one in ledger.orders() if isinstance(one, SendEnd)} == {ZERO, ONE}
    assert ledger.orders() == []
    ledger.joined(ZERO, 0, 0, {})
    assert [one.rank for one in ledger.orders() if isinstance(one, SendEnd)] == [ZERO]


def test_words_on_another_plan_of_a_number_count_no_more() -> None:
    """They may be on their way while the rank is given this one's."""
    ledger = ledger_of(ZERO, ONE)
    ledger.planned(0, [item(0, ZERO), item(1, ONE)], uid=1)
    other = HeldStep(uid=2, attempt=3, items={}, taken=True, waiting=False, came_back=0, seal=None)
    ledger.joined(ZERO, 0, 1, {0: other})
    ledger.orders()
    assert ledger.share_of(ZERO, 0, 0, 3) is None
    ledger.taken(ZERO, 0, 0, 3)
    assert ledger.rank(ZERO).room == 1
    assert ledger.share_of(ZERO, 0, 0, 4) is share(ledger, ZERO)
    ledger.taken(ZERO, 0, 0, 4)
    assert ledger.rank(ZERO).room == 2


def test_a_credit_that_is_back_sends_the_step_that_waited_for_it() -> None:
    ledger = ledger_of(ZERO)
    ledger.joined(ZERO, 0, 1, {}, depth=1)
    for number in (0, 1):
        ledger.planned(number, [item(0, ZERO)])
    assert [one.step for one in ledger.orders() if isinstance(one, SendWork)] == [0]
    ledger.taken(ZERO, 0, 0, 1)
    assert [one.step for one in ledger.orders() if isinstance(one, SendWork)] == [1]


def test_nobody_meets_while_something_sent_is_undone() -> None:
    ledger = ledger_of(ZERO, ONE)
    ledger.planned(0, [item(0, ZERO), item(1, ZERO), item(2, ONE)])
    ledger.orders()
    ledger.done(share(ledger, ONE), 0, [2])
    ledger.at_barrier(share(ledger, ONE), 0)
    for id_, meets in ((0, False), (1, True)):
        ledger.done(share(ledger, ZERO), 0, [id_])
        ledger.at_barrier(share(ledger, ZERO), 0)
        assert any(isinstance(one, SendSeal) for one in ledger.orders()) is meets


def test_who_lacks_weights_that_only_a_lost_rank_had_goes_on_once_that_is_given_up() -> None:
    ledger = ledger_of(ZERO, ONE)
    ledger.planned(0, [item(0, ZERO), item(1, ONE)])
    for rank in (ZERO, ONE):
        ledger.finished(rank, 0, 0, 1)
        ledger.acknowledged(rank, 0, 0)
    ledger.orders()
    ledger.joined(ZERO, 0, 1, {}, weights=0)
    ledger.planned(1, [item(0, ZERO)])
    assert [type(one) for one in ledger.orders() if one.rank == ZERO] == [Behind]  # type: ignore[union-attr]
    ledger.lost(ONE, 0)
    assert ledger.orders() == []
    ledger.gave_up(ONE)
    assert [(type(one), one.rank) for one in ledger.orders()] == [(SendWork, ZERO)]  # type: ignore[union-attr]
