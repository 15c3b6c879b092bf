"""No test in this folder may block its event loop: a blocking call in asyncio's thread is an error here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from blockbuster import blockbuster_ctx


@pytest.fixture(autouse=True, scope="module")
def _no_blocking_calls() -> Iterator[None]:
    with blockbuster_ctx("stream_balancer"):
        yield
