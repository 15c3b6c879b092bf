"""What belongs to one thread or process: an event that no interrupt can break; refusals to block an event loop, and to
be sent to another process.

``threading.Event``, ``Condition`` and ``Future`` take and release their lock in Python code. A signal handler that
raises there (Ctrl-C) leaves the lock taken for ever, and the thread that wants to announce a result then blocks on it.
"""

from __future__ import annotations

import _thread
import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar, Generic, NoReturn, TypeVar

import sniffio

__all__ = ["Errand", "OfOneProcess", "ThreadEvent", "refuse_in_event_loop"]

T = TypeVar("T")


class ThreadEvent:
    """Set once, by any thread; any number of threads wait. An interrupted wait may be repeated.

    Every wait has a lock of its own, taken and released in C. The flag is set before any is released, and looked at
    after the lock is where ``set`` finds it: whoever waits is woken.
    """

    __slots__ = ("_set", "_waiters")

    def __init__(self) -> None:
        self._set = False
        self._waiters: list[threading.Lock] = []

    def is_set(self) -> bool:
        """Whether :meth:`set` was called."""
        return self._set

    def set(self) -> None:
        """It has happened. Idempotent, never blocks."""
        # Before any lock is released: who appends a lock too late to be found below sees the flag instead.
        self._set = True
        with suppress(IndexError):
            while True:
                self._waiters.pop().release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it is set, or for at most ``timeout_s``; whether it is set."""
        if not self._set:
            lock = threading.Lock()
            lock.acquire()
            # Appended first, looked at second, as set() writes the flag first and pops second: one of the two must see
            # the other.
            self._waiters.append(lock)
            if not self._set:
                lock.acquire(timeout=-1 if timeout_s is None else min(max(timeout_s, 0.0), threading.TIMEOUT_MAX))
        return self._set


class Errand(Generic[T]):
    """A function that runs once, in a thread of its own: signal handlers run in the main thread only, so nothing can
    interrupt it. Its result lies here until it is taken."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.thread = threading.get_ident()
        self.result: T | None = None
        self.error: BaseException | None = None
        self.taken = False
        self._function = function
        self._begun = threading.Lock()
        self._ended = ThreadEvent()

    def wait(self) -> None:
        """Begin it, unless that was done, and wait for its end. An interrupted wait may be repeated."""
        if not self._begun.locked():
            _thread.start_new_thread(self._run, ())  # threading.Thread waits for its start, with a lock in Python
        self._ended.wait()

    def _run(self) -> None:
        # A wait that was interrupted and repeated may have started a second thread.
        if not self._begun.acquire(blocking=False):
            return
        try:
            self.result = self._function()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            self.error = error
        self._ended.set()


class OfOneProcess:
    """Cannot be pickled, and says what to do instead."""

    _in_another_process: ClassVar[str]

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} belongs to the process that made it and cannot be pickled. In another process, "
            f"{self._in_another_process}"
        )


def refuse_in_event_loop(what: str, instead: str) -> None:
    """Raise RuntimeError where an event loop (asyncio, trio) runs in this thread: blocking would stop it, and with it
    perhaps what is waited for."""
    library = _running_library()
    if library is not None:
        raise RuntimeError(
            f"{what} blocks, and this thread runs an event loop ({library}), which it would stop. {instead}"
        )


def _running_library() -> str | None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        return "asyncio"
    try:
        return sniffio.current_async_library()
    except sniffio.AsyncLibraryNotFoundError:
        return None
