"""Says while tests run what a summary says only at its end, which a run that is stopped never reaches: which test
failed and how, and which one still runs after minutes. For the process that collects the reports of workers.
"""

from __future__ import annotations

import threading
import time

import pytest

FIRST_S = 120.0
"""A test that runs for so long is named, then again after twice as long."""
END_LINES = 20
"""Of what a failed test has to say; all of it stands in the summary."""


class Progress:
    """A plugin of pytest."""

    def __init__(self) -> None:
        self._running: dict[str, list[float]] = {}  # nodeid -> began, seconds until it is named
        self._over = threading.Event()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = [time.monotonic(), FIRST_S]

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            end = "\n".join(report.longreprtext.splitlines()[-END_LINES:])
            self._terminal.line(f"\n{report.nodeid} failed at its {report.when}:\n{end}")

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._terminal = session.config.get_terminal_writer()
        threading.Thread(target=self._watch, daemon=True).start()

    def pytest_sessionfinish(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(FIRST_S / 10):
            now = time.monotonic()
            for nodeid, times in list(self._running.items()):
                began, after_s = times
                if now - began >= after_s:
                    times[1] = 2 * after_s
                    self._terminal.line(f"\n{nodeid} has run for {now - began:.0f} s")
