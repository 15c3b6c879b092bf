"""The ledger of steps, fact by fact: words that come twice or too late, and who waits for a rank that is given up. What
holds in any order is in tests/machine."""

from __future__ import annotations

from stream_balancer.core.steps.ledger import Ledger
from stream_balancer.core.steps.orders import Behind, SendSeal, SendWork
from stream_balancer.core.steps.state import TRAIN, Item, Piece, RankId, Share

ZERO, ONE, REF = RankId(TRAIN, 0), RankId(TRAIN, 1), RankId("ref", 0)


def ledger_of(*ranks: RankId) -> Ledger:
    """Ranks that meet, have come, and have nothing."""
    ledger = Ledger(lambda *_: [], meets=True)
    for role in {rank.role: None for rank in ranks}:
        ledger.resized(role, [rank.number for rank in ranks if rank.role == role])
    for rank in ranks:
        ledger.joined(rank, 0, 0, {})
    return ledger


def item(number: int, owner: RankId, *needs: int) -> Item:
    return Item(number, owner, (Piece(f"r{number}"),), role=owner.role, needs=needs)


def share(ledger: Ledger, rank: RankId, step: int = 0) -> Share:
    found = ledger.share_of(rank, 0, step)
    assert found is not None
    return found


def test_columns_that_come_twice_count_once() -> None:
    """Else the role's step is over while one of its items is still to be computed."""
    ledger = ledger_of(ZERO, REF)
    ledger.planned(0, [item(0, REF), item(1, REF), item(2, ZERO, 0), item(3, ZERO, 1)])
    ledger.orders()
    for _ in range(2):
        ledger.done(share(ledger, REF), 0, [0])
    [send] = ledger.orders()
    assert isinstance(send, SendWork)
    assert [one.id for one in send.items] == [2]
    ledger.done(share(ledger, REF), 0, [1])
    assert [(type(one), one.rank) for one in ledger.orders()] == [(SendWork, ZERO), (SendSeal, REF)]  # type: ignore[union-attr]


def test_a_late_word_on_an_older_seal_does_not_give_the_newer_one_back() -> None:
    """Who holds the newer one may be in the collective, and no other is made meanwhile."""
    ledger = ledger_of(ZERO, ONE)
    ledger.planned(0, [item(0, ZERO), item(1, ONE)])
    ledger.orders()
    for rank in (ZERO, ONE):
        ledger.done(share(ledger, rank), 0, [rank.number])
    for failed in (0, 1):
        for rank in (ZERO, ONE):
            ledger.at_barrier(share(ledger, rank), 0, failed)
        assert {one.seal.number for one in ledger.orders() if isinstance(one, SendSeal)} == {failed + 1}
    ledger.at_barrier(share(ledger, ZERO), 0, 1)
    ledger.at_barrier(share(ledger, ONE), 0, 2)
    assert ledger.orders() == []
    ledger.at_barrier(share(ledger, ZERO), 0, 2)
    assert [one.seal.number for one in ledger.orders() if isinstance(one, SendSeal)] == [3, 3]


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
