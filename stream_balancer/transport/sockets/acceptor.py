"""The acceptor: a listening socket on which every connection proves itself before anything else that it sends is read.

Lives in a :class:`~stream_balancer.transport.sockets.hub.Hub`'s thread, and never waits for anybody. Unauthenticated
peers cost little: at most ``MAX_CANDIDATES`` at a time, each for at most ``CANDIDATE_S``, a few kilobytes each; the
oldest makes room for the next, so that a flood of them delays a rank or producer by one more try.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from stream_balancer.errors import WireError
from stream_balancer.transport.handshake import Accepting, Incoming, Message, pack
from stream_balancer.transport.sockets.hub import Hub, Listener, Served, keep_alive, listen
from stream_balancer.transport.sockets.joiner import Entry
from stream_balancer.wire.messages import Challenge, Join, JoinPeer, Refused, WelcomePeer

__all__ = ["Acceptor", "MeetingPoint", "Meetings", "refuse", "send_now"]

MAX_CANDIDATES = 64  # connections that have proven nothing yet; a flood of them costs no more memory than that
CANDIDATE_S = 10.0  # for a handshake of two round trips, which takes milliseconds
_MEET_S = 10.0  # two peers that are both here exchange two messages
# Who is refused is logged. At once so many lines, then one every so many seconds: a stranger must not fill a disk.
_WARNING_S = 10.0
_MOST_WARNINGS = 10

logger = logging.getLogger("stream_balancer.transport")


def send_now(sock: socket.socket, message: Message) -> None:
    """Send what fits into any fresh connection's buffer. Raises OSError if it does not, or the peer is gone."""
    raw = pack(message)
    if sock.send(raw, socket.MSG_DONTWAIT) != len(raw):
        raise ConnectionResetError("the peer does not read")


def refuse(sock: socket.socket, refused: Refused) -> None:
    """Refuse a peer and close its connection. Never blocks."""
    with sock, suppress(OSError):
        send_now(sock, refused)


class Acceptor:
    """Authenticates who connects, and hands their sockets over."""

    def __init__(
        self,
        hub: Hub,
        sock: socket.socket,
        token: bytes,
        joins: Mapping[type[Join], Callable[[socket.socket, Any], None]],
    ) -> None:
        """To be made in the hub's thread. ``joins``: for each kind of request, who takes the socket, which then
        belongs to it, and the request. It is called in the hub's thread."""
        self.token, self.joins = token, joins
        self._hub = hub
        self._candidates: dict[_Candidate, None] = {}
        self._warnings = _Throttle()
        Listener(hub, sock, self._arrive)

    def _arrive(self, sock: socket.socket) -> None:
        if len(self._candidates) >= MAX_CANDIDATES:
            # The oldest: a peer that means well has long been through with its handshake.
            next(iter(self._candidates)).fail(ConnectionAbortedError("newer connections need the room"))
        self._candidates[_Candidate(self, self._hub, sock)] = None

    def forget(self, candidate: _Candidate) -> None:
        """It is none any more."""
        self._candidates.pop(candidate, None)

    def warn(self, text: str) -> None:
        """Log why an unauthenticated peer was refused, but not for each of a flood."""
        if self._warnings.allows(time.monotonic()):
            logger.warning("%s%s", text, self._warnings.suppressed())


class _Throttle:
    """So many at once, then one every few seconds."""

    def __init__(self) -> None:
        self._left, self._since, self._dropped = float(_MOST_WARNINGS), 0.0, 0

    def allows(self, now: float) -> bool:
        self._left = min(self._left + (now - self._since) / _WARNING_S, _MOST_WARNINGS)
        self._since = now
        if self._left < 1:
            self._dropped += 1
            return False
        self._left -= 1
        return True

    def suppressed(self) -> str:
        dropped, self._dropped = self._dropped, 0
        return f" ({dropped} more like it were not logged)" if dropped else ""


