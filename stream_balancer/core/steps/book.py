"""All steps and ranks, and what facts have touched since orders were last asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from stream_balancer.core.steps.orders import Order
from stream_balancer.core.steps.state import Item, Rank, Share, StepState, seats_of

LayOut: TypeAlias = Callable[[int, list[Item], list[int]], Iterable[Item]]
"""Plans anew: items of a step that have no owner, and ranks -> items of these ranks in place of those, with ids that
rise in one order of groups on all ranks."""


class Book:
    """Every step that is planned and not acknowledged, every rank, and what facts have touched."""

    def __init__(self, lay_out: LayOut, *, meets: bool = True, generation: int = 0) -> None:
        self.lay_out, self.meets, self.generation = lay_out, meets, generation
        self.steps: dict[int, StepState] = {}
        self.ranks: dict[int, Rank] = {}
        self.wanted: set[int] = set()
        self.last_acked = -1
        self.fenced: dict[int, int] = {}
        """The last incarnation of each rank that was given up. The journal keeps it."""
        self.ended = False
        # dicts for their order, which makes orders the same in every run
        self.steps_touched: dict[int, None] = {}
        self.ranks_touched: dict[int, None] = {}
        self.out: list[Order] = []
        # Above every index of a plan, and above what an earlier controller gave.
        self._last_id = (generation + 1) << 20

    def new_id(self) -> int:
        """For an item or a group that is made after the plan. Never given twice, in any generation."""
        self._last_id += 1
        return self._last_id

    def touch(self, step: StepState, *, everybody: bool = False) -> None:
        self.steps_touched[step.number] = None
        if everybody:
            self.ranks_touched.update(dict.fromkeys(step.shares))

    def touch_all_ranks(self) -> None:
        self.ranks_touched.update(dict.fromkeys(self.ranks))

    def tell(self, rank: Rank, seats: int, order: Callable[..., Order], *fields: object) -> None:
        """The same order for each of these seats of a rank."""
        self.out += [order(rank.id, seat, *fields) for seat in seats_of(seats)]

    def rank(self, one: int) -> Rank:
        return self.ranks.setdefault(one, Rank(one))

    def share(self, step: StepState, one: int) -> Share:
        share = step.shares.get(one)
        if share is None:
            share = step.shares[one] = Share(self.rank(one), step)
            self.renumber(share)
            share.rank.activate(share)
        return share

    def renumber(self, share: Share) -> None:
        """Begin above the attempts of another plan of that number: what a process says of it may be on its way."""
        attempt = share.rank.stale.pop(share.step.number, 0) + 1
        if attempt > share.attempt:
            share.first = share.attempt = attempt
            share.step.attempts = max(share.step.attempts, attempt)

    @property
    def members(self) -> list[int]:
        """Ranks of the next step. O(ranks)."""
        # a rank that never came yet is waited for; one that was given up is not
        incarnations = {one: rank.incarnation for one, rank in self.ranks.items()}
        return [one for one in sorted(self.wanted) if incarnations.get(one, -1) > self.fenced.get(one, -2)]

    def add(self, step: StepState, items: Iterable[Item]) -> None:
        """Items that a step begins with, or that are laid out anew."""
        for item in items:
            step.add(item)
            self.own(step, item, item.owner)
            if item.owner is None:
                step.tear(item)

    def own(self, step: StepState, item: Item, owner: int | None) -> None:
        """Give the item, which no process has, to a rank; to none if that rank is not there."""
        item.owner = owner if owner in step.participants else None
        if item.owner is None:
            step.ownerless[item.id] = item
            self.touch(step)
            return
        share = self.share(step, item.owner)
        share.items[item.id] = share.unsent[item.id] = item
        # with one more item it has something left to do
        step.at_barrier.discard(item.owner)
        self.ranks_touched[item.owner] = None

    def disown(self, step: StepState, item: Item) -> None:
        if item.owner in step.shares:
            share = step.shares[item.owner]
            del share.items[item.id]
            share.unsent.pop(item.id, None)
        step.reset(item)
        self.own(step, item, None)

    def note_fetched(self, step: StepState, item: Item, bit: int, full: int) -> None:
        """A seat has the payloads of the item, but for those that are gone."""
        item.fetched |= bit
        # once, with the last seat: whoever shares the item may begin only when all have it
        if item.fetched == full and item.id in step.unfetched:
            step.unfetched.remove(item.id)
            self.ranks_touched.update((part.owner, None) for part in step.parts(item) if part.owner is not None)
