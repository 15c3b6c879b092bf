"""Common to the benchmarks: their options, their other processes, rollouts, and how a figure is printed."""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import stream_balancer as sb

BYTES_PER_TOKEN = 21


def rollout(num_tokens: int, name: str) -> sb.Rollout:
    """21 bytes a token: ids, log-probabilities, advantages, versions and a mask."""
    return sb.Rollout(tokens=columns(num_tokens), rollout_id=name)


def columns(num_tokens: int) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.randint(0, 150_000, (num_tokens,)),
        "logprobs": torch.rand(num_tokens),
        "advantages": torch.rand(num_tokens),
        "versions": torch.ones(num_tokens, dtype=torch.int32),
        "loss_mask": torch.ones(num_tokens, dtype=torch.bool),
    }


async def keep_putting(balancer: sb.StreamBalancer, num_tokens: int, count: int | None = None) -> None:
    """Rollouts of 8 bytes a token, which share their column: so many, and then the end; None: until cancelled, or the
    balancer has ended."""
    ids = torch.zeros(num_tokens, dtype=torch.int64)
    with suppress(sb.errors.ClosedResourceError):
        for number in itertools.count() if count is None else range(count):
            await balancer.put(sb.Rollout(tokens={"input_ids": ids}, rollout_id=f"r{number}"))
        balancer.end()


def arguments(doc: str | None, **defaults: Any) -> argparse.Namespace:
    """The command line: ``--json``, ``--results FILE``, and an option for each default, of its type (None: text; False:
    a flag). In a process that :func:`peer` has started ``as_peer`` is what it is to do, otherwise None."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    if "results" not in defaults:
        parser.add_argument("--results", metavar="FILE", help="write the rows there, too, as bench/results/ keeps them")
    parser.add_argument("--as-peer", type=json.loads, help=argparse.SUPPRESS)
    for name, default in defaults.items():
        option = "--" + name.replace("_", "-")
        if default is False:
            parser.add_argument(option, action="store_true")
        else:
            kind = str if default is None else type(default)
            parser.add_argument(option, type=kind, default=default, help=f"default: {default}")
    return parser.parse_args()


@contextmanager
def peer(*what: Any) -> Iterator[subprocess.Popen[str]]:
    """The same benchmark in a process of its own, which is to do this."""
    command = [sys.executable, sys.argv[0], "--as-peer", json.dumps(what)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def about() -> dict[str, Any]:
    """First row of a file of results: what was run, when, on what."""
    show = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return {
        "about": " ".join([f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": subprocess.run(show, capture_output=True, text=True, check=False).stdout.strip(),
        "machine": f"{os.cpu_count()} cores {platform.machine()}, CPython {platform.python_version()}, "
        f"torch {torch.__version__}",
        "load": [round(one, 1) for one in os.getloadavg()],
    }


@dataclass
class Rows:
    """Prints one row after the other: a table line, or a JSON object; and writes it to a file of results."""

    as_json: bool
    results: str | None = None
    more: bool = False
    """Rows go behind those that the file has."""
    failed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.results and not self.more:
            Path(self.results).write_text(json.dumps(about()) + "\n", encoding="utf-8")

    def add(
        self, name: str, value: float, unit: str, bar: float | None = None, *, at_least: bool = False, **more: Any
    ) -> None:
        """One figure; with `bar`, whether it is at most (or at least) that. ``more``: whatever else belongs to it."""
        row: dict[str, Any] = {"name": name, "value": float(f"{value:.5g}"), "unit": unit}
        if bar is not None:
            row["bar"] = bar
            row["holds"] = bool(value >= bar if at_least else value <= bar)
            if not row["holds"]:
                self.failed.append(name)
        if self.results:
            with Path(self.results).open("a", encoding="utf-8") as file:
                print(json.dumps(row | more), file=file)
        if self.as_json:
            print(json.dumps(row | more), flush=True)
        else:
            verdict = (
                "" if bar is None else f"  {'>=' if at_least else '<='} {bar:g}: {'yes' if row['holds'] else 'NO'}"
            )
            rest = "".join(f", {key} {text}" for key, text in more.items())
            print(f"{name:<72} {value:>12.4f} {unit:<6}{verdict}{rest}", flush=True)

    def text(self, line: str) -> None:
        if not self.as_json:
            print(f"\n{line}", flush=True)
