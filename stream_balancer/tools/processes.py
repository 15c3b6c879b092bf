"""Processes of our own: work spread over several, and none left over. Nothing about what they work on."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from typing import TypeAlias, TypeVar

T = TypeVar("T")
R = TypeVar("R")
Progress: TypeAlias = Callable[[int, int], None]
"""Called with the items that are done, and how many there are."""


def run_all(run: Callable[[T], R], items: Sequence[T], processes: int, progress: Progress | None) -> list[R]:
    """``run(item)`` for each, in their order, in this process or spread over several."""
    found = []
    with ExitStack() as stack:
        results: Iterable[R] = map(run, items)
        if processes > 1:
            # a fork would copy locks that another thread of the caller holds
            spawn = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(min(processes, len(items)), spawn, exit_with_parent)
            results = stack.enter_context(pool).map(run, items)
        for result in results:
            found.append(result)
            if progress is not None:
                progress(len(found), len(items))
    return found


def exit_with_parent() -> None:
    """In a process that multiprocessing has started: from now on it ends, at once and with status 1, when its parent
    does.

    A parent that is killed cannot end its children, and they may wait for it, or for one another, for ever: in a pool
    each holds the other end of its own queue, and a rank meets its siblings before it meets the controller.
    """
    threading.Thread(target=_exit_with_parent, name="exit-with-parent", daemon=True).start()


def _exit_with_parent() -> None:
    # at once: an orderly exit would wait for the other threads, which may wait for the parent
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