class _Candidate(Served):
    """Who has connected and has not proven anything."""

    def __init__(self, acceptor: Acceptor, hub: Hub, sock: socket.socket) -> None:
        super().__init__(hub, sock)
        self._acceptor = acceptor
        self._from = _name_of(sock)
        self._incoming = Incoming()
        self._handshake = Accepting(acceptor.token, tuple(acceptor.joins))
        self.serve()
        self.expect(CANDIDATE_S)

    def _ready(self, _: int) -> None:
        try:
            data = self.sock.recv(self._incoming.wanted)
            if not data:
                raise ConnectionResetError("connection closed by peer")
            message = self._incoming.feed(data)
            if message is not None:
                self._answer(self._handshake.receive(message))
        except BlockingIOError:
            pass
        except (OSError, WireError) as error:
            self.fail(error)

    def _answer(self, answer: Challenge | Refused | Join) -> None:
        if isinstance(answer, Challenge):
            send_now(self.sock, answer)
        elif isinstance(answer, Refused):
            send_now(self.sock, answer)
            self.fail(WireError(f"refused: {answer.text}"))
        else:
            self._acceptor.forget(self)
            sock = self.release()
            keep_alive(sock)
            self._acceptor.joins[type(answer)](sock, answer)

    def _over(self, error: Exception) -> None:
        self._acceptor.forget(self)
        if isinstance(error, WireError):
            self._acceptor.warn(f"somebody who connected from {self._from} was sent away: {error}")


def _name_of(sock: socket.socket) -> str:
    with suppress(OSError):
        return ":".join(map(str, sock.getpeername()[:2]))
    return "an unknown address"


class Meetings:
    """Two processes that look for each other here, under one key: what one sends goes to the other, a few bytes."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._waiting: dict[tuple[str, int], _Half] = {}

    def arrive(self, sock: socket.socket, request: JoinPeer) -> None:
        """One of them is here."""
        half = _Half(self, self._hub, sock, (request.key, request.side))
        other = self._waiting.pop((request.key, 1 - request.side), None)
        if other is not None:
            half.meet(other)
            other.meet(half)
            return
        before = self._waiting.pop(half.place, None)
        self._waiting[half.place] = half
        if before is not None:
            before.fail(ConnectionAbortedError("another one has connected in its place"))

    def forget(self, half: _Half) -> None:
        """It does not wait any more."""
        if self._waiting.get(half.place) is half:
            del self._waiting[half.place]


class MeetingPoint:
    """A port for nothing but :class:`Meetings`: for a controller that ranks do not reach through a socket."""

    def __init__(self, host: str) -> None:
        """Listens on a free port of ``host`` until this process ends, in a thread of its own."""
        sock, self._token = listen(host), secrets.token_hex(16)
        self.entry = Entry(host, sock.getsockname()[1], self._token)
        """For the two who want to meet."""
        self._hub = Hub("sb-meetings", lambda: self._begin_listening(sock))
        self._hub.start()

    def _begin_listening(self, sock: socket.socket) -> bool:
        Acceptor(self._hub, sock, self._token.encode(), {JoinPeer: Meetings(self._hub).arrive})
        return True


class _Half(Served):
    """One of the two."""

    def __init__(self, meetings: Meetings, hub: Hub, sock: socket.socket, place: tuple[str, int]) -> None:
        super().__init__(hub, sock)
        self.place = place
        self._meetings = meetings
        self._other: _Half | None = None
        self._left = 2 * 4096
        self.serve()

    def meet(self, other: _Half) -> None:
        """The other one has come."""
        self._other = other
        self.expect(_MEET_S)
        try:
            send_now(self.sock, WelcomePeer())
        except OSError as error:
            self.fail(error)

    def _ready(self, _: int) -> None:
        try:
            data = self.sock.recv(4096)
            self._left -= len(data)
            if not data or self._other is None or self._left < 0:
                raise ConnectionResetError("it closed, or sends more than it may")
            if self._other.open and self._other.sock.send(data) != len(data):
                raise ConnectionResetError("the other one does not read")
        except BlockingIOError:
            pass
        except OSError as error:
            self.fail(error)

    def _over(self, error: Exception) -> None:
        self._meetings.forget(self)
        other, self._other = self._other, None
        if other is not None:
            other.fail(error)
