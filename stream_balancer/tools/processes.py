"""Processes of our own: what each must do so that none is left over. Nothing about what they work on."""

from __future__ import annotations

import multiprocessing
import os
import threading

__all__ = ["exit_with_parent"]


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
