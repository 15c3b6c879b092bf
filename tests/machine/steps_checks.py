"""Invariants of steps, looked at while a world runs, and the one error that says which of them was broken."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stream_balancer.client.held import Part
from stream_balancer.core.steps.orders import Ack, SendWork

if TYPE_CHECKING:
    from steps_process import Meeting, Process
    from steps_world import World

INVARIANTS = {
    "once": "every rollout of a step is in the gradient once, or masked on all ranks, when the ranks meet",
    "denominators": "all ranks divide by the same, over what is in that gradient",
    "seal": "the ranks that meet are those the seal names; two seals of one number are equal",
    "again": "nobody trains on a step, or is given it, that a living process has, or may have, in its weights",
    "credits": "no rank holds more steps it has not begun than its depth, and nobody is sent what it has",
    "stall": "while somebody can make a move that helps, somebody does",
    "acknowledged": "a step is acknowledged once, and only when weights that can be come back to have it",
    "order": "processes of one rank train on the same items in the same order; items of groups are met in one order",
    "weights": "ranks that meet have the same weights",
    "fence": "a rank that was given up is given no work, until a new incarnation comes",
}


class InvariantError(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: str, text: str) -> None:
        self.invariant = invariant
        super().__init__(f"[{invariant}] {text}\n{INVARIANTS[invariant]}")


def check(is_kept: bool, invariant: str, text: str, *args: object) -> None:
    """``text`` has a ``{}`` for each of ``args``."""
    if not is_kept:
        raise InvariantError(invariant, text.format(*args))


def check_meeting(world: World, meeting: Meeting, members: list[Process]) -> None:
    number, seal, first = meeting.number, meeting.seal, members[0]
    for process in members:
        check_not_met(world, process, number)
        text = "step {}: {} has {}, {} has {}"
        same = process.weights == first.weights
        check(same, "weights", text, number, process.place, process.weights, first.place, first.weights)
    gradient = [one for rank in seal.ranks for one in check_seats(world, rank)]
    want, got = sorted(world.rollouts[number] - seal.gone), sorted(gradient)
    check(got == want, "once", "step {}, {}: {}, not {}", number, seal, got, want)


def check_seats(world: World, rank: int) -> list[str]:
    """All seats have trained on the same. The gradient of one of them."""
    first, *others = world.processes_of(rank)
    for other in others:
        check(other.order == first.order, "order", "seats of {}: {}, {}", rank, first.order, other.order)
        gradients = first.gradient, other.gradient
        check(gradients[0] == gradients[1], "once", "seats of {}: {}", rank, gradients)
    return first.gradient


def check_plain(world: World, order: Ack) -> None:
    """The same for a step of plain loops, when all have acknowledged it."""
    number = order.step
    trained = [one for (step, _), one in world.trained.items() if step == number]
    got = sorted(rollout for _, gradient in trained for rollout in gradient)
    want = sorted(world.rollouts[number].difference(order.gone))
    check(got == want, "once", "step {}: trained {}, not {}", number, got, want)
    # What is fetched again after the seal may be gone, and others have divided by then.
    if world.generation == 1 and not any(process.incarnation for process in world.processes.values()):
        for seal, _ in trained:
            check(seal.gone == order.gone, "denominators", "{}, and {} is gone", seal, order.gone)


def check_not_met(world: World, process: Process, number: int) -> None:
    for other in world.processes.values():
        has = other.counts and number in other.weights
        check(not has, "again", "{} trains on step {}, {} has it", process.place, number, other.place)


def check_certain(world: World, number: int, order: object) -> None:
    """No living process may be in the meeting of the step."""
    is_new = isinstance(order, SendWork) and not order.items
    if not world.config.meets or is_new:
        return
    uid = world.plans[number][0]
    for other in world.processes.values():
        part = other.held.parts.get(number)
        if other.counts and part is not None and part.uid == uid and part.seal is not None:
            is_back = part.came_back >= part.seal.number
            check(is_back, "again", "{}, and {} holds {}", order, other.place, part.seal)


def check_order(world: World, process: Process, part: Part) -> None:
    """Items of groups come in one order to all ranks of the groups."""
    groups = groups_of(part)
    for other in world.processes.values():
        its_part = other.held.parts.get(part.number)
        if other is process or not other.counts or other.seat != process.seat or its_part is None:
            continue
        if its_part.uid == part.uid:
            its = groups_of(its_part)
            orders = [one for one in groups if one in its], [one for one in its if one in groups]
            check(orders[0] == orders[1], "order", "{}, {}: {}", process.place, other.place, orders)


def groups_of(part: Part) -> list[int]:
    return [work.item.group for work in part.work.values() if work.item.group is not None]


def check_weights(world: World, process: Process, number: int) -> None:
    if process.held.weights is None:
        return
    lacks = range(process.num_trained, number)
    may_lack = world.config.auto_ack and world.some_acked.issuperset(lacks)
    is_known = process.num_trained == number or may_lack
    check(is_known, "weights", "{} meets in step {}, lacks {}", process.place, number, list(lacks))


def check_end(world: World) -> None:
    """All steps are in the checkpoint, and in no two ways."""
    if not world.config.meets or world.config.auto_ack:
        return
    weights = world.checkpoint[0]
    for number in range(world.config.steps):
        check(number in weights, "acknowledged", "step {} is in no weights", number)
    for process in world.processes.values():
        if process.counts:
            same = all(weights[number] == index for number, index in process.weights.items())
            check(same, "weights", "{} has {}, the checkpoint {}", process.place, process.weights, weights)
