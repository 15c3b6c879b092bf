"""Each promise of the contract over each way to reach a controller: a network in memory, in virtual time; sockets, and
shared memory, in real time, with the I/O thread that ships."""

from __future__ import annotations

from typing import Any

import pytest
from networks import KINDS

from stream_balancer.testing import BACKENDS, virtual_time_backend


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest, kind: str) -> tuple[str, dict[str, Any]]:
    return virtual_time_backend(request.param) if kind == "memory" else (request.param, {})
