"""Which knobs of context parallelism, and which beside it, are refused."""

from __future__ import annotations

import math

from stream_balancer.config.knobs import Knobs
from stream_balancer.errors import ConfigError

__all__ = ["check_cp", "check_cp_combinations"]


def check_cp(c: Knobs) -> None:
    """``cp_sizes`` and ``cp_overhead`` by themselves."""
    sizes: object = c.cp_sizes
    if (
        not isinstance(sizes, (tuple, list))
        or not all(type(size) is int and size > 0 and size & (size - 1) == 0 for size in sizes)
        or list(sizes) != sorted({1, *sizes})
    ):
        raise ConfigError(
            "cp_sizes must be powers of two in ascending order, beginning with 1, (1, 2, 4, 8) for example, not "
            f"{sizes!r}: a shared rollout goes to an aligned block of ranks, and most of them to one rank"
        )
    overhead: object = c.cp_overhead
    if isinstance(overhead, bool) or not isinstance(overhead, (int, float)) or not 0 <= overhead < math.inf:
        raise ConfigError(
            "cp_overhead must be a finite number >= 0, the part of the work that each doubling of ranks adds, 0.15 for "
            f"example, not {overhead!r}"
        )


def check_cp_combinations(c: Knobs) -> None:
    """Knobs that do not go together with shared rollouts."""
    if len(c.cp_sizes) == 1:
        return
    refused = {
        "counts='equal'": (
            c.counts == "equal",
            "a shared rollout is on several ranks, so they cannot be counted alike",
        ),
        "groups='same_rank'": (
            c.group_size is not None and c.groups == "same_rank",
            "a shared rollout is not on one rank",
        ),
        "a padded cost": (c.cost.padded, "what a slice of a padded row costs is not known"),
        "speeds": (c.speeds is not None, "ranks of unlike speed would wait for each other within a shared rollout"),
        f"mini_batches={c.mini_batches}": (c.mini_batches > 1, "steps are cut into mini-batches of whole rollouts"),
    }
    for name, (given, reason) in refused.items():
        if given:
            raise ConfigError(f"cp_sizes={c.cp_sizes} does not work with {name}: {reason}. Leave one of them out")
