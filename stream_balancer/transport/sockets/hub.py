"""One thread for any number of sockets: frames of the wire format, each followed by ``wire_bytes`` of body.

What travels to and from producers goes through here, and not through gloo, because a gloo wait can be neither
cancelled nor shared: every gloo link costs two threads at both ends, and there may be hundreds of producers. Nothing
here knows what a frame means; that is its :class:`Handler`'s business.
"""

from __future__ import annotations

import atexit
import ipaddress
import logging
import selectors
import socket
import threading
import time
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor

from stream_balancer.errors import WireError
from stream_balancer.transport.descriptors import keep_from_children
from stream_balancer.wire.share import FRAME_BYTES, Frame, read_frame

__all__ = [
    "Connection",
    "Handler",
    "Hub",
    "Listener",
    "Served",
    "is_loopback",
    "keep_alive",
    "listen",
    "unexpected",
]

_TURN_BYTES = 4 * 2**20  # read from one socket before the others get their turn
_GATHER = 256  # buffers per sendmsg; the system's limit is 1024
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # seconds, seconds, tries: a dead host is told
_NOTHING = torch.empty(0, dtype=torch.uint8)

logger = logging.getLogger("stream_balancer.transport")


class Handler(Protocol):
    """What a connection's frames mean. Called in the hub's thread; what it raises ends the connection."""

    def admit(self, frame: Frame) -> None:
        """Raise WireError unless ``frame`` may come now, with that many bytes behind it. Nothing is allocated yet."""
        ...

    def handle(self, frame: Frame, body: Tensor) -> None:
        """Act on a frame; ``body`` is ``[wire_bytes]`` uint8 and yours."""
        ...

    def lost(self, error: Exception) -> None:
        """The connection is over, and why; called once."""
        ...


class Hub:
    """A thread that serves sockets, and runs jobs between them. Methods may be called from any thread."""

    def __init__(self, name: str, first: Callable[[], bool], cancel_first: Callable[[], object] = lambda: None) -> None:
        """``first`` runs in the thread before anything else, and may block; ``cancel_first`` makes it return. If it
        says False, the thread ends."""
        self._first, self._cancel_first = first, cancel_first
        self._selector = selectors.DefaultSelector()
        self._bell, self._ear = socket.socketpair()
        for end in (self._bell, self._ear):
            end.setblocking(False)
        self._jobs: deque[Callable[[], object]] = deque()
        self._begun = self._closing = False
        self._sockets: set[Served] = set()
        self.received_bytes = 0
        """Bytes read from all its sockets, ever."""
        self._deadlines: dict[Served, float] = {}
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        _OPEN.add(self)
        self._thread.start()

    def do(self, job: Callable[[], object]) -> None:
        """Run ``job`` in the thread soon; dropped if the hub is closed. Takes no lock, so finalizers may call it."""
        self._jobs.append(job)
        with suppress(OSError):  # full: it will wake anyway
            self._bell.send(b"\0")

    def close(self) -> None:
        """End the thread and close every socket: milliseconds. Idempotent."""
        self._closing = True
        self.do(lambda: None)
        if not self._begun:
            self._cancel_first()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        _OPEN.discard(self)

    # in the thread

    def _run(self) -> None:
        error: Exception = ConnectionAbortedError("closed on this side")
        try:
            self._selector.register(self._ear, selectors.EVENT_READ, self._on_bell)
            if not self._first():
                return
            self._begun = True
            while not self._closing:
                for key, mask in self._selector.select(self._patience()):
                    key.data(mask)
                for _ in range(len(self._jobs)):
                    self._jobs.popleft()()
        except Exception as bug:  # nobody is above this thread: its connections are told
            logger.exception("the thread %s ends", self._thread.name)
            error = bug
        finally:
            for served in list(self._sockets):
                served.fail(error)
            self._selector.close()
            self._bell.close()
            self._ear.close()

    def _on_bell(self, _: int) -> None:
        with suppress(BlockingIOError):
            self._ear.recv(4096)

    def _patience(self) -> float | None:
        now = time.monotonic()
        for served in [served for served, deadline in self._deadlines.items() if deadline <= now]:
            served.fail(TimeoutError("no answer in time"))
        return min(self._deadlines.values()) - now if self._deadlines else None


class Served:
    """A socket in a hub."""

    def __init__(self, hub: Hub, sock: socket.socket) -> None:
        self.hub = hub
        self.sock = sock
        self.open = True
        sock.setblocking(False)
        keep_from_children(sock.fileno())
        hub._sockets.add(self)
        hub._selector.register(sock, selectors.EVENT_READ, self._ready)

    def expect(self, within_s: float | None) -> None:
        """End it by itself after so many seconds; None = never."""
        if within_s is None:
            self.hub._deadlines.pop(self, None)
        elif self.open:
            self.hub._deadlines[self] = time.monotonic() + within_s

    @abstractmethod
    def _ready(self, mask: int) -> None:
        """The selector says so."""

    def fail(self, error: Exception) -> None:
        """It is over."""
        if self.open:
            self.release().close()
            self._over(error)

    def release(self) -> socket.socket:
        """Its socket, not served here any more."""
        self.open = False
        self.hub._sockets.discard(self)
        self.expect(None)
        self.hub._selector.unregister(self.sock)
        return self.sock

    def _over(self, error: Exception) -> None: ...


