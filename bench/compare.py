"""Two commits side by side: the same benchmark, alternating, in one run on one machine.

``python bench/compare.py COMMIT bench/engine.py [--rounds 3] [its arguments]``, or ``make bench-compare COMMIT=...``.
A benchmark prints its rows as JSON; a row of this one is the median of today's over the median of the commit's, with
the least and the greatest ratio of two runs that followed each other. Each commit runs its own file of that name;
``--same`` runs today's file with either package.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
Row = tuple[str, str]
"""What a figure is called, with all that belongs to it; and its unit."""


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A worktree of its own, gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "then"
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", path, commit], check=True)
        try:
            yield path
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", path], check=True)


def run(package: Path, file: Path, arguments: list[str]) -> dict[Row, float]:
    """One run of a benchmark: its figures by name. The package is the one in this folder, not an installed one."""
    env = {**os.environ, "PYTHONPATH": str(package)}
    command = [sys.executable, str(file), "--json", *arguments]
    done = subprocess.run(command, env=env, cwd=package, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1):  # 1: a bar was missed
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode} in {package}")
    figures = {}
    for line in done.stdout.splitlines():
        row = json.loads(line)
        rest = " ".join(f"{key}={row[key]}" for key in sorted(row.keys() - {"name", "value", "unit", "bar", "holds"}))
        figures[f"{row['name']} {rest}".strip(), row["unit"]] = row["value"]
    return figures


def main() -> None:
    """Alternate, and print a ratio for each figure that both have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--same", action="store_true", help="today's file with either package")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    options, arguments = parser.parse_known_args()
    file = options.file.resolve()
    with checkout(options.commit) as then:
        its_file = file if options.same else then / file.relative_to(ROOT)
        before, after = [], []
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
            before.append(run(then, its_file, arguments))
            after.append(run(ROOT, file, arguments))
    load = f"load average {', '.join(f'{one:.1f}' for one in os.getloadavg())} on {os.cpu_count()} cores"
    print(json.dumps({"about": load}) if options.json else load, flush=True)
    for name, unit in after[0]:
        pairs = [(old.get((name, unit)), new.get((name, unit))) for old, new in zip(before, after, strict=True)]
        both = [(old, new) for old, new in pairs if old and new is not None]
        if not both:
            continue
        old, new = (statistics.median(values) for values in zip(*both, strict=True))
        ratios = [its_new / its_old for its_old, its_new in both]
        if options.json:
            row = {"name": name, "unit": unit, "then": old, "now": new, "ratio": new / old, "ratios": ratios}
            print(json.dumps(row), flush=True)
        else:
            spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
            print(f"{name:<64} {old:>11.4g} -> {new:>11.4g} {unit:<7} {new / old:5.2f} ({spread})", flush=True)


if __name__ == "__main__":
    main()
