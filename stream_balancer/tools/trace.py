"""Length traces: which lengths arrive, and when. Read from files here; ``length_models`` generates them.

A trace is a table with one row per rollout. Files are CSV, plain or gzipped, with the columns

    group_id        any text; rows with the same one are siblings (sampled from one prompt)
    prompt_tokens   tokens, >= 0
    output_tokens   tokens, >= 0; everything after the prompt, tool output included
    arrival_seconds optional: when the rollout arrived, seconds, never decreasing

in any order; other columns are ignored. A rollout's length is prompt_tokens + output_tokens, at least 1. Pure numpy.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import os
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from stream_balancer.errors import TraceError
from stream_balancer.planning.arrays import Floats, Ints

MAX_TOKENS = 2**31 - 1  # cu_seqlens is int32; a larger number in a file is a mistake, not a rollout


_DTYPES = {
    **dict.fromkeys(("prompt_tokens", "output_tokens", "group_ids"), np.int64),
    "arrival_s": np.float64,
}


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Trace:
    """Lengths of ``n`` rollouts, in the order of the file. Raises :class:`TraceError` where columns do not fit
    together."""

    prompt_tokens: Ints
    """[n] tokens, >= 0."""
    output_tokens: Ints
    """[n] tokens, >= 0; prompt + output >= 1."""
    group_ids: Ints
    """[n] label of the sibling group, numbered by first appearance."""
    arrival_s: Floats | None = None
    """[n] recorded arrival, seconds, never decreasing; None where none was recorded."""
    name: str = "trace"
    """Where it came from, for people."""

    def __post_init__(self) -> None:
        # files, length models and callers make traces: all of them pass here
        shapes = set()
        for column, dtype in _DTYPES.items():
            if (given := getattr(self, column)) is not None:
                object.__setattr__(self, column, np.asarray(given, dtype=dtype))
                shapes.add(np.shape(given))
        if len(shapes) != 1 or self.prompt_tokens.ndim != 1:
            raise TraceError(f"{self.name}: columns must all be [n], not {sorted(shapes)}")
        if len(self) == 0:
            raise TraceError(f"{self.name}: no rollouts")
        if (self.prompt_tokens < 0).any() or (self.output_tokens < 0).any():
            raise TraceError(f"{self.name}: negative lengths (prompt_tokens, output_tokens). Drop those rollouts")
        if (self.lengths < 1).any():
            raise TraceError(f"{self.name}: a rollout without tokens (prompt_tokens + output_tokens is 0). Drop it")
        if self.arrival_s is not None and not (
            np.isfinite(self.arrival_s).all() and (np.diff(self.arrival_s) >= 0).all()
        ):
            raise TraceError(f"{self.name}: arrival_s must be finite and never decrease. Sort the rollouts by arrival")

    def __len__(self) -> int:
        return int(self.prompt_tokens.size)

    @property
    def lengths(self) -> Ints:
        """[n] tokens of each rollout, prompt included, >= 1."""
        return self.prompt_tokens + self.output_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens over all rollouts."""
        return int(self.lengths.sum())

    @property
    def num_groups(self) -> int:
        """Sibling groups."""
        return int(np.unique(self.group_ids).size)

    def scaled(self, factor: float) -> Trace:
        """Trace with lengths times ``factor``, rounded, at least 1 token each; arrivals are kept.

        For running a trace of long rollouts on a small machine. Say by how much wherever the result is shown: quadratic
        costs weigh less in a trace that was scaled down.
        """
        if not (math.isfinite(factor) and factor > 0):
            raise TraceError(f"{self.name}: the scale must be a finite number > 0, not {factor!r}")
        if factor == 1.0:
            return self
        prompt = np.rint(self.prompt_tokens * factor).astype(np.int64)
        lengths = np.maximum(np.rint(self.lengths * factor).astype(np.int64), 1)
        # rounded by itself a prompt may be a token longer than its rollout
        prompt = np.minimum(prompt, lengths)
        return replace(self, prompt_tokens=prompt, output_tokens=lengths - prompt, name=f"{self.name} x{factor:g}")

    def resampled(self, num_rollouts: int, seed: int) -> Trace:
        """A trace of ``num_rollouts`` drawn with replacement, without recorded arrivals; for runs longer than the file.

        Whole groups are drawn, siblings together and each time under a new label; the last may be cut short.
        """
        if num_rollouts < 1:
            raise TraceError(f"{self.name}: at least 1 rollout must be drawn, not {num_rollouts}")
        rng = np.random.default_rng(seed)
        order = np.argsort(self.group_ids, kind="stable")
        _, starts, sizes = np.unique(self.group_ids[order], return_index=True, return_counts=True)
        drawn = rng.integers(0, sizes.size, math.ceil(num_rollouts * sizes.size / len(self)))
        # sizes vary, so the number that was reckoned may fall short
        while int(sizes[drawn].sum()) < num_rollouts:
            drawn = np.concatenate((drawn, rng.integers(0, sizes.size, max(drawn.size // 4, 1))))
        groups = np.split(order, starts[1:])
        rows = np.concatenate([groups[group] for group in drawn])[:num_rollouts]
        labels = np.repeat(np.arange(drawn.size), sizes[drawn])[:num_rollouts]
        return self._take(rows, labels)

    def repeated(self, times: int) -> Trace:
        """The trace so many times over, groups under new labels each time; recorded arrivals go on where they ended,
        after a mean gap. For runs longer than the file that keep its order and its arrivals."""
        if times < 1:
            raise TraceError(f"{self.name}: it must be repeated at least once, not {times} times")
        rows = np.tile(np.arange(len(self)), times)
        turn = np.repeat(np.arange(times), len(self))
        arrival_s = self.arrival_s
        if arrival_s is not None:
            span = float(arrival_s[-1] - arrival_s[0])
            # the next turn begins a mean gap after the last arrival of this one
            arrival_s = arrival_s[rows] + turn * (span + span / max(len(self) - 1, 1))
        labels = self.group_ids[rows] + turn * (int(self.group_ids.max()) + 1)
        return self._take(rows, labels, arrival_s)

    def _take(self, rows: Ints, labels: Ints, arrival_s: Floats | None = None) -> Trace:
        """Trace of these rows, in groups and at moments of their own."""
        return replace(
            self,
            prompt_tokens=self.prompt_tokens[rows],
            output_tokens=self.output_tokens[rows],
            group_ids=labels,
            arrival_s=arrival_s,
        )

    def __repr__(self) -> str:
        return (
            f"Trace({self.name!r}, rollouts={len(self)}, groups={self.num_groups}, tokens={self.num_tokens}, "
            f"arrivals={'recorded' if self.arrival_s is not None else 'none'})"
        )


# --- files ------------------------------------------------------------------------------------------------------------


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace from a ``.csv`` or ``.csv.gz`` file (see the module docstring for its columns).

    Raises :class:`TraceError` naming file, line and what to do, for anything that is not such a file.
    """
    name = os.fspath(path)
    return _parse(name, _read_text(name))


def _read_text(name: str) -> str:
    try:
        raw = Path(name).read_bytes()
    except OSError as error:
        raise TraceError(f"{name}: cannot be read ({error.strerror or error}). Check the path") from None
    # by its first bytes, not its name: files are renamed
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(f"{name}: the gzip file is damaged or cut short ({error}). Fetch it again") from None
    try:
        # spreadsheets begin a file with a byte-order mark
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise TraceError(
            f"{name}, line {line}: is not UTF-8 text. A trace is a CSV file, or one compressed with gzip"
        ) from None


class _Row(msgspec.Struct):
    """A line of a file. Whole numbers may be written as "12.0": so do tables of columns that once shared one with
    NaN."""

    group_id: str
    prompt_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
    output_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
    arrival_seconds: float = math.nan


def _parse(name: str, text: str) -> Trace:
    reader = csv.reader(io.StringIO(text, newline=""))
    rows: list[_Row] = []
    try:
        # blank lines are no rows
        header = [column.strip() for column in next(filter(None, reader), ())]
        _check_header(header)
        for fields in filter(None, reader):
            if len(fields) != len(header):
                raise ValueError(f"{len(fields)} fields, but the first line names {len(header)} columns")
            rows.append(_row(dict(zip(header, fields, strict=True)), rows[-1].arrival_seconds if rows else -math.inf))
    except csv.Error as error:
        raise TraceError(f"{name}, line {reader.line_num}: is not CSV ({error})") from None
    except ValueError as error:
        raise TraceError(f"{name}, line {reader.line_num}: {error}") from None
    if not rows:
        raise TraceError(f"{name}: has column names but no rows. A trace needs one row per rollout")
    # numbered by first appearance, so that the same file gives the same draws
    labels = {group: label for label, group in enumerate(dict.fromkeys(row.group_id for row in rows))}
    return Trace(
        prompt_tokens=np.array([row.prompt_tokens for row in rows]),
        output_tokens=np.array([row.output_tokens for row in rows]),
        group_ids=np.array([labels[row.group_id] for row in rows]),
        arrival_s=np.array([row.arrival_seconds for row in rows]) if "arrival_seconds" in header else None,
        name=Path(name).name.removesuffix(".gz").removesuffix(".csv"),
    )


def _check_header(header: list[str]) -> None:
    required = "group_id", "prompt_tokens", "output_tokens"
    if missing := [column for column in required if column not in header]:
        raise ValueError(
            f"no column {', '.join(missing)}; the file has {', '.join(header) or 'nothing'}. The first line must name "
            f"{', '.join(required)}, in any order (as group_id the row's number will do where there are no siblings)"
        )
    # a dict of a row's fields would keep one of the two, silently
    if twice := [column for column in _Row.__struct_fields__ if header.count(column) > 1]:
        raise ValueError(f"two columns are called {twice[0]}. Rename one")


def _row(fields: dict[str, str], previous_s: float) -> _Row:
    """Parsed line. Raises ValueError for what is no row of a trace."""
    try:
        row = msgspec.convert(fields, _Row, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{error}: {fields}. Drop the row or repair it") from None
    if row.prompt_tokens + row.output_tokens == 0:
        raise ValueError("a rollout without tokens (prompt_tokens + output_tokens is 0). Drop the row")
    if "arrival_seconds" in fields and not previous_s <= row.arrival_seconds < math.inf:
        raise ValueError(
            f"arrival_seconds is {row.arrival_seconds:g} after {previous_s:g}. Sort the rows by it, or drop that "
            "column to simulate the arrivals"
        )
    return row
