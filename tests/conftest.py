"""What every test gets: both event loops under virtual time, a real-time guard, and the traces where they are
present."""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from stream_balancer.testing.clocks import BACKENDS, virtual_time_backend

# No test here is timed. `make test-all` takes the thorough profile, `make soak` the long one. A failure prints how to
# have it again.
settings.register_profile("quick", max_examples=25, deadline=None, print_blob=True)
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=100)
settings.register_profile("long", settings.get_profile("quick"), max_examples=2000)
settings.load_profile("quick")

_TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # under nohup or '&', and tests of Ctrl-C would wait for ever
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.option.anyio_mode = "auto"  # every async test is an anyio test, without a marker of its own
    config.pluginmanager.register(_Failures(config))


class _Failures:
    """A failed test is shown when it has failed: a run that is stopped has no summary. And its limit still holds: at a
    failure pytest and pytest-timeout stop their clocks, and a fixture that waits then would wait for ever."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._stderr = os.dup(2)  # while tests run, 2 is a file that nobody would read

    @pytest.hookimpl(trylast=True)  # after those that stop the clock
    def pytest_exception_interact(self, node: pytest.Item | pytest.Collector) -> None:
        limit_s = float(node.config.getini("faulthandler_timeout"))
        if limit_s and isinstance(node, pytest.Item) and not node.config.getvalue("usepdb"):
            # stopped as every test's is: by pytest, once it is through with the test
            faulthandler.dump_traceback_later(limit_s, exit=True, file=self._stderr)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self._config.getoption("numprocesses", None):  # this process collects others' reports
            end = "\n".join(report.longreprtext.splitlines()[-20:])
            self._config.get_terminal_writer().line(f"\n{report.nodeid} failed at its {report.when}:\n{end}")


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Every async test runs on asyncio and on trio, in virtual time."""
    return virtual_time_backend(request.param)


@pytest.fixture(scope="session")
def traces_dir() -> Path:
    """Folder of the real length traces; skips the test where it is absent (STREAM_BALANCER_TRACES names another
    place)."""
    folder = Path(os.environ.get("STREAM_BALANCER_TRACES") or _TRACES)
    if not folder.is_dir():
        pytest.skip(f"no length traces at {folder} (set STREAM_BALANCER_TRACES to their folder)")
    return folder


@pytest.fixture(scope="module")
def short_sweeps() -> Iterator[None]:
    """`tune` simulates fewer batches a setting, and hardly balances them."""
    tune = importlib.import_module("stream_balancer.tools.tune")  # sb.tune is the function
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "LEAST_BATCHES", 50)
        patch.setattr(tune, "PARTITION_TOLERANCE", 0.05)
        yield
