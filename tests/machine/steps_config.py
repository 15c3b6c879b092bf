"""Features and faults of one random schedule."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass
class Config:
    seed: int = 0
    ranks: int = 3
    seats: int = 1
    """Processes of a rank."""
    steps: int = 4
    depth: int = 2
    meets: bool = True
    """The ranks meet through the feed; else loops are plain."""
    remote: bool = False
    lockstep: bool = False
    """All ranks compute the items of one index in one collective."""
    auto_ack: bool = True
    all_die: bool = False
    """A launcher restarts all ranks when one dies."""
    commits: bool = False
    """Loops take all micro-batches of a step at once."""
    silent: bool = False
    """Some processes that are started again do not say their weights, and take others' when they meet."""
    begins_early: bool = False
    """Plain loops begin with a step before they know what it is divided by."""
    faults: tuple[str, ...] = ()
    num_faults: int = 4


def random_config(seed: int) -> Config:
    r = random.Random(seed * 7919 + 13)
    meets = r.random() < 0.85
    all_die = meets and r.random() < 0.15
    lockstep = r.random() < 0.1
    config = Config(
        seed=seed,
        ranks=r.randint(1, 4),
        seats=r.choice([1, 1, 2]),
        steps=r.randint(1, 4),
        depth=r.randint(1, 2),
        meets=meets,
        remote=r.random() < 0.4,
        lockstep=lockstep,
        auto_ack=r.random() < 0.6,
        all_die=all_die,
        commits=r.random() < 0.15,
        begins_early=r.random() < 0.5,
    )
    kinds = ["flap", "restart", "lose"]
    if all_die:
        kinds.append("all_die")
    elif meets or not lockstep:  # plain loops in one collective all fail where one does
        kinds += ["kill", "kill", "give_up", "give_up"]
    if not all_die:
        kinds.append("resize")
    if meets:
        kinds.append("user_ack")
    config.faults = tuple(kind for kind in kinds if r.random() < 0.7)
    config.num_faults = r.choice([0, 1, 2, 3, 5, 8])
    # what it has trained on other weights than those of a checkpoint nobody could go on from
    config.silent = meets and not all_die and config.auto_ack and r.random() < 0.5
    return config
