"""The balancer's side of ``stream-balancer watch``.

::

    async with sb.StreamBalancer(config) as balancer, publish_status(balancer):
        ...

Whoever connects to the Unix socket (mode 0600, in a folder of mode 0700) gets one line of JSON. A new picture is taken
at most twice a second, and never so often that pictures take more than half a percent of the event loop's time; in
between all get the same. While nobody looks nothing happens at all.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
from anyio.abc import SocketListener, SocketStream

from stream_balancer.controller.balancer import StreamBalancer
from stream_balancer.core.diagnosis import RankState
from stream_balancer.core.report import preview
from stream_balancer.core.state import State
from stream_balancer.statistics import Statistics
from stream_balancer.types import Batch
from stream_balancer.watch.status import SUFFIX, RankRow, Status, folder

__all__ = ["publish_status", "status_of"]

_MOST_LOOP_TIME = 0.005
"""Fraction of the event loop's time that pictures may take."""
_MOST_PREVIEWED = 16_384
"""Waiting rollouts; beyond, planning the next batch only to show it would hold the loop up."""
_SEND_TIMEOUT_S = 10.0
_CONFIG = ("dp_size", "batch_size", "batch_tokens", "window", "window_tokens", "deadline_s", "policy")
_numbers = itertools.count()
_log = logging.getLogger("stream_balancer.watch")


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
    where = Path(path) if path is not None else folder() / f"{os.getpid()}-{next(_numbers)}{SUFFIX}"
    latest = _Latest(balancer, name, interval_s)
    failed: Exception | None = None
    async with await anyio.create_unix_listener(where, mode=0o600) as listener:
        try:
            async with anyio.create_task_group() as viewers:
                viewers.start_soon(_serve, listener, latest)
                try:
                    yield where
                except Exception as error:  # noqa: BLE001  # raised below as it is: a task group would wrap it
                    failed = error
                viewers.cancel_scope.cancel()
        finally:
            where.unlink(missing_ok=True)
    if failed is not None:
        raise failed


async def _serve(listener: SocketListener, latest: _Latest) -> None:
    try:
        await listener.serve(partial(_answer, latest))
    except Exception:  # noqa: BLE001  # no descriptors left, say: the balancer must not stop for that
        _log.exception("the balancer is no longer published; it goes on")


async def _answer(latest: _Latest, viewer: SocketStream) -> None:
    try:
        async with viewer:
            with anyio.move_on_after(_SEND_TIMEOUT_S):  # of a viewer that does not read
                await viewer.send(latest.line())
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        pass  # it left
    except Exception:  # noqa: BLE001  # nor for that
        _log.exception("no picture of the balancer could be taken")


class _Latest:
    """The last picture, taken anew when it is old enough."""

    def __init__(self, balancer: StreamBalancer, name: str, interval_s: float) -> None:
        self._balancer, self._name, self._interval_s = balancer, name, interval_s
        self._line = b""
        self._old_at = -float("inf")
        status_of(balancer, name)  # the first takes longest, imports and all, and would put off the second

    def line(self) -> bytes:
        """Of now, or almost."""
        now = time.monotonic()
        if now >= self._old_at:
            self._line = status_of(self._balancer, self._name).line()
            self._old_at = now + max(self._interval_s, (time.monotonic() - now) / _MOST_LOOP_TIME)
        return self._line


def status_of(balancer: StreamBalancer, name: str = "") -> Status:
    """A picture of this moment. O(waiting + ranks), and a plan of the next batch where few enough wait."""
    statistics, now, states = balancer.statistics(), anyio.current_time(), balancer.rank_states()
    state = balancer.parts.core.state
    return Status(
        time_s=time.time(),
        pid=os.getpid(),
        name=name,
        config={knob: getattr(balancer.config, knob) for knob in _CONFIG},
        ended=balancer.ended,
        waits_for=balancer.why_no_batch(),
        statistics={field: getattr(statistics, field) for field in Statistics.__dataclass_fields__},
        lengths=_by_length(state.buffer.lengths, now - state.buffer.arrived_at),
        next_batch=_next_batch(state, now) if statistics.waiting <= _MOST_PREVIEWED else None,
        in_flight=[_in_flight(batch) for batch in balancer.in_flight()],
        ranks=_ranks(balancer.config.dp_size, state.idle.last_s, states),
        warnings=_warnings(statistics, states),
    )


def _by_length(lengths: np.ndarray, ages_s: np.ndarray) -> list[tuple[int, int, float]]:
    octaves = np.frexp(lengths.astype(np.float64))[1] - 1  # 2**octave <= length < 2**(octave + 1)
    rows = ((octave, octaves == octave) for octave in np.unique(octaves).tolist())
    return [(1 << octave, int(of_it.sum()), float(ages_s[of_it].max())) for octave, of_it in rows]


def _next_batch(state: State, now: float) -> dict[str, Any] | None:
    previewed = preview(state, now)
    if previewed is None:
        return None
    plan, tokens = previewed
    return {
        "rollouts": sum(len(one) for of_rank in plan.ranks for one in of_rank),
        "tokens": tokens,
        "imbalance": plan.imbalance,
        "unavoidable_imbalance": plan.unavoidable_imbalance,
    }


def _in_flight(batch: Batch) -> dict[str, Any]:
    return {
        "step": batch.step,
        "reason": batch.reason,
        "rollouts": batch.num_rollouts,
        "imbalance": batch.imbalance,
    }


def _ranks(dp_size: int, last_s: tuple[float, ...], states: list[RankState]) -> list[RankRow]:
    number = max([dp_size, *(state.rank + 1 for state in states)])  # the last step may have been of fewer, or of more
    rows = [RankRow(last_step_s=seconds) for seconds in [*last_s, *[None] * number][:number]]
    for state in states:
        row = rows[state.rank]
        rows[state.rank] = msgspec.structs.replace(row, state=_in_words(state), queue=state.queue)
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
