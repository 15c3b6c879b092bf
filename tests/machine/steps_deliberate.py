"""Deliberate faults of a ledger: one rule each that somebody might forget, and the invariant that then breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stream_balancer.client.held import Held
from stream_balancer.core.steps import Ledger, Recall, deciding, joining, state
from stream_balancer.core.steps.book import Book
from stream_balancer.core.steps.state import Item, Share, Step

Fault = Callable[[pytest.MonkeyPatch], None]
FAULTS: dict[str, tuple[str, dict[str, Any], Fault]] = {}
"""By name: the invariant that it breaks, features that it is about, and how to put it into the ledger."""


def fault(invariant: str, **features: Any) -> Callable[[Fault], Fault]:
    def add(put: Fault) -> Fault:
        FAULTS[put.__name__] = invariant, features, put
        return put

    return add


@fault("again", meets=True, faults=("kill", "flap", "give_up"), num_faults=8)
def forgets_that_sealed_is_not_met(patch: pytest.MonkeyPatch) -> None:
    """Replans and sends although a rank that holds the seal may be in the collective."""
    patch.setattr(Step, "is_uncertain", property(lambda step: bool(step.settling)))


@fault("fence", meets=True, faults=("kill", "flap", "give_up"), num_faults=8)
def lets_who_was_given_up_come_back(patch: pytest.MonkeyPatch) -> None:
    gave_up = Ledger.gave_up

    def without_fence(book: Ledger, one: state.RankId) -> None:
        gave_up(book, one)
        del book.fenced[one]

    patch.setattr(Ledger, "gave_up", without_fence)


@fault("credits", depth=1, steps=4)
def ignores_credits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(deciding, "_has_credit", lambda share: True)


@fault("credits")
def sends_again_what_a_process_has(patch: pytest.MonkeyPatch) -> None:
    joined = Ledger.joined

    def without_has(book: Ledger, one: state.RankId, seat: int, incarnation: int, has: Any, **rest: Any) -> None:
        joined(book, one, seat, incarnation, {}, **rest)

    patch.setattr(Ledger, "joined", without_has)


@fault("acknowledged", meets=True, auto_ack=False)
def takes_weights_for_a_checkpoint(patch: pytest.MonkeyPatch) -> None:
    """Acknowledges what a rank has finished."""
    finished = Ledger.finished

    def acknowledged(ledger: Ledger, one: state.RankId, seat: int, number: int, attempt: int) -> None:
        finished(ledger, one, seat, number, attempt)
        ledger.acknowledged(one, seat, number)

    patch.setattr(Ledger, "finished", acknowledged)


@fault("once", meets=False)
def acknowledges_with_the_first_rank(patch: pytest.MonkeyPatch) -> None:
    acknowledged = Ledger.acknowledged

    def for_all(ledger: Ledger, one: state.RankId, seat: int, number: int) -> None:
        acknowledged(ledger, one, seat, number)
        for step in ledger.steps.values():
            step.acks = len(step.participants) if step.acks else 0

    patch.setattr(Ledger, "acknowledged", for_all)


@fault("once", meets=True, shared=True, remote=False, faults=("kill", "give_up"), num_faults=8, ranks=3)
def rewinds_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(deciding, "_rewind", lambda book, step: step.torn.clear())


@fault("once", meets=True, moves=True, shared=False, roles=(), faults=("kill", "give_up", "restart"), num_faults=8)
def trusts_its_journal(patch: pytest.MonkeyPatch) -> None:
    """After a restart goes on with the plan, whatever has moved since."""
    settle = deciding._settle

    def unchanged(book: Book, step: Step) -> None:
        step.is_changed = False
        settle(book, step)

    patch.setattr(deciding, "_settle", unchanged)


@fault("once", faults=("kill",))
def keeps_work_of_a_dead_process(patch: pytest.MonkeyPatch) -> None:
    """Counts as done what was in the gradient of an earlier incarnation."""
    forget = joining._forget

    def unless_done(step: Step, share: Share, item: Item, seats: int) -> None:
        if not item.done:
            forget(step, share, item, seats)

    patch.setattr(joining, "_forget", unless_done)


@fault("once", meets=True, is_open=True)
def seals_an_open_step(patch: pytest.MonkeyPatch) -> None:
    may_seal = deciding._may_seal

    def early(book: Book, step: Step) -> bool:
        step.is_complete = True
        return may_seal(book, step)

    patch.setattr(deciding, "_may_seal", early)


@fault("denominators", meets=False, remote=True, faults=("lose",), num_faults=8, is_open=False)
def seals_before_all_is_fetched(patch: pytest.MonkeyPatch) -> None:
    may_seal = deciding._may_seal

    def early(book: Book, step: Step) -> bool:
        unfetched, step.num_unfetched = step.num_unfetched, 0
        may = may_seal(book, step)
        step.num_unfetched = unfetched
        return may

    patch.setattr(deciding, "_may_seal", early)


@fault("once", remote=True, roles=("ref",), faults=("lose",), num_faults=8)
def forgets_masks(patch: pytest.MonkeyPatch) -> None:
    """Sends without what is gone already."""
    patch.setattr(Step, "gone_of", lambda step, items: frozenset())


@fault("seal", meets=True, ranks=3, faults=("kill", "give_up"), num_faults=8)
def numbers_seals_anew(patch: pytest.MonkeyPatch) -> None:
    """A seal that became void and the next one have the same number."""
    seal = deciding._seal

    def again(book: Book, step: Step) -> None:
        step.seals = 0
        seal(book, step)

    patch.setattr(deciding, "_seal", again)


@fault("order", moves=True, seats=2, remote=False, meets=True)
def gives_back_the_first(patch: pytest.MonkeyPatch) -> None:
    """A process gives back the items that come next, not the last ones."""

    def release(held: Held, order: Recall) -> None:
        part = held.parts[order.step]
        ids = [id_ for id_ in order.items if not part.work[id_].begun][:1]
        for id_ in ids:
            del part.work[id_]
        held._say("released", order.step, order.attempt, tuple(ids))

    patch.setattr(Held, "_release", release)


@fault("order", meets=True, shared=True, roles=("ref",), ranks=3)
def lets_items_overtake(patch: pytest.MonkeyPatch) -> None:
    """Sends whatever has its columns, though others share what is behind."""
    patch.setattr(
        deciding,
        "_ready",
        lambda share: [it for it in state.in_order(share.unsent.values()) if share.step.is_ready(it)],
    )


@fault("columns", roles=("ref",))
def sends_without_columns(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Step, "is_ready", lambda step, item: True)


@fault("weights", meets=True, ranks=3, faults=("kill", "resize"), num_faults=8)
def lets_old_weights_train(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(deciding, "_lacks_weights", lambda book, rank, step: False)


@fault("stall", meets=True, ranks=3, faults=("kill",), num_faults=8)
def tells_nobody_that_it_is_left_behind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(deciding, "_leave_behind", lambda book, share: None)
