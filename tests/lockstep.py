"""Threads that go through one function side by side, line by line: the interleaving that a race needs, every time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any


def in_lockstep(function: Callable[..., Any], *calls: Callable[[], object]) -> None:
    """Make the calls in a thread each. No thread begins a line of ``function`` before all have done the one before."""
    line = threading.Barrier(len(calls))

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is not function.__code__:
            return None
        if event == "line":
            with suppress(threading.BrokenBarrierError):
                line.wait(10)
        return trace

    def run(call: Callable[[], object]) -> None:
        sys.settrace(trace)
        try:
            call()
        finally:
            sys.settrace(None)
            line.abort()  # whoever is left goes on alone

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
