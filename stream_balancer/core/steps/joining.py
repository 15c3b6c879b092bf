"""Processes that come, come again, or stay away for good; and a controller that was started again.

What a process says on joining replaces what was believed of it. A new incarnation has nothing. A broken link, a second
seat, a restarted rank and a restarted controller differ only in what they say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from stream_balancer.core.steps.book import Book
from stream_balancer.core.steps.deciding import make_seal
from stream_balancer.core.steps.orders import Drop, Refuse, Rewind
from stream_balancer.core.steps.state import HeldStep, Item, Rank, RankId, Share, Step

__all__ = ["gave_back", "gave_up", "joined", "restore"]


def joined(
    book: Book,
    one: RankId,
    seat: int,
    incarnation: int,
    has: Mapping[int, HeldStep],
    weights: int | None,
    seats: int,
    depth: int,
) -> None:
    rank, bit = book.rank(one), 1 << seat
    if incarnation <= book.fenced.get(one, -1):
        book.out.append(Refuse(one, seat))
        return
    if rank.is_given_up or rank.full != (1 << seats) - 1 or rank.incarnation != incarnation:
        _supersede(book, rank, (1 << seats) - 1)
    rank.incarnation, rank.depth, rank.is_given_up, rank.is_warned = incarnation, depth, False, False
    rank.weights_of.pop(seat, None)
    if weights is not None:
        rank.weights_of[seat] = weights
    rank.links |= bit
    rank.ended &= ~bit
    for number, held in has.items():
        step = book.steps.get(number)
        if step is None or step.uid != held.uid or one not in step.shares:
            met = (
                number <= book.last_acked if step is None else step.uid == held.uid and (bool(step.met) or step.is_kept)
            )
            book.out.append(Drop(one, seat, number, met))
            if step is not None and one in step.shares:
                _tell_apart(step.shares[one], held.attempt)
    for step in book.steps.values():
        if book.meets and not one.role:
            (step.met.add if max(rank.weights_of.values(), default=0) > step.number else step.met.discard)(one)
        if (share := step.shares.get(one)) is not None:
            held_step = has.get(step.number)
            _says(book, share, bit, held_step if held_step and held_step.uid == step.uid else None, weights or 0)
            if rank.is_here:
                step.settling.discard(one)
        book.touch(step)
    book.touch_all_ranks()


def _tell_apart(share: Share, attempt: int) -> None:
    """The process has another plan of this number, and what it says of that may still be on its way."""
    if attempt >= share.attempt:
        share.first = share.attempt = attempt + 1
        share.step.attempts = max(share.step.attempts, share.attempt)


def _supersede(book: Book, rank: Rank, full: int) -> None:
    """The processes that were the rank are no more, and what they held with them. Acknowledged is acknowledged."""
    shares = [step.shares[rank.id] for step in book.steps.values() if rank.id in step.shares]
    was_acked = [share.is_acked for share in shares]
    rank.full, rank.links, rank.weights_of, rank.acked_of = full, 0, {}, {}
    for share, acked in zip(shares, was_acked, strict=True):
        step = share.step
        share.acked = full if acked else 0
        if acked and not rank.id.role:
            continue
        share.opened = share.taken = share.waiting = share.sealed = share.back = share.finished = 0
        step.holders.discard(rank.id)
        for item in share.items.values():
            _forget(step, share, item, item.sent)
        for id_ in share.recalled:
            share.recalled[id_] = full
        if share.answers or share.recalled:
            share.answers = 0
            gave_back(book, share)
        share.note_waiting()


def _forget(step: Step, share: Share, item: Item, seats: int) -> None:
    """These seats do not have the item any more."""
    item.is_begun = False
    if item.has_columns:
        return
    if item.sent & seats and item.group is not None:
        step.torn.add(item.group)
    step.unfetch(item)
    item.sent, item.done, item.fetched = item.sent & ~seats, item.done & ~seats, item.fetched & ~seats
    share.unsent[item.id] = item


def _says(book: Book, share: Share, bit: int, held: HeldStep | None, weights: int) -> None:
    step, rank = share.step, share.rank
    if share.is_acked and not rank.id.role:
        return
    is_past = weights > step.number and not rank.id.role
    if held is not None:
        step.gone |= held.gone
        share.attempt = max(share.attempt, held.attempt)  # of an earlier controller, it may be the later one
        step.attempts = max(step.attempts, held.attempt)
        if not step.is_settled:
            step.is_changed |= held.attempt != 1 or list(held.items) != sorted(share.items)
        elif held.attempt != share.attempt and not is_past:
            book.out.append(Rewind(rank.id, bit.bit_length() - 1, step.number, share.attempt))
    current = held if held is not None and held.attempt == share.attempt else None
    for item in share.items.values():
        if is_past:
            item.sent, item.done = item.sent | bit, item.done | bit
            book.note_fetched(step, item, bit, rank.full)
        elif current is None or item.id not in current.items:
            _forget(step, share, item, bit)
        else:
            there = current.items[item.id]
            item.is_begun = False
            item.sent |= bit
            item.done = _flag(item.done, bit, there.done)
            if there.fetched:
                step.gone |= there.missing
                book.note_fetched(step, item, bit, rank.full)
        if item.sent == rank.full:
            share.unsent.pop(item.id, None)
    share.opened = _flag(share.opened, bit, is_past or held is not None)
    share.taken = _flag(share.taken, bit, is_past or (held is not None and held.taken))
    share.finished = _flag(share.finished, bit, is_past)
    share.waiting = _flag(share.waiting, bit, current is not None and current.waiting)
    share.go = {}
    if rank.id.role:
        share.sealed &= ~bit
    else:
        step.unasked.add(rank.id)
        _says_of_seal(book, share, bit, held)
        for id_ in share.recalled:
            share.recalled[id_] = _flag(share.recalled[id_], bit, not share.items[id_].sent & bit)
        if share.answers & bit:
            share.answers &= ~bit
            gave_back(book, share)
        share.note_waiting()
    rank.activate(share)


def _says_of_seal(book: Book, share: Share, bit: int, held: HeldStep | None) -> None:
    step, seal = share.step, None if held is None else held.seal
    if seal is not None and seal.number > step.seals:  # of an earlier controller
        step.seals, step.seal = seal.number, make_seal(step, seal.number, seal.ranks, seal.gone)
    has_seal = seal is not None and seal.number == step.seals
    share.sealed = _flag(share.sealed, bit, has_seal)
    share.back = _flag(share.back, bit, has_seal and held is not None and held.came_back == step.seals)
    may_meet = book.meets and share.may_meet and not share.finished
    (step.holders.add if may_meet else step.holders.discard)(share.rank.id)


def _flag(mask: int, bit: int, is_set: bool) -> int:
    return mask | bit if is_set else mask & ~bit


def gave_back(book: Book, share: Share) -> None:
    """A Recall is answered by a seat, or by its coming again. Once all have: what all gave back has no owner; what one
    has begun stays, and is sent again to those who gave it back."""
    step, rank = share.step, share.rank
    if share.answers:
        return
    step.recalls.discard(rank.id)
    recalled, share.recalled = share.recalled, {}
    for id_, seats in recalled.items():
        item = share.items[id_]
        if seats == rank.full:
            del share.items[id_]
            share.unsent.pop(id_, None)
            book.disown(step, item)
            item.is_released = True
            step.unasked.add(rank.id)
            continue
        item.is_begun = True
        if seats:
            step.unfetch(item)
            item.sent, item.fetched = item.sent & ~seats, item.fetched & ~seats
            share.unsent[id_] = item
    share.note_waiting()


def gave_up(book: Book, one: RankId) -> None:
    rank = book.rank(one)
    rank.is_given_up, rank.links = True, 0
    book.fenced[one] = max(book.fenced.get(one, -1), rank.incarnation)
    for step in book.steps.values():
        share = step.remove_rank(one)
        step.settling.discard(one)
        step.met.discard(one)
        if share is None:
            continue
        for item in share.items.values():
            if item.has_columns:
                continue
            if item.group is not None:
                step.torn.add(item.group)
            book.disown(step, item)
        book.touch(step)
    book.touch_all_ranks()


def restore(
    book: Book,
    number: int,
    uid: int,
    items: Iterable[Item],
    participants: Iterable[RankId],
    acked: Collection[RankId],
    gone: Iterable[str],
) -> None:
    step = book.steps[number] = Step(number, uid, is_complete=True, is_settled=not book.meets, gone=set(gone))
    step.participants.update(participants)
    step.settling.update(step.participants.difference(acked))
    for one in step.participants:
        book.share(step, one)
    for item in items:
        step.add(item)
        book.own(step, item, item.owner)
    for one in step.participants.intersection(acked):
        share = step.shares[one]
        share.acked, step.is_kept = share.rank.full, book.meets
        step.acks += 1
        share.unsent.clear()
        for item in share.items.values():
            book.note_fetched(step, item, share.rank.full, share.rank.full)
        share.rank.activate(share)
