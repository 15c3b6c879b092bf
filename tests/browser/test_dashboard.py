"""The Grafana dashboard's queries, put to a real Prometheus that scrapes a balancer: all are understood and answered.
That they name only metrics that exist is asserted without one, in tests/unit/test_metrics.py."""

from __future__ import annotations

import shutil
import sys
import time
import urllib.error
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_every_query_of_the_dashboard_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="the docs extra is not installed")
    if not shutil.which("prometheus"):
        pytest.skip("Prometheus is not installed (Debian: apt-get install prometheus)")
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2] / "docs" / "_site")])
    import dashboard
    from live import training

    from stream_balancer.metrics.prometheus import exporter

    async def answer(url: str, query: str, legend: str) -> list[Any]:
        """As soon as there is one: once it was scraped, and a rank is known to be slow."""
        with anyio.fail_after(240):
            while True:
                with suppress(urllib.error.URLError):  # Prometheus starts
                    ask = partial(dashboard.series, url, query, legend, since_s, time.time())
                    if lines := await anyio.to_thread.run_sync(ask):  # in a thread: scrapes come to this event loop
                        return lines
                await anyio.sleep(0.2)

    since_s = time.time()
    async with training(step_s=0.2, slow_after_steps=5) as balancer, exporter(balancer, port=0) as port:
        with dashboard.prometheus(tmp_path, port, "500ms") as url:
            for panel in dashboard.panels("5s"):
                for query, legend in panel.queries:
                    try:
                        names = [line.name for line in await answer(url, query, legend)]
                    except TimeoutError:
                        pytest.fail(f"{panel.title}: nothing answers {query}")
                    assert all(names), f"{panel.title}: a line without a name"
                    assert len(set(names)) == len(names), f"{panel.title}: two lines of one name"
            with pytest.raises(ValueError, match="parse error"):
                await answer(url, "rate(", "")
