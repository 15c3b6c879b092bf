"""Sockets, threads and processes where a test has no event loop; virtual time where it has one."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from ends import Network


@pytest.fixture
def network() -> Iterator[Network]:
    """Real connections between two ends in this process; closed afterwards."""
    with Network() as network:
        yield network


@pytest.fixture(autouse=True, scope="session")
def _server_that_forks() -> None:
    if (forked := sys.modules.get("forked")) is not None:  # some test here starts processes
        forked.start_server()
