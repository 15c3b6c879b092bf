"""The ledger of steps: who has what of each step in flight, and what is to be done next. Pure: no clock, no I/O, no
thread, no torch.

Facts are methods that only record. :meth:`Ledger.orders` looks at what they have touched and says what to do now. Two
ranks, one step of four micro-batches; rank 1 dies after its first one, which was in a gradient that is gone:

>>> from stream_balancer.core.steps.state import Item
>>> def lay_out(step, items, over):
...     return [Item(ledger.new_id(), over[0], item.rollouts) for item in items]
>>> ledger = Ledger(lay_out, meets=True)
>>> ledger.resized([0, 1])
>>> ledger.joined(0, 0, 0, {})
>>> ledger.joined(1, 0, 0, {})
>>> owners = {0: 0, 1: 0, 2: 1, 3: 1}
>>> ledger.planned(0, [Item(id, owner, (f"r{id}",)) for id, owner in owners.items()])
>>> [(type(order).__name__, order.rank, [item.id for item in order.items]) for order in ledger.orders()]
[('SendWork', 0, [0, 1]), ('SendWork', 1, [2, 3])]
>>> mine, theirs = (ledger.share_of(rank, 0, 0, attempt=1) for rank in (0, 1))
>>> ledger.done(mine, 0, [0, 1])
>>> ledger.at_barrier(mine, 0)
>>> ledger.done(theirs, 0, [2])
>>> ledger.lost(1, 0)
>>> ledger.orders()
[]
>>> ledger.gave_up(1)
>>> send, = ledger.orders()
>>> send.rank, [rollout for item in send.items for rollout in item.rollouts]
(0, ['r2', 'r3'])
>>> ledger.done(mine, 0, [item.id for item in send.items])
>>> ledger.at_barrier(mine, 0)
>>> [order.seal.ranks for order in ledger.orders()]
[(0,)]
>>> ledger.finished(0, 0, 0, 1)
>>> ledger.acknowledged(0, 0, 0)
>>> ledger.orders()
[Note(step=0), Ack(step=0, gone=frozenset())]

An item that is done lies in the gradient of one process, and dies with it. A rank that holds a seal may be in the
collective at this moment. Until every holder has said "finished" or "it failed, I am back", or is known to be dead,
nobody here knows whether the weights have the step (:attr:`StepState.is_uncertain`).
"""

from __future__ import annotations

from collections.abc import Iterable

from stream_balancer.core.steps.joining import Joining
from stream_balancer.core.steps.orders import Note, Order, SendDrop
from stream_balancer.core.steps.rank_orders import look_at_rank
from stream_balancer.core.steps.state import Item, Share, StepState
from stream_balancer.core.steps.step_orders import acknowledge, look_at_step


