"""One page of what bench/schedulers.py wrote: ``python bench/scoreboard.py RESULTS.jsonl > PAGE.html``.

A line a scheduler, stream, size of step and kind of rank; a click on a heading sorts. Nothing but the file is needed to
show it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

COLUMNS = {
    "scheduler": "scheduler",
    "stream": "lengths",
    "batch_size": "rollouts",
    "ranks": "ranks",
    "sync": "ranks meet",
    "idle": "idle, %",
    "proven": "proven: no less with these rollouts, %",
    "time": "time over the least of the oldest rollouts",
    "delay": "mean delay, steps",
    "longest_delay": "longest",
    "token_variation": "tokens vary",
    "plan_ms": "plan, ms",
    "over_cap": "micro-batches over the cap",
    "steps": "steps",
    "left_out": "not run",
}

STYLE = """body { font: 14px system-ui, sans-serif; margin: 2em }
table { border-collapse: collapse }
th { cursor: pointer; text-align: left; position: sticky; top: 0; background: #fff; border-bottom: 2px solid #333 }
th, td { padding: 3px 9px; vertical-align: bottom }
td[data-n] { text-align: right; font-variant-numeric: tabular-nums }
tr:nth-child(even) td { background: #f4f5f7 }"""

SCRIPT = """const body = document.querySelector('tbody'), value = (row, at) => {
  const cell = row.cells[at];
  return 'n' in cell.dataset ? Number(cell.dataset.n) : cell.textContent;
};
document.querySelectorAll('th').forEach((head, at) => head.addEventListener('click', () => {
  const up = head.getAttribute('aria-sort') !== 'ascending', rows = [...body.rows];
  document.querySelectorAll('th').forEach(other => other.removeAttribute('aria-sort'));
  head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
  rows.sort((a, b) => {
    const x = value(a, at), y = value(b, at), empty = (x === '') - (y === '');
    return empty || (x < y ? -1 : x > y ? 1 : 0) * (up ? 1 : -1);
  });
  body.append(...rows);
}));"""


def page(lines: Iterable[str]) -> str:
    """HTML of the rows of a JSONL file of bench/schedulers.py, the least idle first."""
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    about = ", ".join(f"{value}" for row in found if "about" in row for value in row.values())
    rows = [row for row in found if "stream" in row]
    rows.sort(key=lambda row: row.get("idle", float("inf")))
    columns = {name: title for name, title in COLUMNS.items() if any(row.get(name) is not None for row in rows)}
    # a bound that somebody has measured besides is a column, too
    columns |= {name: name for row in rows for name in row if name not in COLUMNS}
    heads = "".join(f"<th>{escape(title)}</th>" for title in columns.values())
    body = "\n".join(f"<tr>{''.join(_cell(row, name) for name in columns)}</tr>" for row in rows)
    where = "".join(
        f"<li>{escape(row['scheduler'])}: {escape(row['missing'] or row['where'])}</li>"
        for row in found
        if "where" in row
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Schedulers side by side</title>\n'
        f"<style>{STYLE}</style></head><body><h1>Schedulers side by side</h1>\n<p>{escape(about)}</p>\n"
        f"<table><thead><tr>{heads}</tr></thead><tbody>\n{body}\n</tbody></table>\n"
        f"<ul>{where}</ul>\n<script>{SCRIPT}</script></body></html>\n"
    )


def _cell(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None:
        return "<td></td>"
    if isinstance(value, str):
        return f"<td>{escape(value)}</td>"
    return f'<td data-n="{value}">{round(value, 3):,}</td>'


if __name__ == "__main__":
    sys.stdout.write(page(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()))
