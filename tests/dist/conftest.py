"""Real processes, sockets and threads: real time on both loops."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Virtual time does not know what a socket or a thread is busy with."""
    return str(request.param)
