"""One thread for any number of sockets, and the jobs between them.

What travels to and from producers goes through here, and not through gloo, because a gloo wait can be neither
cancelled nor shared: every gloo pair costs two threads at both ends, and there may be hundreds of producers. What a
socket is for is its :class:`Served`'s business: it listens, is not authenticated yet, or carries a channel
(:mod:`stream_balancer.transport.sockets.channel`).
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
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from stream_balancer.transport.descriptors import keep_from_children

__all__ = ["Hub", "Listener", "Served", "is_loopback", "keep_alive", "listen"]

_SCRATCH_BYTES = 2**18  # a dozen puts of 21 kB in one system call; larger buffers are read where they belong
_KEEPALIVE = {
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 3,
}  # seconds, seconds, tries: a dead host is noticed

logger = logging.getLogger("stream_balancer.transport")


class Hub:
    """A thread that serves sockets, and runs jobs between them. Methods may be called from any thread."""

    def __init__(self, name: str, first: Callable[[], bool], cancel_first: Callable[[], object] = lambda: None) -> None:
        """``first`` runs in the thread before anything else, and may block; ``cancel_first`` makes it return. If it
        returns False, the thread ends."""
        self._first, self._cancel_first = first, cancel_first
        self._selector = selectors.DefaultSelector()
        self._waker, self._wakes = socket.socketpair()
        for end in (self._waker, self._wakes):
            end.setblocking(False)
        self._jobs: deque[Callable[[], object]] = deque()
        self._begun = self._closing = self._awake = False
        self._sockets: set[Served] = set()
        self.received_bytes = 0
        """Bytes read from all its sockets, ever."""
        self.scratch = memoryview(bytearray(_SCRATCH_BYTES))
        """Memory to read ahead into, for the socket whose turn it is, until that ends."""
        self._deadlines: dict[Served, float] = {}
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        _OPEN.add(self)
        self._thread.start()

    def do(self, job: Callable[[], object]) -> None:
        """Run ``job`` in the thread soon; dropped if the hub is closed. Takes no lock, so finalizers may call it."""
        self._jobs.append(job)
        if not self._awake:  # else it looks for jobs before it sleeps
            with suppress(OSError):  # full: it will wake anyway
                self._waker.send(b"\0")

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
            self._selector.register(self._wakes, selectors.EVENT_READ, self._on_wake)
            if not self._first():
                return
            self._begun = True
            while not self._closing:
                self._run_jobs()
                patience_s = self._patience()
                # Order matters: cleared before the last look at the jobs below. A job that is added in between either
                # is seen by that look or finds the flag cleared and writes to the socket pair.
                self._awake = False  # from here on a job wakes it
                ready = self._selector.select(0 if self._jobs or self._closing else patience_s)
                self._awake = True
                for key, mask in ready:
                    key.data(mask)
        except Exception as bug:  # nothing catches it above this thread: whoever uses a connection must see it
            logger.exception("the thread %s ends", self._thread.name)
            error = bug
        finally:
            self._jobs.clear()  # of connections that are over now
            # A copy: failing one releases it, and may fail others.
            for served in list(self._sockets):
                served.fail(error)
            self._selector.close()
            self._waker.close()
            self._wakes.close()
            self._run_jobs()  # who uses them learns it this way

    def _run_jobs(self) -> None:
        for _ in range(len(self._jobs)):  # what these add comes after the sockets' turn
            self._jobs.popleft()()

    def _on_wake(self, _: int) -> None:
        with suppress(BlockingIOError):
            self._wakes.recv(4096)

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
        self.open = False
        sock.setblocking(False)
        keep_from_children(sock.fileno())
        hub._sockets.add(self)

    def serve(self) -> None:
        """Begin. In the hub's thread."""
        self.open = True
        self.hub._selector.register(self.sock, selectors.EVENT_READ, self._ready)

    def watch(self, *, writable: bool) -> None:
        """Whether room to write into is news, beside something to read."""
        # Writability is watched only while something waits to be written: else select() would return at once, always.
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writable else 0)
        if self.open and self.hub._selector.get_key(self.sock).events != events:
            self.hub._selector.modify(self.sock, events, self._ready)

    def expect(self, within_s: float | None) -> None:
        """End it by itself after so many seconds; None = never."""
        if within_s is None:
            self.hub._deadlines.pop(self, None)
        elif self.open:
            self.hub._deadlines[self] = time.monotonic() + within_s

    @abstractmethod
    def _ready(self, mask: int) -> None:
        """The socket is readable, writable, or both."""

    def fail(self, error: Exception) -> None:
        """It is over."""
        if self in self.hub._sockets:
            self.release().close()
            self._over(error)

    def release(self) -> socket.socket:
        """Its socket, not served here any more."""
        self.hub._sockets.discard(self)
        self.expect(None)
        if self.open:
            self.open = False
            self.hub._selector.unregister(self.sock)
        return self.sock

    def _over(self, error: Exception) -> None: ...


class Listener(Served):
    """Accepts connections."""

    def __init__(self, hub: Hub, sock: socket.socket, arrived: Callable[[socket.socket], object]) -> None:
        super().__init__(hub, sock)
        self._arrived = arrived
        self.serve()

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


_OPEN: weakref.WeakSet[Hub] = weakref.WeakSet()


def _close_all() -> None:
    """A thread inside torch while the interpreter goes away would end the process with SIGABRT, so join them all."""
    for hub in list(_OPEN):
        hub.close()


atexit.register(_close_all)
