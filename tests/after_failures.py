"""The limit of a test holds after a failure, too.

pytest and pytest-timeout stop their clocks at a failure, for whoever looks at it in a debugger. So a fixture, or the
end of a `with`, that waits for what will never come would wait for ever once its test has failed.
"""

from __future__ import annotations

import faulthandler
import os

import pytest


class AfterFailures:
    """A plugin of pytest: what a failed test leaves to end may take faulthandler_timeout more; then it is shown where
    it waits, and its worker ends."""

    def __init__(self) -> None:
        self._stderr = os.dup(2)  # while tests run, 2 is a file that nobody would read

    @pytest.hookimpl(trylast=True)  # after those that stop the clock
    def pytest_exception_interact(self, node: pytest.Item | pytest.Collector) -> None:
        limit_s = float(node.config.getini("faulthandler_timeout"))
        if limit_s and isinstance(node, pytest.Item) and not node.config.getvalue("usepdb"):
            # stopped as every test's is: by pytest, once it is through with the test
            faulthandler.dump_traceback_later(limit_s, exit=True, file=self._stderr)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(AfterFailures())
