"""Processes that come, come again, or stay away for good; and a controller that was started again.

What a process says on joining replaces what was believed of it. A new incarnation has nothing. A broken link, a second
seat, a restarted rank and a restarted controller differ only in what they say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from stream_balancer.core.steps.book import Book
from stream_balancer.core.steps.orders import SendDrop, SendRewind
from stream_balancer.core.steps.state import ALL_SEATS, HeldItem, HeldStep, Item, Rank, Share, StepState

_IN_THE_WEIGHTS = HeldItem(done=True, fetched=True, missing=frozenset())


class Joining(Book):
    """Facts about processes that come and go."""

    def joined(
        self,
        one: int,
        seat: int,
        incarnation: int,
        has: Mapping[int, HeldStep],
        *,
        weights: int | None = 0,
        seats: int = 1,
        depth: int = 2,
    ) -> None:
        """A process has come, or come again, and says what it has; its ``weights`` have all steps before that one.
        None: those that its first step needs. An incarnation that was given up is turned away before: others have its
        work, and may be in a meeting without it. O(its items, steps in flight and ranks)."""
        rank, bit = self.rank(one), 1 << seat
        if rank.full != (1 << seats) - 1 or rank.incarnation != incarnation:
            self._supersede(rank, (1 << seats) - 1)
        rank.incarnation, rank.depth, rank.is_given_up, rank.is_warned = incarnation, depth, False, False
        # what it had said before it came again may be of weights that are gone
        rank.weights_of.pop(seat, None)
        if weights is not None:
            rank.weights_of[seat] = weights
        rank.links |= bit
        # it may have missed that no more steps come
        rank.ended &= ~bit
        for number, held in has.items():
            self._drop_unknown(one, seat, number, held)
        # Which weights it has taken, only its user knows: they are those that its first step needs, and what comes
        # before is in them, or is done by others.
        first = min(has, default=0) if weights is None and self.meets else 0
        for step in self.steps.values():
            if step.number < first and one in step.shares and not step.shares[one].is_acked:
                self._take_out(step, one)
                continue
            if self.meets or not step.is_settled:
                (step.met.add if rank.furthest > step.number else step.met.discard)(one)
            if (share := step.shares.get(one)) is not None:
                held_step = has.get(step.number)
                is_this = held_step is not None and held_step.uid == step.uid
                self._says(share, bit, held_step if is_this else None, weights or 0)
                if rank.is_here:
                    step.settling.discard(one)
            self.touch(step)
        # one more that is here may be the last that a step waited for
        self.touch_all_ranks()

    def lost(self, one: int, seat: int) -> None:
        """The link to the process that joined last is gone. What it has, nobody knows until it joins again or its rank
        is given up."""
        self.rank(one).links &= ~(1 << seat)

    def gave_up(self, one: int) -> None:
        """The rank will not come back: its unfinished work goes to others, where they cannot have met with it.
        ``fenced`` says which incarnation must not come any more."""
        rank = self.rank(one)
        rank.is_given_up, rank.links = True, 0
        # it may live on behind a broken network, with a gradient that others make again
        self.fenced[one] = max(self.fenced.get(one, -1), rank.incarnation)
        for step in self.steps.values():
            self._take_out(step, one)
        self.touch_all_ranks()

    def _take_out(self, step: StepState, one: int) -> None:
        """The rank has no part in the step any more: others do it, where they cannot have met with it."""
        share = step.remove_rank(one)
        step.settling.discard(one)
        step.met.discard(one)
        for item in () if share is None else share.items.values():
            step.tear(item)
            self.disown(step, item)
        self.touch(step)

    def restore_rank(self, one: int, incarnation: int, *, fenced: bool, ended: bool = False) -> None:
        """The last incarnation of a rank that came before the controller was started again; was it given up, or told of
        the end?"""
        rank = self.rank(one)
        rank.incarnation, rank.ended = incarnation, rank.full * ended
        if fenced:
            self.fenced[one] = incarnation

    def restore(
        self,
        number: int,
        uid: int,
        items: Iterable[Item],
        participants: Iterable[int],
        *,
        acked: Collection[int] = (),
        gone: Iterable[str] = (),
        remade: bool = False,
    ) -> None:
        """A step as the journal has it, in a ledger that was started again: its whole plan, who has acknowledged it,
        and what was masked. Ranks will say who has it. ``remade``: it was planned anew for other ranks. Call after
        :meth:`resized` and :meth:`restore_rank`."""
        # Where plain loops have the plan that they had, each goes on by itself. Under another plan a rank might train
        # what others have in their weights: all say that first.
        is_settled = not (self.meets or remade)
        step = self.steps[number] = StepState(number, uid, is_settled=is_settled, gone=set(gone))
        # all are given up: those that there are now do it, and may have begun before the restart
        step.participants.update(list(participants) or self.members)
        # whoever has acknowledged it has nothing more to say of it
        step.settling.update(step.participants.difference(acked))
        for one in step.participants:
            self.share(step, one)
        self.add(step, items)
        for one in step.participants.intersection(acked):
            share = step.shares[one]
            # in weights that can be come back to: nothing of it is sent again
            self._says(share, share.rank.full, None, number + 1)
            share.acked, step.is_kept = share.rank.full, self.meets
            step.acks += 1
            share.rank.activate(share)

    def _drop_unknown(self, one: int, seat: int, number: int, held: HeldStep) -> None:
        """The process has a step that is over, another plan of its number, or one that is not its any more."""
        step = self.steps.get(number)
        if step is not None and step.uid == held.uid:
            if one not in step.shares:
                self.out.append(SendDrop(one, seat, number, bool(step.met) or step.is_kept))
            return
        self.out.append(SendDrop(one, seat, number, step is None and number <= self.last_acked))
        self.rank(one).stale[number] = max(held.attempt, self.rank(one).stale.get(number, 0))
        if step is not None and one in step.shares:
            self.renumber(step.shares[one])

    def _supersede(self, rank: Rank, full: int) -> None:
        """The processes that were the rank are no more, and what they held with them. Acknowledged is acknowledged."""
        # read before the seats are counted anew: what was acknowledged was so by the old ones
        shares = [step.shares[rank.id] for step in self.steps.values() if rank.id in step.shares]
        was_acked = [share.is_acked for share in shares]
        rank.full, rank.links, rank.weights_of, rank.acked_of, rank.stale = full, 0, {}, {}, {}
        for share, acked in zip(shares, was_acked, strict=True):
            share.acked = full if acked else 0
            self._says(share, ALL_SEATS, None, 0)

    def _says(self, share: Share, bit: int, held: HeldStep | None, weights: int) -> None:
        """Replace what was believed of a seat, or of all, by what it says."""
        step, rank = share.step, share.rank
        # a late word on what is in saved weights changes nothing
        if share.is_acked:
            return
        is_past = weights > step.number
        if held is not None:
            step.gone |= held.gone
            # of an earlier controller, it may be the later one
            share.attempt = max(share.attempt, held.attempt)
            step.attempts = max(step.attempts, held.attempt)
            if not step.is_settled:
                step.is_changed |= held.attempt != 1 or list(held.items) != sorted(share.items)
            elif held.attempt != share.attempt and not is_past:
                self.out.append(SendRewind(rank.id, bit.bit_length() - 1, step.number, share.attempt))
        current = held if held is not None and held.attempt == share.attempt else None
        for item in share.items.values():
            there = _IN_THE_WEIGHTS if is_past else None if current is None else current.items.get(item.id)
            # a process that has come again begins anew with what it holds, and may have missed what it was told
            item.is_told = False
            if there is None:
                _forget(step, share, item, bit)
                continue
            step.take_off(item, bit)
            item.sent |= bit
            item.done = _flag(item.done, bit, there.done)
            if there.fetched:
                step.gone |= there.missing
                self.note_fetched(step, item, bit, rank.full)
            if item.sent == rank.full:
                share.unsent.pop(item.id, None)
        share.opened = _flag(share.opened, bit, is_past or held is not None)
        share.taken = _flag(share.taken, bit, is_past or (held is not None and held.taken))
        share.finished = _flag(share.finished, bit, is_past)
        share.waiting = _flag(share.waiting, bit, current is not None and current.waiting)
        self._says_of_seal(share, bit, held)
        share.note_waiting()
        rank.activate(share)

    def _says_of_seal(self, share: Share, bit: int, held: HeldStep | None) -> None:
        step, seal = share.step, None if held is None else held.seal
        # of an earlier controller
        if seal is not None and seal.number > step.seals:
            step.seals, step.seal = seal.number, seal
            # before there was this seal, all were back from the one before
            step.holders.clear()
            for other in step.shares.values():
                other.sealed = other.back = 0
        has_seal = seal is not None and seal.number == step.seals
        share.sealed = _flag(share.sealed, bit, has_seal)
        share.back = _flag(share.back, bit, has_seal and held is not None and held.came_back == step.seals)
        may_meet = self.meets and share.may_meet and not share.finished
        (step.holders.add if may_meet else step.holders.discard)(share.rank.id)


def _forget(step: StepState, share: Share, item: Item, seats: int) -> None:
    """Take the item off these seats."""
    # the others of its group may be waiting for it in a collective: none of it goes on
    if item.sent & seats:
        step.tear(item)
    step.take_off(item, seats)
    share.unsent[item.id] = item


def _flag(mask: int, bit: int, is_set: bool) -> int:
    return mask | bit if is_set else mask & ~bit
