"""Real processes, sockets and threads: real time on both loops."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Virtual time does not know what a socket or a thread is busy with."""
    return str(request.param)


@pytest.fixture(autouse=True, scope="session")
def _server_that_forks() -> None:
    if (forked := sys.modules.get("forked")) is not None:  # some test here starts processes
        forked.start_server()


@pytest.hookimpl(tryfirst=True)  # before pytest looks at -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Processes take long, and are the same on both loops; contracts are held on each, clause by clause."""
    for item in items:
        if item.get_closest_marker("processes") and item.callspec.params.get("anyio_backend") == "trio":  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.soak)
