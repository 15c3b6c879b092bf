"""Faults that may happen at any moment."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from steps_process import Act

if TYPE_CHECKING:
    from steps_world import World


def faults_of(world: World) -> Iterator[Act]:
    config, rng = world.config, world.rng
    alive = sorted({process.rank for process in world.processes.values() if process.alive})
    for kind in config.faults:
        if kind in ("kill", "flap") and alive:
            rank = rng.choice(alive)
            seat = rng.randrange(config.seats)
            yield partial(world.kill, rank) if kind == "kill" else world.processes[rank, seat].unlink
        elif kind == "all_die":
            yield world.kill_all
        elif kind == "restart":
            yield partial(restart, world)
        elif kind == "give_up" and (ranks := [one for one in world.ledger.ranks if may_give_up(world, one)]):
            yield partial(give_up, world, rng.choice(ranks))
        elif kind == "resize" and not world.ended:
            yield partial(resize, world)
        elif kind == "lose" and config.remote and (config.meets or not world.seals):
            yield partial(lose_rollouts, world)
        elif kind == "user_ack" and world.checkpoint[1]:
            yield partial(world.ledger.acknowledged_by_user, world.checkpoint[1] - 1)


def restart(world: World) -> None:
    for process in world.processes.values():
        process.unlink(tell=False)
    world.start_controller()


def may_give_up(world: World, one: int) -> bool:
    rank = world.ledger.ranks[one]
    if rank.is_here or rank.is_given_up or rank.incarnation < 0 or not world.config.meets:
        return False
    # It may have met alone before the controller was started again, and its checkpoint outlives it: nobody can know.
    if any(step.number in world.checkpoint[0] and not step.met for step in world.ledger.steps.values()):
        return False
    return any(other != one and other not in world.left and other in world.wanted for other, _ in world.processes)


def give_up(world: World, one: int) -> None:
    steps = [*world.ledger.ranks[one].active]
    world.ledger.gave_up(one)
    for number in steps:
        world.note(number)
    world.fenced[one] = max(world.fenced.get(one, -1), world.journal.incarnations.get(one, -1))
    if world.rng.random() < 0.5 and not world.processes[one, 0].alive:
        world.left.add(one)


def resize(world: World) -> None:
    world.wanted = set(range(world.rng.randint(1, 4)))
    world.ledger.resized(world.wanted)
    for rank in world.wanted:
        if (rank, 0) not in world.processes:
            world.start(rank, 0)
        world.left.discard(rank)


def lose_rollouts(world: World) -> None:
    numbers = world.rollouts.keys() - world.journal.acked
    rollouts = sorted({rollout for number in numbers for rollout in world.rollouts[number]})
    world.lost_rollouts.update(world.rng.sample(rollouts, min(2, len(rollouts))))
