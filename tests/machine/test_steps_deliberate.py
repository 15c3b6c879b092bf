"""Deliberate faults: one rule each that somebody might forget, and the invariant that the machine finds broken then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from steps_checks import InvariantError
from steps_config import random_config
from steps_world import World

from stream_balancer.client.held import Held
from stream_balancer.core.steps import joining, rank_orders, step_orders
from stream_balancer.core.steps.ledger import Ledger
from stream_balancer.core.steps.state import StepState
from stream_balancer.net.messages import Rewind

Make = Callable[[Any], Any]
"""What stands in the place of a function or property. -> what is put there."""

GIVEN_UP: dict[str, Any] = {"faults": ("kill", "flap", "give_up"), "num_faults": 8, "meets": True, "all_die": False}
LOST: dict[str, Any] = {"faults": ("lose",), "num_faults": 8, "remote": True}


def _before(do: Callable[..., object]) -> Make:
    """``do`` comes first, with the same arguments."""

    def make(old: Any) -> Any:
        def new(*args: Any, **options: Any) -> Any:
            do(*args)
            return old(*args, **options)

        return new

    return make


def _after(do: Callable[..., object]) -> Make:
    def make(old: Any) -> Any:
        def new(*args: Any, **options: Any) -> Any:
            result = old(*args, **options)
            do(*args)
            return result

        return new

    return make


def _always(answer: Any) -> Make:
    return lambda old: lambda *args: answer


def _with(**values: Any) -> Make:
    """While it runs, its last argument has these values."""

    def make(old: Any) -> Any:
        def new(*args: Any) -> Any:
            *_, one = args
            kept = {name: getattr(one, name) for name in values}
            _set(one, **values)
            result = old(*args)
            _set(one, **kept)
            return result

        return new

    return make


def _set(one: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(one, name, value)


def _acknowledge_for_all(ledger: Ledger, *said: Any) -> None:
    for step in ledger.steps.values():
        step.acks = len(step.participants) if step.acks else 0


FAULTS: dict[str, tuple[str, Any, str, Make, dict[str, Any]]] = {
    # invariant, where, what, the fault, features that it is about
    "sealed is taken for not met": (
     "again", StepState, "is_uncertain",
     lambda old: property(lambda step: bool(step.settling)), GIVEN_UP),
    "one seat that came back speaks for all": (
     "again", Ledger, "at_barrier",
     _before(lambda ledger, share, seat, came_back=0: came_back and _set(share, back=share.rank.full)),
     {**GIVEN_UP, "seats": 2, "ranks": 3}),
    "who is in the meeting is told that others have met": (
     "stall", rank_orders, "_leave_behind", _with(sealed=0),
     GIVEN_UP),
    "who was given up may come back": (
     "fence", Ledger, "gave_up",
     _after(lambda ledger, one: ledger.fenced.pop(one)),
     {**GIVEN_UP, "faults": ("flap", "give_up"), "ranks": 2, "steps": 4}),
    "credits are not counted": (
     "credits", rank_orders, "_has_credit", _always(True), {"depth": 1, "steps": 4}),
    "what a process has is sent again": (
     "credits", Ledger, "joined",
     lambda old: lambda ledger, one, seat, incarnation, has, **more: old(ledger, one, seat, incarnation, {}, **more),
     {"faults": ("flap",), "num_faults": 8}),
    "what is rewound is kept": (
     "credits", Held, "take",
     lambda old: lambda held, message, payloads: isinstance(message, Rewind) or old(held, message, payloads),
     {**GIVEN_UP, "lockstep": True, "ranks": 3}),
    "weights are taken for a checkpoint": (
     "acknowledged", Ledger, "finished",
     _after(lambda ledger, one, seat, number, attempt: ledger.acknowledged(one, seat, number)),
     {"meets": True, "auto_ack": False}),
    "the first rank acknowledges for all": (
     "once", Ledger, "acknowledged", _after(_acknowledge_for_all),
     {"meets": False, "lockstep": False, "ranks": 3}),
    "the seal does not say what is masked": (
     "once", step_orders, "StepSeal",
     lambda old: lambda number, seal, ranks, gone: old(number, seal, ranks), {**LOST, "meets": True}),
    "a seal does not wait for the last payload": (
     "denominators", step_orders, "_may_seal",
     _before(lambda book, step: len(step.unfetched) == 1 and step.unfetched.clear()), {**LOST, "meets": False}),
    "masks are not sent with the work": (
     "once", StepState, "gone_of", _always(frozenset()), {**LOST, "meets": True}),
    "nobody begins again": (
     "stall", step_orders, "rewind", _always(None),
     {**GIVEN_UP, "lockstep": True, "remote": False, "ranks": 3}),
    "the journal is believed whatever has moved": (
     "once", step_orders, "_settle",
     _before(lambda book, step: _set(step, is_changed=False)),
     {**GIVEN_UP, "faults": ("kill", "give_up", "restart")}),
    "work of a dead process is kept": (
     "once", joining, "_forget",
     lambda old: lambda step, share, item, seats: None if item.done & seats else old(step, share, item, seats),
     {"faults": ("kill",), "num_faults": 8}),
    "numbers of seals begin anew": (
     "seal", step_orders, "_seal",
     _before(lambda book, step: _set(step, seals=0)),
     {**GIVEN_UP, "num_faults": 12, "ranks": 3, "steps": 2, "seats": 1}),
    "old weights are trained": (
     "weights", rank_orders, "_lacks_weights", _always(False),
     {"meets": True, "ranks": 3, "faults": ("kill", "resize"), "num_faults": 8}),
    "nobody is told that it is left behind": (
     "stall", rank_orders, "_leave_behind", _always(None),
     {**GIVEN_UP, "faults": ("kill",), "ranks": 3}),
    "a restored step waits for nobody": (
     "again", Ledger, "restore",
     _after(lambda ledger, number, *rest: ledger.steps[number].settling.clear()),
     {**GIVEN_UP, "faults": ("restart", "kill", "give_up"), "ranks": 3}),
    "one seat's payloads are enough": (
     "once", Ledger, "note_fetched",
     _before(lambda ledger, step, item, bit, full: step.unfetched.discard(item.id)),
     {**LOST, "meets": True, "seats": 2}),
}  # fmt: skip


@pytest.mark.parametrize(("invariant", "where", "what", "fault", "features"), FAULTS.values(), ids=FAULTS)
def test_a_deliberate_fault_breaks_the_invariant_that_is_about_it(
    monkeypatch: pytest.MonkeyPatch, invariant: str, where: Any, what: str, fault: Make, features: dict[str, Any]
) -> None:
    monkeypatch.setattr(where, what, fault(getattr(where, what)))
    found = set[str]()
    # a schedule may break another one first: the machine has thousands of them
    for seed in range(300):
        try:
            World(replace(random_config(seed), **features)).run()
        except InvariantError as error:
            found.add(error.invariant)
            if invariant in found:
                return
    pytest.fail(f"broken: {found or 'nothing'}")
