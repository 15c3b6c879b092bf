"""Orders that are due now, of one step and of one rank. They follow from the state, whatever fact came last."""

from __future__ import annotations

from stream_balancer.core.steps.book import Book
from stream_balancer.core.steps.orders import (
    Ack,
    Behind,
    Note,
    SendDrop,
    SendEnd,
    SendGo,
    SendRecall,
    SendRewind,
    SendSeal,
    SendWork,
)
from stream_balancer.core.steps.state import TRAIN, Item, Rank, RankId, Share, StepSeal, StepState, in_order, seats_of


def look_at_step(book: Book, step: StepState) -> None:
    """A step is, in this order: acknowledged by all; restored, and not all have said what they have; met, so whoever is
    left behind leaves it; perhaps met; or not met, and everything may change."""
    if step.acks == len(step.participants) and (step.is_kept or (step.participants and step.is_complete)):
        acknowledge(book, step)
        return
    # until all have said what they have, an order might be for what somebody has done already
    if step.settling:
        return
    # under the plan of before: those who met in it were all ranks of that time
    if step.met and not book.meets:
        acknowledge(book, step)
        return
    if step.met or step.is_kept:
        if not step.is_met:
            step.is_met = True
            # in the weights, or in a gradient that does not count
            step.ownerless.clear()
            step.torn.clear()
            book.ranks_touched.update(dict.fromkeys(step.participants))
        if not step.participants and any(book.ranks[one].acked >= step.number for one in step.met):
            # by those who took the weights of ranks that are no more
            acknowledge(book, step)
            return
    # else ranks may be in the collective: what is sent again now might be trained on twice
    elif not step.is_uncertain:
        _change(book, step)


def _change(book: Book, step: StepState) -> None:
    """The ranks have not met, and are not about to."""
    if step.is_met:
        _forget_meeting(book, step)
    if step.seal is not None and book.meets:
        # its holders are back, or gone
        step.seal = None
        book.touch(step, everybody=True)
    if not step.is_settled:
        _settle(book, step)
    if step.torn and book.meets:
        _rewind(book, step)
    # all who were to meet are given up: those that there are now do it
    if not step.participants:
        step.participants.update(book.members(TRAIN))
        for one in step.participants:
            book.ranks_touched[book.share(step, one).rank.id] = None
    _replan(book, step)
    if book.moves:
        _recall(book, step)
    if _may_seal(book, step):
        _seal(book, step)
    # also what is lost behind the seal of plain loops: who was started again fetches again
    if step.seal is not None and len(step.gone) > step.num_noted:
        step.num_noted = len(step.gone)
        book.out.append(Note(step.number))


def _forget_meeting(book: Book, step: StepState) -> None:
    """No rank whose weights had the step is left: the work of those that left it is to be done again."""
    step.is_met = False
    for item in list(step.items.values()):
        if item.owner is None or (not item.role and item.owner not in step.participants):
            step.tear(item)
            book.disown(step, item)


def _settle(book: Book, step: StepState) -> None:
    """After a restart all ranks have said what they have, and they have not met. Whoever has what was planned keeps it,
    if all who have something do; else all begin again. Columns were lost with the controller."""
    step.is_settled = True
    held = [item for item in step.items.values() if item.sent]
    if step.is_changed or any(item.needs for item in held):
        step.torn.update(step.groups)
        _rewind(book, step)
        for share in step.shares.values():
            if not share.rank.id.role and share.attempt != step.attempts:
                _begin_again(book, share)
    else:
        for item in held:
            if any(part.owner is None or part.sent != book.ranks[part.owner].full for part in step.parts(item)):
                step.tear(item)
    book.touch(step, everybody=True)


# -- work that changes hands -------------------------------------------------------------------------------------------


def _rewind(book: Book, step: StepState, *shares: Share) -> None:
    """These shares begin again, and so does whoever shares with a part that was lost with its process: other parts are
    in gradients, perhaps by half, and nothing can be taken out of a gradient."""
    # transitive: a rank that begins again leaves everybody whom it shares other groups with
    todo, again, ranks = [*step.torn, *_groups_of(*shares)], dict[int, None](), set(shares)
    while todo:
        group = todo.pop()
        if group in again or group not in step.groups:
            continue
        again[group] = None
        for item in step.groups[group].values():
            share = None if item.owner is None else step.shares.get(item.owner)
            # none of a role's rank that was given up, and whose columns of it are here
            if share is not None and share not in ranks:
                ranks.add(share)
                todo += _groups_of(share)
    step.torn.clear()
    step.attempts += 1
    for group in again:
        _renew(book, step, group)
    for share in sorted(ranks, key=lambda share: share.rank.id):
        _begin_again(book, share)


