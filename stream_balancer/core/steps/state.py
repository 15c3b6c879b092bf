"""State of steps in flight: steps, items, shares and ranks.

A rank may be several processes, *seats* (tensor or pipeline parallel). All get the same items in the same order. Masks
of seats are ints: seat 2 is ``1 << 2``, and ``Rank.full`` has all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

ALL_SEATS = -1
"""However many there were."""


class StepSeal(NamedTuple):
    """The last word before ranks meet: who meets, and without which rollouts. Two of one number are equal."""

    step: int
    number: int
    ranks: tuple[int, ...]
    gone: frozenset[str] = frozenset()
    """Masked everywhere: payloads that are lost."""


class HeldItem(NamedTuple):
    """An item, as a process that joins has it."""

    done: bool
    fetched: bool
    missing: frozenset[str]


class HeldStep(NamedTuple):
    """A step, as a process that joins has it."""

    uid: int
    attempt: int
    items: Mapping[int, HeldItem]
    """In the order of training."""
    taken: bool
    waiting: bool
    came_back: int
    """Number of the seal whose meeting has failed; 0: none."""
    seal: StepSeal | None
    gone: frozenset[str] = frozenset()
    """Rollouts that the process masks."""


@dataclass(eq=False, slots=True)
class Item:
    """A micro-batch. The host makes it; fields from ``sent`` on are the ledger's."""

    id: int
    """Unique in its step. A rank trains in the order of ids."""
    owner: int | None
    rollouts: tuple[str, ...]
    """Ids of its rollouts, without padding copies."""
    group: int | None = None
    """Number of the lockstep that the item belongs to. None: the ranks do not meet at every micro-batch."""
    remote: bool = False
    """Payloads are fetched by the owner, who says what is missing. Of a group, all items are remote or none."""
    payload: Any = None
    """The host's."""
    sent: int = 0
    fetched: int = 0
    done: int = 0
    is_told: bool = False
    """A remote one: all seats were told to begin."""


@dataclass(eq=False, slots=True)
class Share:
    """A rank's part of a step."""

    rank: Rank
    step: StepState
    items: dict[int, Item] = field(default_factory=dict)
    unsent: dict[int, Item] = field(default_factory=dict)
    """Not sent to all seats."""
    attempt: int = 1
    """Counts rewinds. What a process says of an earlier one does not count."""
    first: int = 1
    """The first attempt of this plan: earlier ones were of another plan of this number."""
    # Masks of seats: was sent the step, began with it, has nothing left to do, has the seal, and of those, came back
    # from a failed meeting; has the step in its weights, has acknowledged it.
    opened: int = 0
    taken: int = 0
    waiting: int = 0
    sealed: int = 0
    back: int = 0
    finished: int = 0
    acked: int = 0

    @property
    def is_acked(self) -> bool:
        return self.acked == self.rank.full

    def own(self, ids: Iterable[int]) -> list[Item]:
        """Items of these that are still the rank's."""
        return [self.items[id_] for id_ in ids if id_ in self.items]

    @property
    def may_meet(self) -> int:
        """Seats that may be in the collective now."""
        return self.sealed & ~self.back & ~self.finished

    def note_waiting(self) -> None:
        at_barrier = self.step.at_barrier
        # what has not been sent yet is still to be done, whatever the rank has said
        if self.waiting == self.rank.full and not self.unsent:
            at_barrier.add(self.rank.id)
        else:
            at_barrier.discard(self.rank.id)


@dataclass(eq=False, slots=True)
class Rank:
    id: int
    full: int = 1
    links: int = 0
    """Seats that are connected."""
    incarnation: int = -1
    depth: int = 2
    """Steps that it may hold and has not begun."""
    weights_of: dict[int, int] = field(default_factory=dict)
    """By seat, once it has said: its weights have all steps before this one."""
    acked_of: dict[int, int] = field(default_factory=dict)
    """By seat: the last step that it has acknowledged."""
    stale: dict[int, int] = field(default_factory=dict)
    """By step: the last attempt of another plan of that number, which the process had when it joined."""
    is_given_up: bool = False
    is_warned: bool = False
    ended: int = 0
    active: dict[int, Share] = field(default_factory=dict)
    """By step, ascending: what it has not acknowledged."""

    @property
    def seats(self) -> int:
        """Number of its processes."""
        return self.full.bit_length()

    @property
    def is_here(self) -> bool:
        return self.links == self.full

    @property
    def weights(self) -> int | None:
        """Weights of the seat that is least far. None: not all have said."""
        known = self.weights_of.values()
        return min(known) if len(known) == self.seats else None

    @property
    def furthest(self) -> int:
        """Weights of the seat that is furthest: one may have met where another has failed."""
        return max(self.weights_of.values(), default=0)

    @property
    def acked(self) -> int:
        """The last step that all its seats have acknowledged."""
        return min(self.acked_of.values()) if len(self.acked_of) == self.seats else -1

    @property
    def room(self) -> int:
        """Steps that may be planned for it. O(its active steps)."""
        if not self.is_here:
            return 0
        return self.depth - sum(share.taken != self.full for share in self.active.values())

    def activate(self, share: Share) -> None:
        number = share.step.number
        if share.is_acked:
            self.active.pop(number, None)
        elif number not in self.active:
            # steps come in order but after a restart: sorting each time would cost every step
            in_order = not self.active or next(reversed(self.active)) < number
            self.active[number] = share
            if not in_order:
                self.active = dict(sorted(self.active.items()))


