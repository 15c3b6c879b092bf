"""A ledger with facts and orders in short text, for schedules that are written by hand.

``0@1`` is item 0 of rank 1; ``4@0/7`` belongs to group 7; ``5@0*`` is remote. An order reads ``send 1 [0 3]``; of
another step than 0, ``send 1 s2 [0]``; with seats, ``send 1.0 [0]``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from stream_balancer.core.steps.ledger import Ledger
from stream_balancer.core.steps.orders import Order
from stream_balancer.core.steps.state import HeldItem, HeldStep, Item, StepSeal

_ITEM = re.compile(r"(?P<id>\d+)@(?P<owner>\d+)(?:/(?P<group>\d+))?(?P<remote>\*)?")


def say_to(ledger: Ledger, fact: str, one: int, *args: Any) -> None:
    """A fact, by what a process says: work is looked up by seat, step and attempt."""
    if fact not in ("done", "fetched", "at_barrier"):
        getattr(ledger, fact)(one, *args)
    elif (share := ledger.share_of(one, *args[:3])) is not None:
        getattr(ledger, fact)(share, args[0], *args[3:])


class Play:
    """``ranks``, all of whose processes have joined."""

    def __init__(self, ranks: str = "0 1", *, seats: int = 1, restarted: bool = False, **options: Any) -> None:
        self.seats, self.ranks = seats, ranks.split()
        self.ledger = Ledger(self._lay_out, generation=int(restarted), **options)
        self.replans: list[str] = []
        self.ledger.resized(map(int, self.ranks))
        if not restarted:
            for rank in self.ranks:
                for seat in range(seats):
                    self.join(rank, seat)

    def plan(self, text: str, step: int = 0) -> list[str]:
        self.ledger.planned(step, items_of(text), uid=step)
        return self.orders()

    def _lay_out(self, step: int, items: list[Item], over: list[int]) -> list[Item]:
        """Item 3 becomes item 13, each alone, rank after rank."""
        ids = " ".join(str(item.id) for item in items)
        self.replans.append(f"replan [{ids}] over " + " ".join(map(str, over)))
        return [Item(item.id + 10, over[at % len(over)], item.rollouts) for at, item in enumerate(items)]

    def restore(self, text: str, participants: str, step: int = 0, **options: Any) -> None:
        options["acked"] = [int(rank) for rank in options.get("acked", "").split()]
        self.ledger.restore(step, step, items_of(text), map(int, participants.split()), **options)

    def join(
        self,
        rank: str,
        seat: int = 0,
        incarnation: int = 0,
        has: dict[int, HeldStep] | None = None,
        weights: int | None = 0,
    ) -> list[str]:
        self.ledger.joined(int(rank), seat, incarnation, has or {}, weights=weights, seats=self.seats, depth=2)
        return self.orders()

    def __getattr__(self, fact: str) -> Callable[..., list[str]]:
        """A fact of a process: ``play.done("1", 0, 1, [2])`` of step 0, attempt 1; ``"1.1"`` is seat 1."""

        def say(who: str, *args: Any) -> list[str]:
            rank, _, seat = who.partition(".")
            say_to(self.ledger, fact, int(rank), *([] if fact == "gave_up" else [int(seat or 0)]), *args)
            return self.orders()

        return say

    def train(self, who: str, items: Iterable[int], step: int = 0, attempt: int = 1) -> list[str]:
        """Take the step, do these items, and wait for the others."""
        return [
            *self.taken(who, step, attempt),
            *self.done(who, step, attempt, items),
            *self.at_barrier(who, step, attempt),
        ]

    def meet(self, *who: str, step: int = 0, attempt: int = 1) -> list[str]:
        return [order for one in who for order in self.finished(one, step, attempt)]

    def ack(self, *who: str, step: int = 0) -> list[str]:
        return [order for one in who for order in self.acknowledged(one, step)]

    def orders(self) -> list[str]:
        """What was laid out anew, and the orders."""
        orders = [self._text(order) for order in self.ledger.orders()]
        replans, self.replans = self.replans, []
        return replans + orders

    def _text(self, order: Order) -> str:
        kind, fields = type(order).__name__, order._asdict()
        seal: StepSeal | None = fields.pop("seal", None)
        step = seal.step if seal else fields.get("step", 0)
        words = ["send" if kind == "SendWork" else kind.removeprefix("Send").lower()]
        if "rank" in fields:
            seat = f".{order.seat}" if self.seats > 1 and "seat" in fields else ""
            words.append(f"{fields['rank']}{seat}")
        words += [f"s{step}"] * bool(step)
        if seal is not None:
            words.append(f"#{seal.number} of " + " ".join(map(str, seal.ranks)))
        if "items" in fields:
            words.append("[" + " ".join(str(getattr(item, "id", item)) for item in fields["items"]) + "]")
        if kind == "SendRewind":
            words.append(f"attempt {fields['attempt']}")
        words += ["met"] * bool(fields.get("met"))
        return " ".join(words)


def held(
    items: str, *, uid: int = 0, attempt: int = 1, taken: bool = True, waiting: bool = False, **more: Any
) -> HeldStep:
    """A step as a process has it: ``"0+ 1"`` are items 0, done, and 1."""
    parts = {int(one.rstrip("+")): HeldItem(one.endswith("+"), False, frozenset()) for one in items.split()}
    return HeldStep(uid, attempt, parts, taken, waiting, more.get("came_back", 0), more.get("seal"))


def items_of(text: str) -> list[Item]:
    return [_item(one) for one in text.split()]


def _item(text: str) -> Item:
    found = _ITEM.fullmatch(text)
    assert found is not None, text
    id_, owner, group = int(found["id"]), int(found["owner"]), found["group"]
    return Item(id_, owner, (f"r{id_}",), int(group) if group else None, bool(found["remote"]))