class Ledger(Joining):
    """Facts go in, orders come out. ``lay_out`` is asked within :meth:`orders`, and answers at once.

    ``meets``: the ranks meet once in a step through the feed, report ``at_barrier`` and ``finished``, and
    wait for the seal in between; else each trains on its own, and gets again what it has not acknowledged.
    ``generation``: of the controller, larger at each start.
    """

    # -- questions -----------------------------------------------------------------------------------------------------

    @property
    def wants_step(self) -> bool:
        """Room for one more step on every rank: the planner may choose as late as this. O(ranks)."""
        ranks = [self.ranks.get(one) for one in self.members]
        return bool(ranks) and all(rank is not None and rank.room > 0 for rank in ranks)

    def items_of(self, number: int, one: int) -> list[Item]:
        """Items of one rank in one step, as they are trained on."""
        step = self.steps.get(number)
        share = None if step is None else step.shares.get(one)
        return [] if share is None else [share.items[id_] for id_ in sorted(share.items)]

    def share_of(self, one: int, seat: int, number: int, attempt: int | None = None) -> Share | None:
        """The work that a process reports on. None for what counts no more: of a lost process, a step that is over, an
        attempt that was rewound."""
        rank, step = self.ranks.get(one), self.steps.get(number)
        if rank is None or step is None or not rank.links >> seat & 1:
            return None
        share = step.shares.get(one)
        return None if share is None or attempt not in (None, share.attempt) else share

    # -- facts: the planner's ------------------------------------------------------------------------------------------

    def planned(self, number: int, items: Iterable[Item], *, uid: int = 0) -> None:
        """A new step. ``uid`` tells two plans of one number apart: a checksum of the plan."""
        step = self.steps[number] = StepState(number, uid)
        step.participants.update(self.members)
        # also those for whom there is no item: they meet with the others all the same
        for one in step.participants:
            self.share(step, one)
        self.add(step, items)
        self.touch(step, everybody=True)

    def resized(self, numbers: Iterable[int]) -> None:
        """Ranks that take part from the next step on."""
        self.wanted = set(numbers)
        self.touch_all_ranks()

    def end(self) -> None:
        """No step is planned any more."""
        self.ended = True
        self.touch_all_ranks()

    # -- facts: what a process reports ---------------------------------------------------------------------------------

    def taken(self, one: int, seat: int, number: int, attempt: int) -> None:
        """A loop has begun with the step: the credit is back."""
        share = self.share_of(one, seat, number)
        if share is not None and attempt >= share.first:
            share.taken |= 1 << seat
            # another step may have waited for the credit
            if len(share.rank.active) > 1:
                self.ranks_touched[one] = None

    def done(self, share: Share, seat: int, items: Iterable[int]) -> None:
        """Items that are in the gradient."""
        for item in share.own(items):
            item.done |= 1 << seat

    def fetched(self, share: Share, seat: int, items: Iterable[int], missing: Iterable[str]) -> None:
        """Payloads of these items are there, but for those of the ``missing`` rollouts."""
        step, lost = share.step, frozenset(missing)
        for item in share.own(items):
            step.gone.update(lost.intersection(item.rollouts))
            self.note_fetched(step, item, 1 << seat, share.rank.full)
        self.touch(step, everybody=not step.unfetched)

    def at_barrier(self, share: Share, seat: int, came_back: int = 0) -> None:
        """Nothing is left to do in the step. ``came_back``: number of the seal whose meeting has failed."""
        if not self.meets:
            return
        step, one, bit = share.step, share.rank.id, 1 << seat
        if step.seal is not None and came_back == step.seals:
            share.back |= bit
            if share.back == share.rank.full:
                step.holders.discard(one)
        # else something is on its way to it
        if all(item.done & bit for item in share.items.values() if item.sent & bit):
            share.waiting |= bit
            share.note_waiting()
        self.touch(step)
        self.ranks_touched[one] = None

    def finished(self, one: int, seat: int, number: int, attempt: int) -> None:
        """The ranks have met, and its weights have the step and all before it. ``attempt`` 0: they are others'."""
        # also of a step that is over here: the weights count when it joins again
        rank, bit = self.rank(one), 1 << seat
        rank.weights_of[seat] = max(rank.weights_of.get(seat, 0), number + 1)
        for step in [step for step in self.steps.values() if step.number <= number]:
            share = step.shares.get(one)
            if attempt and (step.number < number or share is None or attempt < share.first):
                continue
            if share is not None and rank.links & bit:
                share.finished |= bit
            if self.meets:
                step.met.add(one)
                # now it is known that they have met: whoever was left behind leaves the step
                if len(step.met) == 1:
                    self.touch_all_ranks()
            self.touch(step)
        self.ranks_touched[one] = None

    def acknowledged(self, one: int, seat: int, number: int) -> None:
        """Steps up to this one are in weights that the process can come back to."""
        rank, bit = self.rank(one), 1 << seat
        # what a lost process had acknowledged, nobody can know
        if not rank.links & bit:
            return
        rank.acked_of[seat] = max(rank.acked_of.get(seat, -1), number)
        # a step whose ranks were all given up ends once one that has met acknowledges it, or a later one
        for step in self.steps.values():
            if not step.participants:
                self.touch(step)
        for share in [share for share in rank.active.values() if share.step.number <= number and share.finished & bit]:
            step = share.step
            share.acked |= bit
            if share.is_acked:
                step.acks += 1
                step.is_kept = self.meets
                rank.activate(share)
                self.out.append(Note(step.number))
                self.touch(step)
        self.ranks_touched[one] = None

    def acknowledged_by_user(self, number: int) -> None:
        """At a checkpoint: this step is in saved weights. What ranks say of it counts no more."""
        if (step := self.steps.get(number)) is not None:
            for share in step.shares.values():
                self.tell(share.rank, share.rank.links & share.opened & ~share.finished, SendDrop, number, True)
            acknowledge(self, step)

    # -- orders --------------------------------------------------------------------------------------------------------

    def orders(self) -> list[Order]:
        """All that is to be done now; each is given once. A fact of one rank costs its active steps; the seal of a step
        costs its ranks and items, once."""
        # what is looked at may touch more
        while self.steps_touched or self.ranks_touched:
            # in the order of steps, so that orders are the same in every run
            for number in sorted(self.steps_touched):
                if (step := self.steps.get(number)) is not None:
                    look_at_step(self, step)
                del self.steps_touched[number]
            ranks, self.ranks_touched = sorted(self.ranks_touched), {}
            for one in ranks:
                if (rank := self.ranks.get(one)) is not None and rank.is_here:
                    look_at_rank(self, rank)
        out, self.out = self.out, []
        return out
