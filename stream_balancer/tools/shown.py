"""Output of commands: tables, and progress. By rich."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

EVERY_S = 10.0
"""Seconds between two lines of progress where there is no terminal."""


def stdout() -> Console:
    """Tables are 120 wide in a file."""
    return Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, bold: Sequence[str] = (), left: int = 1, **options: Any
) -> Table:
    """Rows of text below headings, the first ``left`` columns to the left; ``bold``: rows, by the text they begin
    with. ``options``: rich's."""
    made = Table(**options)
    for place, heading in enumerate(headings):
        made.add_column(heading, justify="left" if place < left else "right")
    for row in rows:
        made.add_row(*row, style="bold" if row[0] in bold else None)
    return made


class Bars(Progress):
    """Progress on stderr: bars on a terminal, elsewhere a line now and then."""

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console(stderr=True, highlight=False)
        columns = (TextColumn("{task.description:<14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._next_s = time.monotonic() + EVERY_S

    def show(self, bar: Any, done: int, total: int) -> None:
        """Show that so many are done."""
        self.update(bar, completed=done, total=total)
        # a bar redrawn into a file would be thousands of lines
        if not self.console.is_terminal and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + EVERY_S
            self.console.print(f"{self.tasks[bar].description}: {done} of {total}")
