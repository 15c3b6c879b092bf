"""Reports of ranks on steps in flight that outlive ``serve``, and, with a journal, the controller: which of them
have acknowledged a step, what is masked in it, and which incarnations were given up; and what was said to them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence

from msgspec.structs import replace

from stream_balancer.host.records import Acked, Came, Fact


async def _no_disk() -> None:
    """Without a journal nothing outlives this process."""


class Handed:
    """Reports to one balancer. ``write(fact)`` puts a row into its journal; ``flush()`` returns once all that was said
    so far is on the disk."""

    def __init__(
        self, write: Callable[[Fact], object] = lambda _: None, flush: Callable[[], Awaitable[None]] = _no_disk
    ) -> None:
        self.write, self.flush = write, flush
        self.acked: dict[int, Acked] = {}
        """By step, those of which some rank has said something."""
        self.came: dict[tuple[str, int], Came] = {}
        """By role and rank, in the order of their keys."""

    def follow(self, acked: Iterable[Acked], came: Iterable[Came]) -> None:
        """Rows that later reports follow."""
        self.acked = {one.step: one for one in acked}
        self.came = {(one.role, one.rank): one for one in came}

    def planned(self, step: int, uid: int, ranks: Sequence[int]) -> None:
        """A step that these ranks of the trainer get is complete."""
        self._put(replace(self.of_plan(step, uid), planned_for=[*ranks]))

    def add(
        self, step: int, uid: int, *, ranks: Iterable[int] = (), gone: Iterable[str] = (), lost: Iterable[int] = ()
    ) -> None:
        """More ``ranks`` that have acknowledged the step, rollouts that are masked in it, ranks that were given up."""
        there = self.of_plan(step, uid)
        ranks, gone, lost = sorted({*there.ranks, *ranks}), sorted({*there.gone, *gone}), sorted({*there.lost, *lost})
        self._put(replace(there, ranks=ranks, gone=gone, lost=lost))

    def note(self, came: Came) -> None:
        """A rank has come under a new incarnation, or was given up."""
        who = came.role, came.rank
        # a feed that joins again after each broken link must not cost a transaction each time
        if self.came.get(who) != came:
            self.came[who] = came
            self.write(came)

    def end(self) -> None:
        """Ranks that were given up may be anew, under whichever incarnation: who serves next numbers them."""
        # noting changes the dict
        for came in [one for one in self.came.values() if one.is_fenced or one.is_ended]:
            self.note(replace(came, is_fenced=False, is_ended=False))

    def keep(self, steps: Collection[int]) -> None:
        """Only these are in flight."""
        # the journal drops their rows with the acknowledgement itself
        self.acked = {step: one for step, one in self.acked.items() if step in steps}

    def of_plan(self, step: int, uid: int) -> Acked:
        """Reports on this plan of the step."""
        there = self.acked.get(step)
        # another plan of that number: what was said of the old one says nothing of this
        return Acked(step, uid) if there is None or there.uid != uid else there

    def _put(self, acked: Acked) -> None:
        self.acked[acked.step] = acked
        self.write(acked)
