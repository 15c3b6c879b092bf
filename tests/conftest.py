"""What every test gets: both event loops under virtual time, a real-time guard, and the traces where they are
present."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from stream_balancer.testing.clocks import BACKENDS, virtual_time_backend

SOAK_TIMEOUT_S = 3000  # real seconds, for the long drills
DEFAULT_TIMEOUT_S = 60  # real seconds: a hang under virtual time is a bug, and must not hang the run

settings.register_profile("project", deadline=None)  # no test here is timed
settings.load_profile("project")

_TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"


def pytest_configure(config: pytest.Config) -> None:
    config.option.anyio_mode = "auto"  # every async test is an anyio test, without a marker of its own


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timeout") is None:
            soak = item.get_closest_marker("soak") is not None
            item.add_marker(pytest.mark.timeout(SOAK_TIMEOUT_S if soak else DEFAULT_TIMEOUT_S))


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
    tune = importlib.import_module("stream_balancer.tune")  # sb.tune is the function
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "LEAST_BATCHES", 50)
        patch.setattr(tune, "PARTITION_TOLERANCE", 0.05)
        yield
