"""Many random schedules in one process: ``python tests/machine/steps_run.py 0 1000`` runs seeds 0 to 999."""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict

from steps_config import random_config
from steps_invariants import InvariantError
from steps_world import World


def main(first: int, last: int) -> int:
    """Runs many schedules. Returns how many failed."""
    seeds, counts, started = defaultdict[str, list[int]](list), Counter[str](), time.monotonic()
    for seed in range(first, last):
        world = World(random_config(seed))
        try:
            world.run()
        except Exception as error:  # noqa: BLE001
            seeds[error.invariant if isinstance(error, InvariantError) else repr(error)].append(seed)
        counts += world.counts
    failed = {kind: (len(of_kind), of_kind[:5]) for kind, of_kind in seeds.items()}
    report = (
        f"seeds {first} to {last - 1}: {time.monotonic() - started:.0f} s, failed: {failed}; orders: {dict(counts)}"
    )
    sys.stdout.write(report + "\n")
    return len(seeds)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])) > 0)
