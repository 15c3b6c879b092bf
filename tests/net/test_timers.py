"""Timers of the I/O thread."""

from __future__ import annotations

import threading

from stream_balancer.net.loops import Io


def test_more_timers_than_wake_ups_fit_into_a_pipe_are_set_by_another_thread() -> None:
    """A thousand connections end in one job."""
    io, fired = Io.current(), threading.Semaphore(0)
    thread = threading.Thread(
        target=lambda: io.do(lambda: [io.after(0.01, fired.release) for _ in range(2000)], here=True)
    )
    thread.start()
    thread.join()
    assert all(fired.acquire(timeout=20.0) for _ in range(2000))
