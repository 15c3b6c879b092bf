"""Common to the benchmarks: their options, and how a figure is printed."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from typing import Any


def arguments(doc: str | None, **defaults: Any) -> argparse.Namespace:
    """The command line: ``--json``, and an option for each default, of its type (None: text; False: a flag)."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    for name, default in defaults.items():
        option = "--" + name.replace("_", "-")
        if default is False:
            parser.add_argument(option, action="store_true")
        else:
            kind = str if default is None else type(default)
            parser.add_argument(option, type=kind, default=default, help=f"default: {default}")
    return parser.parse_args()


@dataclass
class Rows:
    """Prints one row after the other: a table line, or a JSON object."""

    as_json: bool
    failed: list[str] = field(default_factory=list)

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
