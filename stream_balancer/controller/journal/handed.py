"""What ranks have said of steps in flight that outlives ``serve``, and, with a journal, the controller: which of them
have acknowledged a step, what is masked in it, and which incarnations were given up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from stream_balancer.controller.journal.rows import Acked, Fact, Fenced

__all__ = ["Handed"]


class Handed:
    """Of one balancer. ``write(fact, key)`` puts a row into its journal."""

    def __init__(self) -> None:
        self.acked: dict[int, Acked] = {}
        """By step, those of which some rank has said something."""
        self.fenced: dict[tuple[str, int], int] = {}
        """By role and rank, the last incarnation that must not come back."""
        self.write: Callable[[Fact, int], object] = lambda *_: None

    def acknowledge(self, step: int, uid: int, rank: int) -> None:
        """A rank needs its part of the step no more. ``uid``: of the plan."""
        before = self._of(step, uid)
        self._put(Acked(step, uid, sorted({*before.ranks, rank}), before.gone))

    def mask(self, step: int, uid: int, gone: Collection[str]) -> None:
        """Rollouts that all ranks train the step without."""
        before = self._of(step, uid)
        self._put(Acked(step, uid, before.ranks, sorted({*before.gone, *gone})))

    def of_plan(self, step: int, uid: int) -> Acked:
        """What is known of this plan of the step."""
        return self._of(step, uid)

    def fence(self, role: str, rank: int, incarnation: int) -> None:
        """A rank was given up."""
        self.fenced[role, rank] = incarnation
        self.write(Fenced([(*one, last) for one, last in self.fenced.items()]), 0)

    def keep(self, steps: Collection[int]) -> None:
        """Only these are in flight."""
        self.acked = {step: one for step, one in self.acked.items() if step in steps}

    def _of(self, step: int, uid: int) -> Acked:
        there = self.acked.get(step)
        return Acked(step, uid) if there is None or there.uid != uid else there

    def _put(self, acked: Acked) -> None:
        self.acked[acked.step] = acked
        self.write(acked, acked.step)
