"""A browser for all tests of a run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chromium import Browser, chromium, missing


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if reason := missing():
        pytest.skip(reason)
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened
