"""Producers in other processes: who is connected, and who has ended. Outlives connections.

A producer that connects again (``rejoin``) is the same one, whether or not its former connection is known to be lost.
What producers ask for is in :mod:`stream_balancer.host.producers`.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["ProducerRegistry"]


class ProducerRegistry:
    """The producers of one balancer."""

    def __init__(self, end: Callable[[], object], num_producers: int | None) -> None:
        """``end()`` ends the balancer: once ``num_producers`` have ended; None: once one has, and all others that are
        connected."""
        if num_producers is not None and num_producers < 1:
            raise ValueError(
                f"num_producers must be >= 1, not {num_producers}: give None where only balancer.end() ends"
            )
        self._end, self._num_producers = end, num_producers
        self._names: dict[bytes, str] = {}  # of those that are connected, by session
        self._ended: set[bytes] = set()
        self._any_came = False

    def joined(self, session: bytes, name: str) -> None:
        """A producer is connected, perhaps again."""
        self._names[session] = name
        self._any_came = True

    def left(self, session: bytes, *, lost: bool) -> None:
        """It has closed, or was lost. One that was lost ends nothing."""
        self._names.pop(session, None)
        if not lost:
            self._end_if_last()

    def ended(self, session: bytes) -> None:
        """It puts no more."""
        self._ended.add(session)
        self._end_if_last()

    def why_not_ended(self) -> str:
        """Which producers the end waits for, once one has ended, or all have left without; empty before."""
        if not self._ended:
            left = self._any_came and not self._names
            return "no producer is connected any more, and none has called end()" if left else ""
        names = [name for session, name in self._names.items() if session not in self._ended]
        of = "" if self._num_producers is None else f" of num_producers={self._num_producers}"
        others = f"connected and not ended: {', '.join(names[:5])}" if names else "no other one is connected"
        return f"{len(self._ended)}{of} producers have ended; {others}"

    def _end_if_last(self) -> None:
        if self._num_producers is not None:
            is_last = len(self._ended) >= self._num_producers
        else:
            is_last = bool(self._ended) and self._ended >= self._names.keys()
        if is_last:
            self._end()
