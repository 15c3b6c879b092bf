"""Orders that are due now, of one rank: what is sent to it, and in which order."""

from __future__ import annotations

from stream_balancer.core.steps.book import Book
from stream_balancer.core.steps.orders import Behind, SendDrop, SendEnd, SendGo, SendSeal, SendWork
from stream_balancer.core.steps.state import Rank, Share, StepSeal, StepState, seats_of
from stream_balancer.core.steps.step_orders import rewind


def look_at_rank(book: Book, rank: Rank) -> None:
    # a copy: what is over leaves the rank's active steps meanwhile
    for share in list(rank.active.values()):
        if share.finished == rank.full:
            continue
        elif book.meets and (share.step.met or share.step.is_kept):
            _leave_behind(book, share)
        elif not _lacks_weights(book, rank, share.step):
            _look_at_share(book, share)
    if rank.ended != rank.full and _is_through(book, rank):
        book.tell(rank, rank.full & ~rank.ended, SendEnd)
        rank.ended = rank.full


def _is_through(book: Book, rank: Rank) -> bool:
    """Nothing more comes for the rank. What it acknowledges after its loop is not waited for."""
    is_wanted = rank.id in book.wanted
    if is_wanted and not book.ended:
        return False
    if not book.meets:
        shares = rank.active.values()
        return all(_is_finished(share) or (share.sealed == rank.full and not share.unsent) for share in shares)
    # Until every step is met, a rank must be there to do the work of a lost one.
    steps = book.steps.values() if is_wanted else [share.step for share in rank.active.values()]
    return all(step.is_met and _is_finished(step.shares.get(rank.id)) for step in steps)


def _is_finished(share: Share | None) -> bool:
    return share is None or share.finished == share.rank.full


def _leave_behind(book: Book, share: Share) -> None:
    """The others have met without it. Before it is told, it may be in the collective; and somebody who has the weights
    must be there, or the step may have to be done again. After a restart, all must have said what they have."""
    step = share.step
    is_known = step.is_kept or (not step.settling and any(book.ranks[other].is_here for other in step.met))
    if not share.may_meet and is_known:
        book.tell(share.rank, share.rank.full, SendDrop, step.number, True)
        step.remove_rank(share.rank.id)
        book.touch(step)


def _look_at_share(book: Book, share: Share) -> None:
    step, rank = share.step, share.rank
    if step.is_settled and not (step.is_uncertain and book.meets):
        _send(book, share)
    if step.seal is None or rank.id not in step.seal.ranks or share.opened != rank.full:
        return
    # Of a restored step others may be in the meeting: they wait for this rank, if it was at the barrier.
    is_awaited = step.holders and share.waiting | share.sealed == rank.full
    if not share.unsent if step.is_settled else is_awaited:
        _send_seal(book, share, step.seal)


def _lacks_weights(book: Book, rank: Rank, step: StepState) -> bool:
    """Steps before this one are not in its weights, and it will not train on them: then others must lack them, too."""
    if not book.meets:
        return False
    weights = rank.weights
    if weights is None:
        # they are those that its first step needs, which others have once they have met
        earlier = [other for number, other in book.steps.items() if number < step.number and number not in rank.active]
        return not all(other.met or other.is_kept for other in earlier)
    # each step in between must be one that it has still to do, or one that nobody has
    for number in range(weights, step.number):
        if number in rank.active:
            continue
        before = book.steps.get(number)
        if before is None:
            here = (one for one, other in book.ranks.items() if other.is_here)
            with_it = {one for one in step.participants.union(here) if book.ranks[one].furthest > number}
        else:
            with_it = before.met
        if with_it and not rank.is_warned and any(book.ranks[one].is_here for one in with_it):
            rank.is_warned = True
            others = {one: book.ranks[one].furthest for one in sorted(with_it)}
            book.tell(rank, rank.full, Behind, weights, others)
        # it takes the weights of those who have met, or will have
        if with_it or before is not None:
            return True
    return False


def _send(book: Book, share: Share) -> None:
    step, rank = share.step, share.rank
    unsent = [share.unsent[id_] for id_ in sorted(share.unsent)]
    is_new = share.opened != rank.full
    # what is sent lies in the rank's memory until it is taken
    if is_new and share.taken != rank.full and not _has_credit(share):
        return
    # The rank had left this step, or had come without it, and those who had it are gone: its later steps wait for it.
    later = [
        other
        for other in rank.active.values()
        if book.meets and other.step.number > step.number and other.opened & ~share.opened
    ]
    if any(other.step.is_uncertain for other in later):
        return
    for seat in seats_of(rank.full):
        items = tuple(item for item in unsent if not item.sent >> seat & 1)
        opens = not share.opened >> seat & 1
        if items:
            share.waiting &= ~(1 << seat)
        if items or opens:
            gone = step.gone_of(items)
            book.out.append(SendWork(rank.id, seat, step.number, step.uid, share.attempt, items, gone, opens))
    for item in unsent:
        item.sent = rank.full
    share.unsent.clear()
    share.opened = rank.full
    if unsent:
        share.note_waiting()
    _go(book, share)
    # behind the work: whoever leaves the later step finds this one
    for other in later:
        rewind(book, other.step, other)


def _has_credit(share: Share) -> bool:
    """Room for one more step on each seat that lacks it; and no older one is to be opened first."""
    rank, untaken = share.rank, list[int]()
    for other in rank.active.values():
        # older steps first: ranks meet in the order of steps
        if other.step.number < share.step.number and other.opened != rank.full:
            return False
        if other is not share:
            untaken.append(other.opened & ~other.taken)
    return all(sum(mask >> seat & 1 for mask in untaken) < rank.depth for seat in seats_of(rank.full & ~share.opened))


def _go(book: Book, share: Share) -> None:
    """Items with remote payloads begin on all who compute them together, with the same masks, or on none."""
    step, rank = share.step, share.rank
    for item in share.items.values():
        # who computes alone begins by itself once it has its payloads
        is_alone = item.group is None and rank.full == 1
        if not item.remote or is_alone or item.sent != rank.full or item.is_told:
            continue
        parts = step.parts(item)
        if all(part.owner is not None and part.id not in step.unfetched for part in parts):
            book.tell(rank, rank.full, SendGo, step.number, frozenset([item.id]), step.gone_of(parts))
            item.is_told = True


def _send_seal(book: Book, share: Share, seal: StepSeal) -> None:
    rank, step = share.rank, share.step
    seats = rank.full & ~share.sealed
    book.tell(rank, seats, SendSeal, seal)
    if seats and book.meets:
        # from here on nobody knows
        step.holders.add(rank.id)
    share.sealed = rank.full
    share.waiting &= share.back
    share.note_waiting()
