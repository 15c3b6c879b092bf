"""Tests against real trainers' packages.

A test file here begins with ``pytest.importorskip("the_package")``: `make test` skips it where the package is absent.
`make test-integrations` installs the packages and sets STREAM_BALANCER_REQUIRE_PEERS=1; then a skip is a failure, so
that a package which does not import cannot pass for a package whose tests pass. Single files of other projects
(bench/peers-files.txt) may be out of reach: only then is a skip one.

Warnings of the trainers' own code are not ours to mend, and are ignored here; those of stream_balancer remain errors.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

UNREACHABLE = "neither here nor can they be fetched"
"""Of pinned files, on a machine that reaches package registries only: their tests are skipped there, by name."""
PEERS_REQUIRED = os.environ.get("STREAM_BALANCER_REQUIRE_PEERS") == "1"
HERE = Path(__file__).parent

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
    unreachable = UNREACHABLE in str(report.longrepr)
    if PEERS_REQUIRED and report.skipped and not hasattr(report, "wasxfail") and not unreachable:
        report.outcome = "failed"
        report.longrepr = f"skipped, but STREAM_BALANCER_REQUIRE_PEERS=1 demands it: {report.longrepr}"
    return report


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
