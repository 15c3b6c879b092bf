"""The balancer's side of ``stream-balancer watch``.

::

    async with sb.StreamBalancer(config) as balancer, publish_status(balancer):
        ...

A thread listens on a Unix socket (mode 0600, in a folder of mode 0700). While a viewer is connected it asks the event
loop for a picture, at most twice a second and never so often that pictures take more than half a percent of the loop's
time; JSON is written in the thread. While nobody looks nothing happens at all.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import anyio
import numpy as np
from anyio.from_thread import BlockingPortal

from stream_balancer.controller.balancer import StreamBalancer
from stream_balancer.core.diagnosis import RankState
from stream_balancer.core.report import preview
from stream_balancer.core.state import State
from stream_balancer.statistics import Statistics
from stream_balancer.types import Batch
from stream_balancer.watch.status import SUFFIX, InFlight, LengthRow, NextBatch, RankRow, Status, folder

__all__ = ["publish_status", "status_of"]

_MOST_LOOP_TIME = 0.005
"""Fraction of the event loop's time that pictures may take."""
_MOST_PREVIEWED = 16_384
"""Waiting rollouts; beyond, planning the next batch only to show it would hold the loop up."""
_SEND_TIMEOUT_S = 10.0
_numbers = itertools.count()


@asynccontextmanager
async def publish_status(
    balancer: StreamBalancer, *, name: str = "", path: str | os.PathLike[str] | None = None, interval_s: float = 0.5
) -> AsyncIterator[Path]:
    """Let ``stream-balancer watch`` look at this balancer while the block runs; yields the socket's path.

    ``name`` is shown to viewers. ``path``: elsewhere than in the private folder, where viewers look. Raises OSError
    where no socket can be made, ValueError unless ``interval_s`` > 0.
    """
    if not interval_s > 0:
        raise ValueError(f"interval_s must be > 0, not {interval_s}")
    socket_path = Path(path) if path is not None else folder() / f"{os.getpid()}-{next(_numbers)}{SUFFIX}"
    portal = BlockingPortal()
    await portal.__aenter__()
    try:
        # The first picture takes longest, imports and all. Taken here, it does not stretch the interval of the second.
        _timed_status(balancer, name)
        publisher = _Publisher(partial(portal.call, _timed_status, balancer, name), socket_path, interval_s)
        try:
            yield socket_path
        finally:
            with anyio.CancelScope(shield=True):  # in a thread: a viewer may be waiting for the loop
                await anyio.to_thread.run_sync(publisher.close)
    finally:
        await portal.__aexit__(None, None, None)  # not by `async with`, which wraps the block's errors in a group


def _timed_status(balancer: StreamBalancer, name: str) -> tuple[Status, float]:
    """A picture, and the seconds of the event loop that it took."""
    began = time.perf_counter()
    status = status_of(balancer, name)
    return status, time.perf_counter() - began


class _Publisher:
    """Threads: one that accepts viewers, one for each viewer."""

    def __init__(self, take: Callable[[], tuple[Status, float]], path: Path, interval_s: float) -> None:
        self._take = take
        self._path = path
        self._least_interval_s = interval_s
        self._interval_s = interval_s
        self._line = b""
        self._taken_at = -float("inf")
        self._taking = threading.Lock()
        self._closing = threading.Event()
        self._viewers: list[threading.Thread] = []
        self._socket = _listen(path)
        self._acceptor = threading.Thread(target=self._accept_all, name="stream_balancer watch", daemon=True)
        self._acceptor.start()

    def _accept_all(self) -> None:
        while True:
            viewer, _ = self._socket.accept()
            if self._closing.is_set():
                viewer.close()
                return
            self._viewers = [thread for thread in self._viewers if thread.is_alive()]
            thread = threading.Thread(target=self._serve, args=[viewer], name="stream_balancer viewer", daemon=True)
            self._viewers.append(thread)
            thread.start()

    def _serve(self, viewer: socket.socket) -> None:
        viewer.settimeout(_SEND_TIMEOUT_S)
        with viewer, suppress(OSError):  # it left, or does not read
            while not self._closing.is_set():
                viewer.sendall(self._latest())
                self._closing.wait(self._interval_s)

    def _latest(self) -> bytes:
        """The picture of this moment; all viewers get the same."""
        with self._taking:  # viewers that ask at the same time wait for one picture, and all get it
            # 0.9: a thread that woke a little early must not get the old picture and wait a whole interval more
            if time.monotonic() - self._taken_at >= 0.9 * self._interval_s:
                status, seconds = self._take()
                self._interval_s = max(self._least_interval_s, seconds / _MOST_LOOP_TIME)
                self._line, self._taken_at = status.line(), time.monotonic()
            return self._line

    def close(self) -> None:
        """No more viewers; those there see the end of their stream. Blocks until the threads have ended."""
        self._closing.set()
        # accept() has no other portable way out than a connection
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as waker, suppress(OSError):
            waker.connect(str(self._path))
        self._acceptor.join()
        for thread in self._viewers:
            thread.join()
        self._socket.close()
        self._path.unlink(missing_ok=True)


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)  # before listen(): until then nobody can connect
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


