"""Orders that are due now, of one step: who has its work, and when its ranks meet. They follow from the state, whatever
fact came last."""

from __future__ import annotations

from stream_balancer.core.steps.book import Book
from stream_balancer.core.steps.orders import Ack, Note, SendRewind
from stream_balancer.core.steps.state import Share, StepSeal, StepState


def look_at_step(book: Book, step: StepState) -> None:
    """A step is, in this order: acknowledged by all; restored, and not all have said what they have; met, so whoever is
    left behind leaves it; perhaps met; or not met, and everything may change."""
    if step.acks == len(step.participants) and (step.is_kept or step.participants):
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
        rewind(book, step)
    # all who were to meet are given up: those that there are now do it
    if not step.participants:
        step.participants.update(book.members)
        for one in step.participants:
            book.ranks_touched[book.share(step, one).rank.id] = None
    _replan(book, step)
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
        if item.owner not in step.participants:
            step.tear(item)
            book.disown(step, item)


def _settle(book: Book, step: StepState) -> None:
    """After a restart all ranks have said what they have, and they have not met. Whoever has what was planned keeps it,
    if all who have something do; else all begin again."""
    step.is_settled = True
    held = [item for item in step.items.values() if item.sent]
    if step.is_changed:
        step.torn.update(step.groups)
        rewind(book, step)
        for share in step.shares.values():
            if share.attempt != step.attempts:
                _begin_again(book, share)
    else:
        for item in held:
            if any(part.owner is None or part.sent != book.ranks[part.owner].full for part in step.parts(item)):
                step.tear(item)
    book.touch(step, everybody=True)


# -- work that changes hands -------------------------------------------------------------------------------------------


def rewind(book: Book, step: StepState, *shares: Share) -> None:
    """Shares begin again, and so does whoever shares with a part that was lost with its process: other parts are
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
        if not is_whole:
            book.disown(step, item)


def _begin_again(book: Book, share: Share) -> None:
    step, rank = share.step, share.rank
    share.attempt = step.attempts
    # whatever its seats have said was of the attempt before
    share.waiting = 0
    step.at_barrier.discard(rank.id)
    for item in share.items.values():
        step.reset(item)
        share.unsent[item.id] = item
    book.tell(rank, rank.links & share.opened, SendRewind, step.number, share.attempt)
    book.ranks_touched[rank.id] = None


def _replan(book: Book, step: StepState) -> None:
    items = list(step.ownerless.values())
    if items and (over := sorted(step.participants)):
        made = book.lay_out(step.number, items, over)
        for item in items:
            step.remove(step.ownerless.pop(item.id))
        book.add(step, made)


# -- the meeting -------------------------------------------------------------------------------------------------------


def _may_seal(book: Book, step: StepState) -> bool:
    if step.ownerless or step.unfetched or step.seal is not None or not step.participants:
        return False
    if not book.meets:
        return True
    is_waited_for = len(step.at_barrier) == len(step.participants)
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
    # also those that wait for weights which have the step
    book.touch_all_ranks()
    book.out.append(Ack(step.number, frozenset(step.gone)))
    # Shares and their step name each other, and items hold payloads: nothing of it waits for the garbage collector.
    for container in (step.shares, step.items, step.groups, step.ownerless):
        container.clear()
