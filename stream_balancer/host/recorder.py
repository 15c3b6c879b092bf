"""The arrivals of a live balancer, as a trace file: ``load_trace`` reads it, ``tune`` finds knobs for it.

::

    accepted --> Recorder.accepted: a row in a list --some rows, or some seconds--> the thread that writes

The event loop's thread only ever appends to a list, and hands it over. A disk that is full, slow or gone costs the rest
of the recording, is logged once and kept in ``error``; never a put.
"""

from __future__ import annotations

import csv
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeAlias

from stream_balancer.core.observer import Observer
from stream_balancer.errors import ConfigError
from stream_balancer.rollouts import Rollout

_log = logging.getLogger("stream_balancer.record")

HEADER = ("group_id", "prompt_tokens", "output_tokens", "arrival_seconds")
"""Columns that ``load_trace`` reads."""

Row: TypeAlias = tuple[str | int, ...]

ROWS = 256  # handed to the thread at a time: waking it for every rollout would cost more than writing it
SECONDS = 5.0  # ... or after so long, so that a file of a slow run is never far behind
MOST_PENDING = 1_000_000  # rows, 100 MB or so: a disk this far behind has stopped


class Recorder(Observer):
    """Writes who arrived when. ``accepted`` never waits and never raises.

    Rows are written in the order of acceptance, with seconds since the first: what waits for room, or is refused by
    ``accept=``, has not arrived.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        """The file."""
        self.num_rollouts = 0
        """Rollouts recorded so far, written or about to be."""
        self.error: OSError | None = None
        """Cause for which recording stopped early; None while all is well."""
        if not self.path.endswith(".csv"):
            raise ConfigError(f"record({self.path!r}): a trace is called something.csv")
        self._first_s = self._handed_s = -1.0
        self._rows: list[Row] = [HEADER]
        self._num_written = -1  # with the header
        self._thread = ThreadPoolExecutor(1, "stream_balancer record")
        # an earlier recording is worth more than this one
        self._hand_over("x")

    def accepted(self, rollouts: Sequence[Rollout], now: float) -> None:
        """Rollouts that were accepted now (seconds on the balancer's clock). O(columns), and a look at their loss
        masks."""
        if self.error is not None:
            return
        if self._first_s < 0:
            self._first_s = self._handed_s = now
        for rollout in rollouts:
            prompt = _prompt_tokens(rollout)
            group = f"alone-{self.num_rollouts}" if rollout.group_id is None else rollout.group_id
            seconds = f"{now - self._first_s:.3f}"
            self._rows.append((group, prompt, rollout.num_tokens - prompt, seconds))
            self.num_rollouts += 1
        if len(self._rows) >= ROWS or now - self._handed_s >= SECONDS:
            if self.num_rollouts - self._num_written > MOST_PENDING:
                self._fail(f"the disk is {MOST_PENDING:,} rows behind")
            self._handed_s = now
            self._hand_over()

    def close(self) -> None:
        """Write what is left; returns once it is in the file. Blocks: call it in a worker thread. Idempotent."""
        if self._rows:
            self._hand_over()
        self._thread.shutdown()

    def _hand_over(self, mode: Literal["x", "a"] = "a") -> None:
        rows, self._rows = self._rows, []
        self._thread.submit(self._write, rows, mode)

    def _write(self, rows: list[Row], mode: Literal["x", "a"]) -> None:
        """In the thread; the file is closed each time, so that what was written before a crash can be read."""
        if self.error is not None:
            return
        try:
            with open(self.path, mode, newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerows(rows)
            self._num_written += len(rows)
        except FileExistsError:
            self._fail("it is there already, and is not overwritten: give another name")
        except OSError as error:
            self._fail(error.strerror or str(error))

    def _fail(self, why: str) -> None:
        if self.error is None:
            self.error = OSError(why)
            _log.error(
                "recording arrivals to %s stopped after %d of them: %s. Everything else goes on",
                self.path, max(self._num_written, 0), why,
            )  # fmt: skip


def _prompt_tokens(rollout: Rollout) -> int:
    """Tokens before the first one that is trained on; 0 without a loss mask."""
    mask = rollout.tokens.get("loss_mask")
    if mask is None:
        return 0
    if mask.is_meta:  # tokens are with their producer: only the count is known here, without the first token
        before = rollout.num_tokens - rollout.num_loss_tokens
        return before if before > 1 else 0
    trained = mask != 0
    return int(trained.byte().argmax()) if trained.any() else rollout.num_tokens
