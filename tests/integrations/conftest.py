"""Tests against real trainers' packages.

A test file here begins with ``pytest.importorskip("the_package")``: `make test` skips it where the package is absent.
`make test-integrations` installs the packages and sets STREAM_BALANCER_REQUIRE_PEERS=1; then a skip is a failure, so
that a package which does not import cannot pass for a package whose tests pass. Single files of other projects
(bench/peers-files.txt) may be out of reach. Their tests are counted in the last line, which is not green then; in CI
they fail, but for projects that not_reached.txt lists.

Warnings of the trainers' own code are not ours to mend, and are ignored here; those of stream_balancer remain errors.
"""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

UNREACHABLE = re.compile(r"pinned files of (\S+) are neither here nor can they be fetched")
"""On a machine that reaches package registries only: their tests are skipped there, by name."""
NOT_RUN = "not run for want of pinned files"
PEERS_REQUIRED = os.environ.get("STREAM_BALANCER_REQUIRE_PEERS") == "1"
HERE = Path(__file__).parent
LIST = HERE / "not_reached.txt"

# Set before any trainer is imported: none of these tests may look for a model hub or report usage.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Imports at the top of a test file: quiet, and demanded where peers are required."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", module="stream_balancer")
        report = yield
    return _demanded(report)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _demanded((yield))


def _demanded(report: pytest.CollectReport | pytest.TestReport) -> pytest.CollectReport | pytest.TestReport:
    if not PEERS_REQUIRED or not report.skipped or hasattr(report, "wasxfail"):
        return report
    if "no length traces at" in str(report.longrepr):
        return report  # recorded lengths belong to nobody's package
    out_of_reach = UNREACHABLE.search(str(report.longrepr))
    if out_of_reach and (not os.environ.get("CI") or out_of_reach[1] in not_reached()):
        return report
    report.outcome = "failed"
    demands = f"CI demands it, and {LIST.name} does not list it" if out_of_reach else "STREAM_BALANCER_REQUIRE_PEERS=1"
    report.longrepr = f"skipped, but {demands}: {report.longrepr}"
    return report


def not_reached() -> dict[str, str]:
    """Projects whose files CI may not reach: when their tests were last run by hand, and on which commit."""
    lines = (line.partition(" ") for line in LIST.read_text().splitlines() if line and line[0] != "#")
    return {project: rest for project, _, rest in lines}


def pytest_report_teststatus(report: pytest.CollectReport | pytest.TestReport) -> tuple[str, str, str] | None:
    if report.skipped and UNREACHABLE.search(str(report.longrepr)):
        return NOT_RUN, "u", NOT_RUN.upper()
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.stats.get(NOT_RUN, [])
    of = Counter(found[1] for report in reports if (found := UNREACHABLE.search(str(report.longrepr))))
    for project, count in sorted(of.items()):
        terminalreporter.write_line(f"{NOT_RUN}: {count} of {project}; by hand: {not_reached().get(project, 'never')}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("error:::stream_balancer"), append=False)
            item.add_marker(pytest.mark.filterwarnings("ignore"), append=False)


@pytest.fixture(scope="session")
def nodes() -> Iterator[Any]:
    """The Ray cluster of all tests of a process."""
    from ray_cluster import cluster

    with cluster() as started:
        yield started
