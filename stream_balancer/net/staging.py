"""Bytes of calls without a reply, over all sessions: who brings more than there is room for is not read from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from stream_balancer.net.connection import Connection


class Session(Protocol):
    """Whoever calls."""

    staged: int
    """Bytes of its calls without a reply."""
    live: Connection | None

    @property
    def open(self) -> Mapping[int, object]: ...


class Staging:
    """One for all sessions. In the I/O thread.

    Beyond what all of them together may stage, a session with something staged is not read from, until its replies, or
    those of others, make room. One with nothing staged always is, so nobody waits for nothing."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.nbytes = most_bytes, 0
        self.paused: dict[Session, Connection] = {}

    def add(self, session: Session, nbytes: int) -> None:
        """Calls of so many bytes have come; or, below 0, were answered."""
        session.staged += nbytes
        self.nbytes += nbytes
        if nbytes > 0:
            # after it was taken: one call a session always is, so a full budget stops nobody for good
            if self.nbytes > self.most_bytes and session.live is not None and session not in self.paused:
                self.paused[session] = session.live
                session.live.pause()
        elif self.paused:
            # a little below the bound, or each reply would wake all and the next call pause them again
            everybody = self.nbytes <= self.most_bytes * 3 // 4
            for one in [*self.paused] if everybody else [] if session.open else [session]:
                self.read_on(one)

    def read_on(self, session: Session) -> None:
        """Read from it again, if it was not and its connection is still there."""
        connection = self.paused.pop(session, None)
        if connection is not None:
            connection.resume()
