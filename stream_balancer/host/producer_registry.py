"""Producers in other processes: who is connected, and who has ended. Outlives connections.

A producer that connects again (``rejoin``) is the same one, whether or not its former connection is known to be lost.
What producers ask for is in :mod:`stream_balancer.host.producers`.
"""

from __future__ import annotations

from collections.abc import Callable

from stream_balancer.host.records import Ended

__all__ = ["ProducerRegistry"]


class ProducerRegistry:
    """The producers of one balancer."""

    def __init__(self, end: Callable[[], object], num_producers: int | None) -> None:
        """``end()`` ends the balancer: once ``num_producers`` have ended; None: once one has, and all others that are
        connected."""
        if num_producers is not None and num_producers < 1:
            raise ValueError(
                f"num_producers must be >= 1, not {num_producers}: leave it out to end once one producer has ended and "
                "no other is connected that has not"
            )
        self._end, self._num_producers = end, num_producers
        self._names: dict[bytes, str] = {}  # of those that are connected, by session
        self._ended: set[bytes] = set()
        self._before: set[bytes] = set()  # of controllers before this one, by the journal
        self._any_came = False
        self.write: Callable[[Ended], object] = lambda _: None
        """Puts into the journal who has ended."""

    def follow(self, ended: Ended) -> None:
        """Go on from what a journal says."""
        self._before = set(ended.sessions)
        if ended.all:
            self._end()

    def forget(self) -> None:
        """All is done: the next run with this journal is a new one."""
        if self._ended or self._before:
            self.write(Ended())

    def joined(self, session: bytes, name: str) -> None:
        """A producer is connected, perhaps again."""
        self._names[session] = name
        self._any_came = True

    def left(self, session: bytes, *, lost: bool) -> None:
        """A producer has closed, or was lost. A lost one ends nothing."""
        self._names.pop(session, None)
        if not lost:
            self._end_if_last()

    def ended(self, session: bytes) -> None:
        """A producer puts no more."""
        self._ended.add(session)
        self._end_if_last()
        self.write(Ended(sorted(self._ended | self._before), self._is_last()))

    def why_not_ended(self) -> str:
        """Which producers the end waits for, once one has ended, or all have left without; empty before."""
        ended = self._ended | self._before
        if not ended:
            left = self._any_came and not self._names
            return "no producer is connected any more, and none has called end()" if left else ""
        names = [name for session, name in self._names.items() if session not in ended]
        of = "" if self._num_producers is None else f" of num_producers={self._num_producers}"
        others = f"connected and not ended: {', '.join(names[:5])}" if names else "no other one is connected"
        return f"{len(ended)}{of} producers have ended; {others}"

    def _end_if_last(self) -> None:
        if self._is_last():
            self._end()

    def _is_last(self) -> bool:
        ended = self._ended | self._before
        # A producer that had ended may have been started again with the whole job: while one that has not ended is
        # connected, those of before do not count.
        enough = bool(ended) if self._num_producers is None else len(ended) >= self._num_producers
        by_number = self._num_producers is not None and len(self._ended) >= self._num_producers
        return by_number or (enough and ended >= self._names.keys())