class Connection(Served):
    """Frames to and from one peer. Made and used in the hub's thread only."""

    handler: Handler
    """To be set at once by whoever makes the connection; may change between frames."""

    def __init__(self, hub: Hub, sock: socket.socket) -> None:
        super().__init__(hub, sock)
        self._header = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
        self._frame: Frame | None = None  # the one whose body is being read
        self._body = _NOTHING
        self._space = self._header.numpy().data  # what is still to be read into
        self._outgoing: deque[tuple[memoryview, object]] = deque()  # (what is still to be sent, what keeps it alive)
        self._farewell = False
        keep_alive(sock)

    def send(self, frame: Frame, bodies: Iterable[Tensor] = ()) -> None:
        """Send a frame and its body, ``[n]`` uint8 each, which must stay as they are. Never blocks, copies nothing."""
        if not self.open or self._farewell:
            return
        for tensor in (frame.pack().view(torch.uint8), *bodies):
            if tensor.numel():
                self._outgoing.append((tensor.numpy().data, tensor))
        self._guarded(self._write)

    def part(self) -> None:
        """Close once all is sent."""
        self._farewell = True
        if self.open and not self._outgoing:
            self.fail(ConnectionAbortedError("closed on this side"))

    def _ready(self, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._guarded(self._write)
        if mask & selectors.EVENT_READ and self.open:
            self._guarded(self._read)

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except BlockingIOError:
            pass
        except Exception as error:  # noqa: BLE001 - the peer's, or its handler's: either way this link is over
            self.fail(error)

    def _write(self) -> None:
        try:
            while self._outgoing:
                sent = self.sock.sendmsg([view for view, _ in islice(self._outgoing, _GATHER)])
                while sent:
                    view, keep = self._outgoing.popleft()
                    if sent < len(view):
                        self._outgoing.appendleft((view[sent:], keep))
                    sent -= min(sent, len(view))
        finally:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
            if self.open and self.hub._selector.get_key(self.sock).events != events:
                self.hub._selector.modify(self.sock, events, self._ready)
        if self._farewell:
            self.part()

    def _read(self) -> None:
        budget = _TURN_BYTES
        while budget > 0 and self.open:
            count = self.sock.recv_into(self._space[:budget])
            if not count:
                raise ConnectionResetError("connection closed by peer")
            budget -= count
            self.hub.received_bytes += count
            self._space = self._space[count:]
            if not len(self._space):
                self._complete()

    def _complete(self) -> None:
        frame = self._frame
        if frame is None:
            frame = read_frame(self._header.view(torch.int64))
            self.handler.admit(frame)
            if frame.wire_bytes:
                self._frame, self._body = frame, torch.empty(frame.wire_bytes, dtype=torch.uint8)
                self._space = self._body.numpy().data
                return
        body, self._frame, self._body = self._body, None, _NOTHING
        self._space = self._header.numpy().data
        self.handler.handle(frame, body)

    def _over(self, error: Exception) -> None:
        self._outgoing.clear()
        if isinstance(error, ConnectionError) and "closed" not in str(error):
            error = ConnectionResetError("connection reset by peer")
        self.handler.lost(error)


class Listener(Served):
    """Accepts connections."""

    def __init__(self, hub: Hub, sock: socket.socket, arrived: Callable[[socket.socket], object]) -> None:
        super().__init__(hub, sock)
        self._arrived = arrived

    def _ready(self, _: int) -> None:
        try:
            peer, _address = self.sock.accept()
        except OSError:  # it was there, and has gone; or too many files are open, and a moment may help
            time.sleep(0.01)
            return
        self._arrived(peer)


def keep_alive(sock: socket.socket) -> None:
    """Small messages go at once, a peer whose machine died is noticed, and children of this process do not keep it."""
    keep_from_children(sock.fileno())
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def listen(host: str, port: int = 0) -> socket.socket:
    """A listening socket on ``port`` (0: any free one) of ``host``'s first address."""
    family, _, _, _, address = _resolved(host, port)
    sock = socket.create_server(address[:2], family=family, backlog=1024)
    keep_from_children(sock.fileno())
    return sock


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    return ipaddress.ip_address(_resolved(host, 0)[4][0]).is_loopback


def _resolved(host: str, port: int) -> Any:
    try:
        return socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ValueError(f"cannot listen on {host!r}, which is no name or address of this machine: {error}") from None


def unexpected(frame: Frame) -> WireError:
    """The refusal of a frame that may not come here or now."""
    return WireError(f"a {frame.kind.name} frame with {frame.wire_bytes} bytes behind it may not come here")


_OPEN: weakref.WeakSet[Hub] = weakref.WeakSet()


def _close_all() -> None:
    """A thread inside torch while the interpreter goes away would end the process with SIGABRT, so join them all."""
    for hub in list(_OPEN):
        hub.close()


atexit.register(_close_all)
