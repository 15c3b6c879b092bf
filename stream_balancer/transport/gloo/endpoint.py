"""One end of a pair: a thread that reads frames, a thread that writes, and how both always end.

::

    reader thread   connect, then wait for the peer's next frame   woken by: a frame, the peer's death, poison
    writer thread   wait for something to send                     woken by: put(), close(), every keepalive_s

No wait ever expires: in gloo an expired wait breaks the pair, and a peer that is merely slow must not be cut off. Two
facts about gloo make that possible (``tests/dist`` holds them):

* A receive that has no bytes yet is woken at once by the peer's death and by poison; a transfer cut in the middle is
  not. So bulk transfers are posted, but only ever waited for once the small frame *behind* them on the same tag has
  arrived.
* A send is complete when the peer says so in its own frames (``Frame.seen``), so nobody waits for sends at all; what
  they need is kept in a ledger until then.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from abc import abstractmethod
from collections import deque
from functools import lru_cache
from multiprocessing.util import Finalize
from typing import Protocol

import torch
from torch import Tensor

from stream_balancer.errors import WireError
from stream_balancer.wire.share import FRAME_WORDS, Frame, Kind, read_frame

__all__ = ["Endpoint", "Pair", "Pending"]

logger = logging.getLogger("stream_balancer.transport")


class Pending(Protocol):
    """A posted operation. Must be kept until the peer is known to have what was sent."""

    def wait(self) -> None:
        """Block until done, for ever if need be. Raises RuntimeError if the pair broke."""
        ...


class Pair(Protocol):
    """Two processes, joined. Messages arrive in the order they were sent. Safe to use from any thread."""

    def send(self, tensor: Tensor) -> object:
        """Post a send; keep the result until the peer has it. Raises RuntimeError if the pair is broken."""
        ...

    def receive(self, tensor: Tensor) -> Pending:
        """Post a receive of exactly ``tensor.nbytes``."""
        ...

    def poison(self) -> None:
        """Break the pair: every queued receive ends with an error, here and at the peer."""
        ...


class Endpoint:
    """Threads and bookkeeping common to both ends. Subclasses say what frames and outgoing items mean."""

    def __init__(self, name: str, keepalive_s: float, linger_s: float) -> None:
        self._name = name
        self._keepalive_s = keepalive_s
        self._linger_s = linger_s
        self._changed = threading.Condition(threading.Lock())
        self._outbox: deque[object] = deque()
        self._pair: Pair | None = None
        self._closing = False
        self._over = False  # the reader has ended
        self._seen = 0
        self._sent = 0
        self._ledger: deque[tuple[int, object]] = (
            deque()
        )  # (number of the frame that proves arrival, what to keep alive)
        self._last_heard = time.monotonic()
        self._reader = threading.Thread(target=self._read_all, name=f"{name}-reader", daemon=True)
        self._writer = threading.Thread(target=self._write_all, name=f"{name}-writer", daemon=True)

    # what subclasses say

    @abstractmethod
    def _connect(self) -> Pair:
        """Find the peer; runs in the reader thread."""

    @abstractmethod
    def _cancel_connect(self) -> None:
        """Make a running :meth:`_connect` raise; called from any thread."""

    @abstractmethod
    def _handle(self, frame: Frame) -> bool:
        """Act on a frame, in the reader thread. False ends the reader."""

    @abstractmethod
    def _write(self, item: object) -> None:
        """Send an item, in the writer thread."""

    @abstractmethod
    def _lost(self, error: Exception) -> None:
        """The link is over, from whichever thread noticed; may be called twice."""

    # life

    def _start(self) -> None:
        _shut_all_when_this_process_ends()
        _OPEN.add(self)
        self._reader.start()

    def _put(self, item: object) -> None:
        """Have ``item`` sent. Never blocks."""
        with self._changed:
            self._queue_up(item)
            self._changed.notify_all()

    def _queue_up(self, item: object) -> None:
        """Add ``item`` to the outbox; the lock is held."""
        self._outbox.append(item)

    def _pop_item(self) -> object:
        """What to send now, or None; the lock is held."""
        return self._outbox.popleft() if self._outbox else None

    @property
    def _has_news(self) -> bool:
        """Whether :meth:`_pop_item` has something; the lock is held."""
        return bool(self._outbox)

    def _shut(self) -> None:
        """Wake both threads and wait until they have ended: milliseconds. From any thread, idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._pair is None:
            self._cancel_connect()
        self._break()
        for thread in (self._reader, self._writer):
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join()
        self._pair = None
        self._ledger.clear()
        self._outbox.clear()
        _OPEN.discard(self)

    def _shut_at_exit(self) -> None:
        """What the interpreter's end does to a link that nobody closed."""
        self._shut()

    def _break(self) -> None:
        pair = self._pair
        if pair is not None:
            pair.poison()

    # reading

    def _read_all(self) -> None:
        try:
            pair = self._connect()
            with self._changed:
                self._pair = pair
                closing = self._closing
            if closing:
                return
            self._last_heard = time.monotonic()
            self._writer.start()
            self._read_frames(pair)
        except WireError as error:
            self._lost(error)
            self._break()  # so that the peer learns at once that nobody listens any more
        except Exception as error:  # noqa: BLE001 - gloo and stores raise RuntimeErrors of many kinds; all end the link
            self._lost(error)
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _read_frames(self, pair: Pair) -> None:
        buffers = [torch.zeros(FRAME_WORDS, dtype=torch.int64) for _ in range(2)]
        while True:
            buffer = buffers[self._seen % 2]
            pair.receive(buffer).wait()
            if not self._handle(self._note(buffer)):
                return

    def _note(self, buffer: Tensor) -> Frame:
        """Check a received frame and drop what it says has arrived."""
        frame = read_frame(buffer)
        self._seen += 1
        self._last_heard = time.monotonic()
        if frame.seen > self._sent:
            raise WireError(f"{self._name}: the peer acknowledges {frame.seen} frames, but only {self._sent} were sent")
        while self._ledger and self._ledger[0][0] <= frame.seen:
            self._ledger.popleft()
        return frame

    # writing

    def _write_all(self) -> None:
        try:
            while True:
                with self._changed:
                    if not (self._has_news or self._closing or self._over):
                        self._changed.wait(self._keepalive_s)
                    if self._over or (self._closing and not self._outbox):
                        return
                    item = self._pop_item()
                if item is None:
                    self._send_frame(Frame(Kind.ALIVE))
                    self._check_silence(time.monotonic() - self._last_heard)
                else:
                    self._write(item)
                    item = None  # waiting for the next one must not keep this one alive
        except Exception as error:  # noqa: BLE001 - as in _read_all; also what a bad share raises while it is packed
            self._lost(error)
            self._break()

    def _send_frame(self, frame: Frame, *keep: object) -> None:
        """Post a frame; ``keep`` (bulk sends before it, and their slab) is dropped once the peer has seen it."""
        pair = self._pair
        if pair is None:
            return
        words = frame._replace(seen=self._seen).pack()
        self._sent += 1
        kept: list[object] = [words, keep]
        self._ledger.append((self._sent, kept))  # before the send: the peer may answer first
        kept.append(pair.send(words))

    def _check_silence(self, seconds: float) -> None:
        """Called with the seconds since the peer was last heard of, once per ``keepalive_s`` in which nothing was
        sent."""


_OPEN: weakref.WeakSet[Endpoint] = weakref.WeakSet()


@lru_cache(1)
def _shut_all_when_this_process_ends() -> None:
    """A thread inside gloo while the interpreter goes away would end the process with SIGABRT, so wake and join them
    all; and what a rank acknowledged last shall arrive.

    multiprocessing ends its children without running ``atexit``, but runs what is registered with itself; a child
    forgets what its parent registered.
    """
    Finalize(None, _shut_all, exitpriority=0)


def _shut_all() -> None:
    for endpoint in list(_OPEN):
        endpoint._shut_at_exit()


def _forget_the_parents() -> None:
    _OPEN.clear()  # its links, whose threads are not in this process
    _shut_all_when_this_process_ends.cache_clear()


atexit.register(_shut_all)  # before multiprocessing's own, where both run: it is idempotent
os.register_at_fork(after_in_child=_forget_the_parents)
