"""Producers in other processes: who is connected, and who has ended. Outlives connections.

A producer that connects again (``rejoin``) is the same one, whether or not its former connection is known to be lost.
What producers ask for is in :mod:`stream_balancer.host.producers`.
"""

from __future__ import annotations

from collections.abc import Callable

from stream_balancer.host.journal.handed import Handed
from stream_balancer.host.records import Ended

_MOST_NAMED = 5


class ProducerRegistry:
    """The producers of one balancer."""

    def __init__(self, handed: Handed, end: Callable[[], object], num_producers: int | None) -> None:
        """``end()`` ends the balancer: once ``num_producers`` have ended (None: one), and all others that are
        connected."""
        if num_producers is not None and num_producers < 1:
            raise ValueError(
                f"num_producers must be >= 1, not {num_producers}: leave it out to end once one producer has ended and "
                "no other is connected that has not"
            )
        self._handed, self._end, self._num_producers = handed, end, num_producers
        self._names: dict[bytes, str] = {}  # of those that are connected, by session
        self._left: dict[bytes, str] = {}  # of the last ones that are gone, and have not ended
        self._ended: set[bytes] = set()  # also of controllers before this one, by the journal
        self._is_over = False  # said once: the journal may be another run's by the time that the last ones leave
        self.attended = False
        """Producers in other processes can connect."""

    def follow(self) -> None:
        """Go on from what a journal says."""
        ended = next((one for one in self._handed.rows.values() if isinstance(one, Ended)), Ended())
        self._ended, self._is_over = set(ended.sessions), ended.all
        if self._is_over:  # nobody comes to say it again
            self._end()

    def forget(self) -> None:
        """All is done: the next run with this journal is a new one."""
        if self._ended:
            self._handed.note(Ended())

    def joined(self, session: bytes, name: str) -> None:
        """A producer is connected, perhaps again."""
        self._names[session] = name
        self._left.pop(session, None)

    def left(self, session: bytes, *, lost: bool) -> None:
        """A producer has closed, or was lost. Without ``num_producers`` a lost one ends nothing: who starts it again
        goes on."""
        name = self._names.pop(session, "")
        if session not in self._ended:
            self._left[session] = name
            for oldest in [*self._left][:-_MOST_NAMED]:
                del self._left[oldest]
        if (not lost or self._num_producers is not None) and self._is_last() and not self._is_over:
            self._note()

    def ended(self, session: bytes) -> None:
        """A producer puts no more."""
        self._ended.add(session)
        self._note()

    def why_not_ended(self, *, any_rollouts: bool) -> str:
        """Which producers the end waits for, or the first rollouts do; empty where none is missing."""
        there = [name for session, name in self._names.items() if session not in self._ended]
        names = ", ".join(self._left.values())
        left = f"left without end() (start them again, or call balancer.end()): {names}" if names else ""
        expected = self._num_producers
        if not self._ended and expected is None:
            if left and not there:
                return f"no producer is connected any more, and none has called end(); {left}"
            return "" if there or any_rollouts or not self.attended else "no producer has connected"
        ended = f"producers that have ended: {len(self._ended)}"
        others = f"connected and not ended: {', '.join(there[:_MOST_NAMED])}" if there else "no other one is connected"
        missing = (expected or 0) - len(self._ended | self._names.keys() | self._left.keys())
        return "; ".join(
            filter(
                None,
                [
                    ended if expected is None else f"{ended} of num_producers={expected}",
                    others,
                    left,
                    f"not connected yet: {missing}" if missing > 0 else "",
                ],
            )
        )

    def _note(self) -> None:
        self._is_over = self._is_last()
        if self._is_over:
            self._end()
        # with the end itself: a restart in between must not wait for producers that have gone for good
        self._handed.note(Ended(sorted(self._ended), self._is_over))

    def _is_last(self) -> bool:
        # One that had ended may have been started again, and end twice: so whoever is connected is waited for.
        return len(self._ended) >= (self._num_producers or 1) and self._ended >= self._names.keys()
