"""Breadth-first search over all states of a small world (`attempts_small`), with a bounded number of faults.

    python tests/machine/attempts_search.py barrier --steps 2 --faults 1 [--auto] [--remote] [--seconds S] [--most N]

Reductions, each exact:

- A state is its normal form. The two ranks are exchangeable: of a state and its mirror image only the smaller counts.
  Crashes of the controller depend on the order of its orders, so they happen in the state and in its mirror image.
- Levels of faults: the search ends all states of 0 faults before it begins those of 1. A state of an earlier level is
  not searched again, since everything that follows it has been or will be seen with more faults to spare.
- States are compared by a digest of 16 bytes.

Each event is checked (`attempts_small.Violation`). At last, the end must be reachable without a fault from each state.
"""

from __future__ import annotations

import argparse
import marshal
import time
from array import array
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, NamedTuple

from attempts_small import Small, Violation

from stream_balancer.steps.state import Meets


class Found(NamedTuple):
    """Result of one search."""

    states: int
    levels: list[int]
    """States by the number of faults that they need."""
    depth: int
    seconds: float
    violations: list[tuple[str, list[Any]]]
    """What is broken, and the events that lead to it."""
    is_whole: bool
    """The search came to its end."""

    def __str__(self) -> str:
        levels = " + ".join(f"{number:,}" for number in self.levels)
        return (
            f"{self.states:,} states ({levels}), depth {self.depth}, {self.seconds:.0f} s, "
            f"{len(self.violations)} violations{'' if self.is_whole else ', NOT WHOLE'}"
        )


def normal(world: Small) -> bytes:
    """Normal form of the state or of its mirror image, whichever is smaller."""
    # Format 0 writes no references: equal forms give equal bytes.
    return min(marshal.dumps(world.form(), 0), marshal.dumps(world.form(flip=True), 0))


class Search:
    """One search. ``options`` are the attributes of `Small`."""

    def __init__(self, meets: Meets, faults: int, **options: Any) -> None:
        self.type = type("World", (Small,), {"meets": meets, **options})
        self.most_faults = faults
        self.seen: dict[bytes, int] = {}
        self.parents, self.labels, self.edges, self.ends = array("i"), [], array("i"), []
        self.violations: list[tuple[str, list[Any]]] = []
        self.depths = array("h")

    def run(self, seconds: float = 1e9, most: float = 1e9) -> Found:
        begin = time.process_time()
        self.levels, is_whole = [], True
        now: list[Any] = []
        before = 0
        self.add(normal(self.type()), -1, None, 0, now)
        for level in range(self.most_faults + 1):
            at, later = 0, {}
            while at < len(now):
                place, state = now[at]
                now[at] = None
                at += 1
                self.expand(place, state, now, later if level < self.most_faults else None)
                is_whole = time.process_time() - begin < seconds and len(self.seen) < most and len(self.violations) < 20
                if not is_whole:
                    break
            self.levels.append(len(self.seen) - before)
            if not is_whole:
                break
            before, now = len(self.seen), []
            for state, parent, label in later.values():
                self.add(state, parent, label, self.depths[parent] + 1, now)
        if is_whole:
            self.check_end_is_reachable()
        depth = max(self.depths)
        return Found(len(self.seen), self.levels, depth, time.process_time() - begin, self.violations, is_whole)

    def add(self, state: bytes, parent: int, label: Any, depth: int, to: list[Any]) -> int:
        key = blake2b(state, digest_size=16).digest()
        place = self.seen.get(key)
        if place is None:
            place = self.seen[key] = len(self.seen)
            self.parents.append(parent)
            self.labels.append(label)
            self.depths.append(min(depth, 32000))
            to.append((place, state))
        return place

    def expand(self, place: int, state: bytes, now: list[Any], later: dict[bytes, Any] | None) -> None:
        form = marshal.loads(state)  # noqa: S302 - our own bytes
        world = self.type.of(form)
        if world.is_end():
            self.ends.append(place)
            try:
                world.check_end()
            except Violation as error:
                self.violations.append((str(error), self.path(place)))
            return
        events = list(world.events())
        for event in events:
            if event[1]:
                continue
            if (new := self.after(form, event, place)) is not None:
                self.edges.extend((place, self.add(new, place, event, self.depths[place] + 1, now)))
        if later is None:
            return
        faults = [*(event for event in events if event[1]), *world.faults()]
        pairs = [(form, event) for event in faults]
        for one in (form, world.form(flip=True)):
            pairs += [(one, event) for event in self.type.of(one).crashes()]
        for one, event in pairs:
            if (new := self.after(one, event, place)) is not None:
                key = blake2b(new, digest_size=16).digest()
                if key not in self.seen:
                    later.setdefault(key, (new, place, event))

    def after(self, form: Any, event: Any, place: int) -> bytes | None:
        """The next state, or None if the event is the same as another, or breaks a promise."""
        world = self.type.of(form)
        try:
            return normal(world) if world.happen(event[0], event[2]) else None
        except Violation as error:
            self.violations.append((str(error), [*self.path(place), event]))
            return None

    def path(self, place: int) -> list[Any]:
        out = []
        while place > 0:
            out.append(self.labels[place])
            place = self.parents[place]
        return out[::-1]

    def check_end_is_reachable(self) -> None:
        """Every state reaches the end by events that are no faults."""
        number = len(self.seen)
        heads, before = array("i", [-1]) * number, array("i")
        # Linked lists of the states before each state.
        for at in range(0, len(self.edges), 2):
            before.extend((self.edges[at], heads[self.edges[at + 1]]))
            heads[self.edges[at + 1]] = len(before) - 2
        alive, todo = bytearray(number), list(self.ends)
        for one in todo:
            alive[one] = 1
        while todo:
            at = heads[todo.pop()]
            while at >= 0:
                if not alive[before[at]]:
                    alive[before[at]] = 1
                    todo.append(before[at])
                at = before[at + 1]
        stuck = [one for one in range(number) if not alive[one]]
        if stuck:
            self.violations.append((f"the end cannot be reached from {len(stuck)} states", self.path(stuck[0])))


def explore(meets: Meets, *, faults: int, seconds: float = 1e9, most: float = 1e9, **options: Any) -> Found:
    return Search(meets, faults, **options).run(seconds, most)


def main() -> Iterator[str]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("meets", nargs="?", default="barrier,trainer,own")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--faults", type=int, default=1)
    parser.add_argument("--auto", action="store_true")
    parser.add_argument("--remote", action="store_true")
    parser.add_argument("--most", type=float, default=1e9)
    parser.add_argument("--seconds", type=float, default=1e9)
    given = parser.parse_args()
    for name in given.meets.split(","):
        options = {"num_steps": given.steps, "auto_ack": given.auto, "remote": given.remote}
        found = explore(Meets(name), faults=given.faults, seconds=given.seconds, most=given.most, **options)
        yield f"{name}: {given.steps} steps, {given.faults} faults, {options}: {found}"
        for what, events in found.violations[:3]:
            yield f"    {what}"
            for event in events:
                yield f"        {event}"


if __name__ == "__main__":
    import sys

    for line in main():
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
