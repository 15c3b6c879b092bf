"""The arrivals of a live balancer, as a trace file: ``load_trace`` reads it, ``tune`` finds knobs for it.

::

    accepted --> Recorder.accepted: a row in a list --some rows, or some seconds--> queue --> the thread that writes

The event loop's thread only ever appends to a list and to a queue. A disk that is full, slow or gone costs the rest of
the recording, is logged once and kept in ``error``; never a put. Nothing decides here, and nothing is read.
"""

from __future__ import annotations

import csv
import gzip
import io
import logging
import os
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import BinaryIO, TypeAlias

from stream_balancer.core.observer import Observer
from stream_balancer.errors import ConfigError
from stream_balancer.types import Rollout

__all__ = ["Recorder"]

_log = logging.getLogger("stream_balancer.record")

HEADER = ("group_id", "prompt_tokens", "output_tokens", "arrival_seconds", "stratum")
"""Columns that ``load_trace`` reads."""

Row: TypeAlias = tuple[str, int, int, str, str]

ROWS = 256  # handed to the thread at a time: waking it for every rollout would cost more than writing it
SECONDS = 5.0  # ... or after so long, so that a file of a slow run is never far behind
MOST_PENDING = 1_000_000  # rows, 100 MB or so: a disk this far behind has stopped


class Recorder(Observer):
    """Writes who arrived when. ``accepted`` never waits and never raises.

    Rows are written in the order of acceptance, with seconds since the first: what waits for room, or is turned down by
    ``accept=``, has not arrived. A compressed file is a chain of whole gzip members, readable up to the last one also
    after a crash.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        """The file."""
        self.num_rollouts = 0
        """Rollouts recorded so far, written or about to be."""
        self.error: OSError | None = None
        """Why recording stopped early; None while all is well."""
        if not self.path.endswith((".csv", ".csv.gz")):
            raise ConfigError(f"record({self.path!r}): a trace is called something.csv or something.csv.gz")
        self._first_s: float | None = None
        self._handed_s = 0.0
        self._rows: list[Row] = []
        self._num_written = 0
        self._queue: SimpleQueue[list[Row] | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._write_all, name="stream-balancer-record", daemon=True)
        self._thread.start()

    def accepted(self, rollouts: Sequence[Rollout], now: float) -> None:
        """Rollouts that were accepted now (seconds on the balancer's clock). O(columns), and a look at their loss
        masks."""
        if self.error is not None or self._closed:
            return
        if self._first_s is None:
            self._first_s = self._handed_s = now
        for rollout in rollouts:
            prompt = _prompt_tokens(rollout)
            group = f"alone-{self.num_rollouts}" if rollout.group_id is None else rollout.group_id
            seconds = f"{now - self._first_s:.3f}"
            self._rows.append((group, prompt, rollout.num_tokens - prompt, seconds, rollout.stratum or ""))
            self.num_rollouts += 1
        if len(self._rows) >= ROWS or now - self._handed_s >= SECONDS:
            self._hand_over(now)

    def _hand_over(self, now: float) -> None:
        if self.num_rollouts - self._num_written > MOST_PENDING:
            self._fail(OSError(f"the disk is {MOST_PENDING:,} rows behind"))
        self._queue.put(self._rows)
        self._rows, self._handed_s = [], now

    def close(self) -> None:
        """Write what is left; returns once it is in the file. Blocks: call it in a worker thread. Idempotent."""
        if not self._closed:
            self._closed = True
            self._queue.put(self._rows)
            self._queue.put(None)
        self._thread.join()

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        try:
            # an earlier recording is worth more than this one
            with open(self.path, "xb") as file:
                self._write(file, [HEADER])
                while (rows := self._queue.get()) is not None and self.error is None:
                    self._write(file, rows)
                    self._num_written += len(rows)
        except FileExistsError as error:
            self._fail(FileExistsError(error.errno, "it is there already, and is not overwritten: give another name"))
        except OSError as error:
            self._fail(error)

    def _write(self, file: BinaryIO, rows: Sequence[tuple[object, ...]]) -> None:
        if not rows:
            return
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(rows)
        data = text.getvalue().encode()
        # a whole member each time: what was written before a crash can be read
        file.write(gzip.compress(data) if self.path.endswith(".gz") else data)
        file.flush()

    def _fail(self, error: OSError) -> None:
        if self.error is None:
            self.error = error
            _log.error(
                "recording arrivals to %s stopped after %d of them: %s. Everything else goes on",
                self.path,
                self._num_written,
                error.strerror or error,
            )


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