@dataclass(eq=False, slots=True)
class StepState:
    number: int
    uid: int
    """Tells two plans of one number apart."""
    items: dict[int, Item] = field(default_factory=dict)
    participants: set[int] = field(default_factory=set)
    """Ranks that meet, or have met."""
    shares: dict[int, Share] = field(default_factory=dict)
    ownerless: dict[int, Item] = field(default_factory=dict)
    groups: dict[int, dict[int, Item]] = field(default_factory=dict)
    torn: set[int] = field(default_factory=set)
    """Groups of which a part was lost."""
    gone: set[str] = field(default_factory=set)
    num_noted: int = 0
    """Rollouts of ``gone`` that are in the journal."""
    unfetched: set[int] = field(default_factory=set)
    """Remote items of which a seat has not said what is missing."""
    at_barrier: set[int] = field(default_factory=set)
    seal: StepSeal | None = None
    seals: int = 0
    """Number of the last seal."""
    holders: set[int] = field(default_factory=set)
    """Ranks that may be in the collective now, or in front of it with a seal that is valid."""
    met: set[int] = field(default_factory=set)
    """Ranks whose weights have the step."""
    is_met: bool = False
    acks: int = 0
    is_kept: bool = False
    """Acknowledged by a rank: not given again, whoever dies."""
    attempts: int = 1
    settling: set[int] = field(default_factory=set)
    """After a restart: ranks that have not said yet what they have."""
    is_settled: bool = True
    is_changed: bool = False
    """After a restart: a process has something other than what was planned for it."""

    @property
    def is_uncertain(self) -> bool:
        """The ranks may have met, and nobody here knows. Nothing is sent again, replanned or rewound meanwhile."""
        return bool(self.settling or (self.holders and not self.met and not self.is_kept))

    def add(self, item: Item) -> None:
        self.items[item.id] = item
        self.unfetch(item)
        if item.group is not None:
            self.groups.setdefault(item.group, {})[item.id] = item

    def remove(self, item: Item) -> None:
        del self.items[item.id]
        self.unfetched.discard(item.id)
        if item.group is not None:
            self.groups[item.group].pop(item.id)

    def take_off(self, item: Item, seats: int) -> None:
        """Take it off these seats, and what they had made of it."""
        self.unfetch(item)
        item.sent, item.done, item.fetched = item.sent & ~seats, item.done & ~seats, item.fetched & ~seats

    def reset(self, item: Item) -> None:
        """No process has it."""
        self.take_off(item, ALL_SEATS)
        item.is_told = False

    def tear(self, item: Item) -> None:
        """A part of its group is lost, if it is in one."""
        if item.group is not None:
            self.torn.add(item.group)

    def unfetch(self, item: Item) -> None:
        if item.remote:
            self.unfetched.add(item.id)

    def parts(self, item: Item) -> Iterable[Item]:
        """The items that are computed in one collective with this one."""
        return (item,) if item.group is None else self.groups[item.group].values()

    def gone_of(self, items: Iterable[Item]) -> frozenset[str]:
        return frozenset(self.gone.intersection(rollout for item in items for rollout in item.rollouts))

    def remove_rank(self, one: int) -> Share | None:
        """Take the rank out of the step. -> its share."""
        share = self.shares.pop(one, None)
        if share is not None:
            share.rank.active.pop(self.number, None)
            # the step is over once all of its participants have acknowledged it: this one is none any more
            self.acks -= share.is_acked
            for ranks in (self.participants, self.at_barrier, self.holders):
                ranks.discard(one)
        return share


def seats_of(mask: int) -> Iterator[int]:
    """Numbers of the bits that are set."""
    return (seat for seat in range(mask.bit_length()) if mask >> seat & 1)
