"""What metrics systems are told: every name everywhere, and the dashboard asks only for what is exported."""

from __future__ import annotations

import json
import math
import re
import urllib.error
import urllib.request
from dataclasses import fields
from typing import Any

import anyio
import pytest
from guard import GUARD_S

import stream_balancer as sb
from stream_balancer.metrics import METRICS, figures, values
from stream_balancer.testing import make_rollout

prometheus = pytest.importorskip("stream_balancer.metrics.prometheus", reason="the prometheus extra is not installed")
prometheus_parser = pytest.importorskip("prometheus_client.parser")

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])
CONFIG = sb.BalancerConfig(dp_size=2, batch_size=4, window=8, staleness=sb.Staleness(max_versions=2))


async def used_balancer() -> sb.StreamBalancer:
    """One dispatch acknowledged, one in flight, four rollouts waiting."""
    balancer = sb.StreamBalancer(CONFIG)
    balancer.set_version(3)
    for length in range(1, 9):
        await balancer.put(make_rollout(length, version=3))
    batches = balancer.batches()
    await anext(batches)
    for length in range(1, 9):
        await balancer.put(make_rollout(10 * length, version=2))
    await anext(batches)
    return balancer


async def used_statistics() -> sb.Statistics:
    return (await used_balancer()).statistics()


def fetch(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=GUARD_S) as response:
        return str(response.read().decode())


def test_every_figure_of_statistics_is_told() -> None:
    told: dict[str, Any] = {}

    class Spy:
        def __init__(self, of: object, path: str = "") -> None:
            self.of, self.path = of, path

        def __getattr__(self, name: str) -> Any:
            told[self.path + name] = True
            value = getattr(self.of, name)
            return Spy(value, name + ".") if name == "length_bias" else value

    statistics = anyio.run(used_statistics)
    for metric in METRICS:
        list(values(metric, Spy(statistics)))  # type: ignore[arg-type]
    assert {f.name for f in fields(sb.Statistics)} <= set(told)


def test_figures_are_flat_finite_and_named_alike() -> None:
    statistics = anyio.run(used_statistics)
    said = figures(statistics, prefix="b/")
    assert said["b/waiting_rollouts"] == 8.0
    assert said["b/accepted_rollouts"] == 16.0
    assert said["b/batches/window"] == 2.0
    assert said["b/policy_version"] == 3.0
    assert said["b/waiting_length_tokens/max"] == statistics.waiting_lengths[-1]
    assert all(type(value) is float and math.isfinite(value) for value in said.values())
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert all(re.fullmatch(r"[a-z_]+", metric.name) for metric in METRICS)
    with sb.blocking(CONFIG) as balancer:
        empty = figures(balancer.statistics())
    assert "stream_balancer/policy_version" not in empty
    assert empty["stream_balancer/waiting_rollouts"] == 0.0


@BACKENDS
def test_a_scrape_tells_what_statistics_tell(backend: str) -> None:
    async def main() -> tuple[str, sb.Statistics]:
        balancer = await used_balancer()
        async with balancer, prometheus.exporter(balancer, port=0) as port:
            text = await anyio.to_thread.run_sync(fetch, port)
            statistics = balancer.statistics()
        with pytest.raises(urllib.error.URLError):
            await anyio.to_thread.run_sync(fetch, port)
        return text, statistics

    text, statistics = anyio.run(main, backend=backend)
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in prometheus_parser.text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples[("stream_balancer_waiting_rollouts",)] == statistics.waiting == 8
    assert samples[("stream_balancer_accepted_rollouts_total",)] == 16
    assert samples[("stream_balancer_batches_total", "window")] == 2
    assert samples[("stream_balancer_waiting_length_tokens", "max")] == statistics.waiting_lengths[-1]
    counters = {"stream_balancer_" + metric.name + "_total" for metric in METRICS if metric.kind == "counter"}
    assert counters <= {name for name, *_ in samples}


def test_the_dashboard_asks_only_for_what_is_exported() -> None:
    exported = {f"stream_balancer_{metric.name}" + ("_total" if metric.kind == "counter" else "") for metric in METRICS}
    labels = {metric.label for metric in METRICS if metric.label}
    dashboard = json.loads(prometheus.dashboard_json())
    panels = dashboard["panels"]
    asked: set[str] = set()
    for panel in panels:
        for target in panel["targets"]:
            names = set(re.findall(r"stream_balancer_\w+", target["expr"]))
            assert names, f"{panel['title']} asks for nothing"
            asked |= names
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels | {"instance"}
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            asked |= set(re.findall(r"stream_balancer_\w+", variable["query"]))
    assert asked <= exported
    assert len({panel["id"] for panel in panels}) == len(panels) >= 10
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
