"""Invariants of steps, and the one error that says which of them was broken."""

from __future__ import annotations

INVARIANTS = {
    "once": "every piece of a step is in the gradient once, or masked on all ranks, when the ranks meet",
    "denominators": "all ranks divide by the same, over what is in that gradient",
    "seal": "the ranks that meet are those the seal names; two seals of one number are equal",
    "again": "nobody trains on a step, or is given it, that a living process has, or may have, in its weights",
    "credits": "no rank holds more steps it has not begun than its depth, and nobody is sent what it has",
    "stall": "while somebody can make a move that helps, somebody does",
    "acknowledged": "a step is acknowledged once, and only when weights that can be come back to have it",
    "order": "processes of one rank train on the same items in the same order; shared items are met in one order",
    "weights": "ranks that meet have the same weights",
    "fence": "a rank that was given up is given no work, until a new incarnation comes",
    "columns": "an item is sent with the columns it needs",
}


class InvariantError(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"[{invariant}] {text}\n{INVARIANTS[invariant]}")
        self.invariant = invariant


def check(is_kept: bool, invariant: str, text: str, *args: object) -> None:
    """``text`` has a ``{}`` for each of ``args``."""
    if not is_kept:
        raise InvariantError(invariant, text.format(*args))