# ---------------------------------------------------------------------------------------------------------------------
# The picture; in the event loop's thread
# ---------------------------------------------------------------------------------------------------------------------


def status_of(balancer: StreamBalancer, name: str = "") -> Status:
    """A picture of this moment. O(waiting + ranks), and a plan of the next batch where few enough wait."""
    statistics = balancer.statistics()
    state, config = balancer.parts.core.state, balancer.config
    buffer = state.buffer
    return Status(
        time_s=time.time(),
        pid=os.getpid(),
        name=name,
        dp_size=config.dp_size,
        batch_size=config.batch_size,
        window=config.window,
        deadline_s=config.deadline_s,
        policy=config.policy,
        ended=balancer.ended,
        waiting=statistics.waiting,
        waiting_tokens=statistics.waiting_tokens,
        oldest_wait_s=statistics.oldest_wait_s,
        lengths=_by_length(buffer.lengths, anyio.current_time() - buffer.arrived_at),
        blocked_puts=statistics.blocked_puts,
        reserved=statistics.reserved,
        accepted=statistics.accepted,
        acknowledged=statistics.acknowledged,
        dispatched_tokens=statistics.dispatched_tokens,
        evicted={str(reason): count for reason, count in statistics.evicted.items()},
        batches={str(reason): count for reason, count in statistics.batches.items()},
        idle_fraction=statistics.idle_fraction,
        unavoidable_idle_fraction=statistics.unavoidable_idle_fraction,
        measured_idle_fraction=statistics.measured_idle_fraction,
        next_batch=_next_batch(state) if statistics.waiting <= _MOST_PREVIEWED else None,
        in_flight=[_in_flight(batch) for batch in balancer.in_flight()],
        ranks=_ranks(statistics, state.idle.last_s, balancer.rank_states()),
        waits_for=balancer.why_no_batch(),
        warnings=_warnings(statistics, balancer.rank_states()),
    )


def _by_length(lengths: np.ndarray, ages_s: np.ndarray) -> list[LengthRow]:
    if not lengths.size:
        return []
    octaves = np.frexp(lengths.astype(np.float64))[1] - 1  # 2**octave <= length < 2**(octave + 1)
    counts = np.bincount(octaves)
    oldest = np.zeros(counts.size)
    np.maximum.at(oldest, octaves, ages_s)
    return [
        LengthRow(1 << octave, int(counts[octave]), float(oldest[octave])) for octave in np.flatnonzero(counts).tolist()
    ]


def _next_batch(state: State) -> NextBatch | None:
    plan = preview(state, anyio.current_time())
    if plan is None:
        return None
    plan_, tokens = plan
    return NextBatch(
        rollouts=sum(len(one) for of_rank in plan_.ranks for one in of_rank),
        tokens=tokens,
        imbalance=plan_.imbalance,
        unavoidable_imbalance=plan_.unavoidable_imbalance,
    )


def _in_flight(batch: Batch) -> InFlight:
    return InFlight(batch.step, batch.reason, batch.num_rollouts, batch.num_tokens, batch.imbalance)


def _ranks(statistics: Statistics, last_s: tuple[float, ...], states: list[RankState]) -> list[RankRow]:
    by_rank: dict[int, RankState] = {state.rank: state for state in states}
    rows = []
    for rank, (busy_s, idle_s) in enumerate(
        zip(statistics.rank_busy_seconds, statistics.rank_idle_seconds, strict=True)
    ):
        state = by_rank.get(rank)
        rows.append(
            RankRow(
                rank=rank,
                busy_s=busy_s,
                idle_s={str(cause): seconds for cause, seconds in idle_s.items() if seconds},
                last_step_s=last_s[rank] if last_s else None,
                queue=None if state is None else state.queue,
                state="" if state is None else _in_words(state),
            )
        )
    return rows


def _in_words(state: RankState) -> str:
    if state.lost is not None:
        return f"lost: {state.lost}"
    if not state.connected:
        return "not connected"
    return f"step {state.step}" if state.queue else "waiting"


def _warnings(statistics: Statistics, states: list[RankState]) -> list[str]:
    found = [str(statistics.straggler)] if statistics.straggler is not None else []
    missing = [state.rank for state in states if not state.connected]
    if missing:
        found.append(f"{len(missing)} ranks are not connected: {', '.join(map(str, missing[:8]))}")
    if statistics.blocked_puts:
        found.append(f"{statistics.blocked_puts} puts wait for room: training is slower than generation")
    if stale := statistics.evicted["stale"]:
        found.append(f"{stale} stale rollouts were evicted; reserve() throttles generation instead")
    return found