def _groups_of(*shares: Share) -> list[int]:
    return [item.group for share in shares for item in share.items.values() if item.group is not None]


def _renew(book: Book, step: StepState, group: int) -> None:
    """Another number for a group: nobody waits in a collective for a rank that has not begun again. Without owners, if
    one part has none: then it is cut anew."""
    name = book.new_id()
    parts = step.groups[name] = step.groups.pop(group)
    is_whole = all(item.owner in step.shares for item in parts.values())
    for item in parts.values():
        item.group = name
        if not is_whole and not item.has_columns:
            book.disown(step, item)


def _begin_again(book: Book, share: Share) -> None:
    step, rank = share.step, share.rank
    share.attempt = step.attempts
    # whatever its seats have said was of the attempt before
    share.waiting, share.recalled, share.answers = 0, {}, 0
    step.at_barrier.discard(rank.id)
    step.unasked.add(rank.id)
    for item in share.items.values():
        # columns that are here need not be computed again: whoever shared them may be gone
        if not item.has_columns:
            step.reset(item)
            share.unsent[item.id] = item
    book.tell(rank, rank.links & share.opened, SendRewind, step.number, share.attempt)
    book.ranks_touched[rank.id] = None


def _replan(book: Book, step: StepState) -> None:
    if not step.ownerless or step.is_recalling:
        return
    idle = _idle(book, step)
    for role, is_released in sorted({(item.role, item.is_released) for item in step.ownerless.values()}):
        items = [it for it in step.ownerless.values() if (it.role, it.is_released) == (role, is_released)]
        everybody = book.members(role) if role else sorted(step.participants)
        if over := (is_released and idle) or everybody:
            made = book.lay_out(step.number, items, over)
            for item in items:
                step.remove(step.ownerless.pop(item.id))
            book.add(step, made)


def _recall(book: Book, step: StepState) -> None:
    """Once half of the ranks have nothing left to do, ask the others for what they have not begun."""
    # one thing after the other: what has no owner is laid out first, and each answer is waited for
    if not step.at_barrier or 2 * len(step.at_barrier) < len(step.participants) or step.ownerless or step.is_recalling:
        return
    idle = _idle(book, step)
    if 2 * len(idle) < len(step.participants):
        return
    for one in sorted(step.unasked):
        share = step.shares.get(one)
        if share is None or one in step.at_barrier:
            step.unasked.discard(one)
        elif share.rank.is_here and share.opened == share.rank.full:
            step.unasked.discard(one)
            _ask_back(book, share, len(idle))


def _idle(book: Book, step: StepState) -> list[RankId]:
    return [one for one in sorted(step.at_barrier) if book.ranks[one].is_here]


def _ask_back(book: Book, share: Share, num_idle: int) -> None:
    step, rank, may = share.step, share.rank, _free(share)
    # one stays in any case
    if len(may) < 2:
        return
    share.recalled = {item.id: 0 for item in may}
    share.answers = rank.full
    for seat in seats_of(rank.full):
        ids = tuple(item.id for item in may if item.sent >> seat & 1)
        book.out.append(SendRecall(rank.id, seat, step.number, share.attempt, ids, num_idle))


def _free(share: Share) -> list[Item]:
    """The last ones without a gap: what one seat gives back and another has begun is sent to the first again, behind
    all that it has, and both must train in one order."""
    free = list[Item]()
    for item in reversed([item for item in in_order(share.items.values()) if item.sent]):
        if item.group is not None or item.is_begun or item.done or item.is_told:
            break
        free.insert(0, item)
    return free


# -- the meeting -------------------------------------------------------------------------------------------------------


def _may_seal(book: Book, step: StepState) -> bool:
    if not step.is_complete or step.ownerless or step.unfetched or step.seal is not None or not step.participants:
        return False
    if not book.meets:
        return True
    is_waited_for = len(step.at_barrier) == len(step.participants) and not step.is_recalling
    return is_waited_for and all(book.ranks[one].is_here for one in step.participants)


def _seal(book: Book, step: StepState) -> None:
    # a number is never given twice, by no controller: a late word on an older seal does not count
    step.seals = max(step.seals + 1, book.generation * 1000)
    step.seal = StepSeal(step.number, step.seals, tuple(sorted(step.participants)), frozenset(step.gone))
    for one in step.participants:
        step.shares[one].sealed = step.shares[one].back = 0
        book.ranks_touched[one] = None


