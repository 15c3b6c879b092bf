"""The end of a process that has links open: every thread inside gloo is woken and joined first.

A thread inside gloo while the interpreter goes away would end the process with SIGABRT; and what a rank acknowledged
last shall arrive. Only that: what a link does then it decides itself.
"""

from __future__ import annotations

import atexit
import os
import weakref
from functools import lru_cache
from multiprocessing.util import Finalize
from typing import Protocol

__all__ = ["Endable", "end_with_the_process", "has_ended"]


class Endable(Protocol):
    """What has threads inside gloo."""

    def end_with_the_process(self) -> None:
        """Let what matters arrive, then join all threads. Idempotent."""
        ...


_OPEN: weakref.WeakSet[Endable] = weakref.WeakSet()


def end_with_the_process(link: Endable) -> None:
    """From now on ``link`` is ended before the interpreter goes away, unless it :func:`has_ended`."""
    _end_all_when_this_process_ends()
    _OPEN.add(link)


def has_ended(link: Endable) -> None:
    """``link`` has no thread any more."""
    _OPEN.discard(link)


@lru_cache(1)
def _end_all_when_this_process_ends() -> None:
    """multiprocessing ends its children without running ``atexit``, but runs what is registered with itself; a child
    forgets what its parent registered, so this is done once per process, with the first link."""
    Finalize(None, _end_all, exitpriority=0)


def _end_all() -> None:
    for link in list(_OPEN):
        link.end_with_the_process()


def _forget_the_parents() -> None:
    _OPEN.clear()  # its links, whose threads are not in this process
    _end_all_when_this_process_ends.cache_clear()


atexit.register(_end_all)  # before multiprocessing's own, where both run: it is idempotent
os.register_at_fork(after_in_child=_forget_the_parents)