def acknowledge(book: Book, step: StepState) -> None:
    del book.steps[step.number]
    book.last_acked = max(book.last_acked, step.number)
    for share in step.shares.values():
        share.rank.active.pop(step.number, None)
        # it may compute what nobody needs any more
        if share.rank.id.role:
            book.tell(share.rank, share.rank.links & share.opened & ~share.sealed, SendDrop, step.number, True)
    # also those that wait for weights which have the step
    book.touch_all_ranks()
    book.out.append(Ack(step.number, frozenset(step.gone)))
    # Shares and their step name each other, and items hold payloads: nothing of it waits for the garbage collector.
    for container in (step.shares, step.items, step.groups, step.waiters, step.ownerless):
        container.clear()


# -- one rank ----------------------------------------------------------------------------------------------------------


def look_at_rank(book: Book, rank: Rank) -> None:
    # a copy: what is over leaves the rank's active steps meanwhile
    for share in list(rank.active.values()):
        if rank.id.role:
            _look_at_role(book, share)
        elif share.finished == rank.full:
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
    is_wanted = rank.id.number in book.wanted.get(rank.id.role, ())
    if is_wanted and not book.ended:
        return False
    # columns may be needed again
    if rank.id.role:
        return not (book.steps if is_wanted else rank.active)
    if not book.meets:
        shares = rank.active.values()
        return all(_is_finished(share) or (share.sealed == rank.full and not share.unsent) for share in shares)
    # Until every step is met, a rank must be there to do the work of a lost one.
    steps = book.steps.values() if is_wanted else [share.step for share in rank.active.values()]
    return all(step.is_met and _is_finished(step.shares.get(rank.id)) for step in steps)


def _is_finished(share: Share | None) -> bool:
    return share is None or share.finished == share.rank.full


def _look_at_role(book: Book, share: Share) -> None:
    step, rank = share.step, share.rank
    if step.settling or not step.is_settled:
        # it may be in the weights
        return
    _send(book, share)
    if step.is_complete and not step.left_of_role[rank.id.role]:
        if share.opened:
            _send_seal(book, share, StepSeal(step.number, 1, (), frozenset(step.gone)))
        rank.active.pop(step.number, None)


def _leave_behind(book: Book, share: Share) -> None:
    """The others have met without it. Before it is told, it may be in the collective; and somebody who has the weights
    must be there, or the step may have to be done again."""
    step = share.step
    is_known = step.is_kept or any(book.ranks[other].is_here for other in step.met)
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
    if share.recalled:
        return
    ready = _ready(share)
    is_new = share.opened != rank.full
    # a step is opened with work, or with the news that there is none for this rank
    if is_new and not ready and (share.unsent or not step.is_complete or rank.id.role):
        return
    # what is sent lies in the rank's memory until it is taken
    if is_new and share.taken != rank.full and not _has_credit(share):
        return
    # The rank had left this step, or had come without it, and those who had it are gone: its later steps wait for it.
    later = [
        other for other in rank.active.values() if other.step.number > step.number and other.opened & ~share.opened
    ]
    if any(other.step.is_uncertain for other in later):
        return
    for seat in seats_of(rank.full):
        items = tuple(item for item in ready if not item.sent >> seat & 1)
        opens = not share.opened >> seat & 1
        if items and not rank.id.role:
            share.waiting &= ~(1 << seat)
        if items or opens:
            gone = step.gone_of(items)
            book.out.append(SendWork(rank.id, seat, step.number, step.uid, share.attempt, items, gone, opens))
    # in the order of the first time: all seats, and the rank's next incarnations, train in one order
    for item in ready:
        item.sent = rank.full
        item.place = book.new_id()
        del share.unsent[item.id]
    share.opened = rank.full
    if ready and not rank.id.role:
        step.unasked.add(rank.id)
        share.note_waiting()
    _go(book, share)
    # behind the work: whoever leaves the later step finds this one
    for other in later:
        _rewind(book, other.step, other)


def _ready(share: Share) -> list[Item]:
    """Items that can be sent now, in order."""
    unsent, step = in_order(share.unsent.values()), share.step
    ready = [item for item in unsent if step.is_ready(item)]
    # Nothing overtakes an item that waits for its columns if others share what is behind it, or a seat has it already.
    if len(ready) < len(unsent) and any(item.group is not None or item.sent for item in unsent):
        waiting = next(at for at, item in enumerate(unsent) if not step.is_ready(item))
        return unsent[:waiting]
    return ready


def _has_credit(share: Share) -> bool:
    """Room for one more step on each seat that lacks it; and no older one is to be opened first."""
    rank, untaken = share.rank, list[int]()
    for other in rank.active.values():
        is_over = other.step.is_met and bool(rank.id.role)
        # older steps first: ranks meet in the order of steps
        if other.step.number < share.step.number and other.opened != rank.full and not is_over:
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
    if seats and book.meets and not rank.id.role:
        # from here on nobody knows
        step.holders.add(rank.id)
    share.sealed = rank.full
    if not rank.id.role:
        share.waiting &= share.back
        share.note_waiting()
