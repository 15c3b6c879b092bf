"""What metrics systems are told, and ``stream-balancer status``: its page, and the command over a real port."""

from __future__ import annotations

import json
import math
import os
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, NamedTuple

import anyio
import pytest
from guard import GUARD_S
from helpers import until
from rich.console import Console
from typer.testing import CliRunner, Result

import stream_balancer as sb
from stream_balancer.cli import app
from stream_balancer.cli.status import page, parse
from stream_balancer.metrics import METRICS, RANK_METRICS, figures, values
from stream_balancer.testing import MemoryNetwork, make_rollout

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


generate_latest = pytest.importorskip("prometheus_client").generate_latest

SHOWN = sb.BalancerConfig(dp_size=2, batch_size=4, window=8, deadline_s=60.0)
BUSY = """
stream_balancer_waiting_rollouts 6.0
stream_balancer_waiting_tokens 1200.0
stream_balancer_waiting_length_tokens{quantile="min"} 1.0
stream_balancer_waiting_length_tokens{quantile="max"} 900.0
stream_balancer_window_rollouts 8.0
stream_balancer_oldest_wait_seconds 90.0
stream_balancer_accepted_rollouts_total 3005.0
stream_balancer_batches_total{reason="window"} 12.0
stream_balancer_batches_total{reason="deadline"} 0.0
stream_balancer_evicted_rollouts_total{reason="stale"} 3.0
stream_balancer_idle_fraction 0.05
stream_balancer_idle_seconds_total{cause="window"} 60.0
stream_balancer_idle_seconds_total{cause="transport"} 20.0
stream_balancer_idle_seconds_total{cause="no_data"} 0.0
stream_balancer_producer_idle_seconds_total{cause="put"} 45.0
stream_balancer_producer_idle_seconds_total{cause="reserve"} 0.0
stream_balancer_rank_busy_seconds_total{rank="0"} 60.0
stream_balancer_rank_busy_seconds_total{rank="1"} 60.0
stream_balancer_rank_idle_seconds_total{rank="0"} 40.0
stream_balancer_rank_idle_seconds_total{rank="1"} 40.0
stream_balancer_rank_connected{rank="0"} 1.0
stream_balancer_rank_connected{rank="1"} 0.0
stream_balancer_rank_queue_steps{rank="0"} 2.0
stream_balancer_policy_version 7.0
stream_balancer_training_age_versions{statistic="mean"} 1.25
stream_balancer_training_age_versions{statistic="p99"} 2.0
stream_balancer_training_age_versions{statistic="max"} 3.0
stream_balancer_straggler_rank 1.0
stream_balancer_straggler_slowdown 1.4
stream_balancer_straggler_since_seconds 7200.0
stream_balancer_blocked_puts 2.0
"""


def text_of(now: str, before: str | None = None, *, seconds: float = 10.0) -> str:
    with open(os.devnull, "w") as nowhere:
        console = Console(width=120, record=True, file=nowhere)
        console.print(page(parse(now, seconds), None if before is None else parse(before), "run 7"))
        return console.export_text()


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["status", *map(str, arguments)])


def test_the_page_says_it_all() -> None:
    text = text_of(BUSY, BUSY.replace("3005.0", "3000.0").replace('"put"} 45.0', '"put"} 13.0'))
    for part in (
        "run 7",
        "6 wait (window 8), 1,200 tokens, the oldest for 90.0 s",
        "min 1, max 900",
        "3,005 accepted, ? in flight",
        "stale 3",
        "window 12",
        "5.0% predicted (? unavoidable), ? measured",
        "window 60, transport 20",
        "policy version   7",
        "mean 1.25, p99 2, max 3",
        "0.5 rollouts put",
        "producers idle   put 45",
        "0.0 ranks without rollouts, 3.2 rollouts without room or slot",
        "60.0%",
        "! rank 1 takes 1.40 times as long as the median rank, since 7,200 s",
        "! not connected: ranks 1",
        "! 2 puts wait for room",
        "! 3 stale rollouts were evicted",
    ):
        assert part in text, f"{part!r} is not in\n{text}"
    assert "deadline" not in text
    assert "no_data" not in text


def test_what_is_exported_is_read_back_whatever_the_state() -> None:
    with sb.blocking(SHOWN) as balancer:
        registry = prometheus.CollectorRegistry()
        registry.register(prometheus.StatisticsCollector(balancer.statistics, balancer.rank_states))
        empty = generate_latest(registry).decode()
        assert "0 wait (window 8)" in text_of(empty)
        balancer.put(make_rollout(3, version=0))
        figures = parse(generate_latest(registry).decode())
    names = {metric.name for metric in (*METRICS, *RANK_METRICS)} | {"time"}
    assert figures.keys() <= names
    assert figures["waiting_rollouts"] == {"": 1.0}
    assert {metric.name for metric in METRICS if metric.kind == "counter" and not metric.label} <= figures.keys()
    asked = {sample.split("{")[0].split()[0] for sample in BUSY.split("\n") if sample}
    assert {name.removeprefix("stream_balancer_").removesuffix("_total") for name in asked} <= names


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_ranks_are_told_while_serve_runs(backend: str) -> None:
    async def main() -> str:
        transport = MemoryNetwork(dp_size=2)
        async with (
            sb.StreamBalancer(SHOWN) as balancer,
            anyio.create_task_group() as tasks,
            prometheus.exporter(balancer, port=0) as port,
        ):
            tasks.start_soon(sb.serve, balancer, transport)
            feed = sb.RankFeed(transport.connect(0, depth=1))
            await until(lambda: any(state.connected for state in balancer.rank_states()))
            result = await anyio.to_thread.run_sync(run, port, "--once")
            tasks.cancel_scope.cancel()
        feed.close()
        assert result.exit_code == 0, result.output
        return result.stdout

    text = anyio.run(main, backend=backend)
    assert "! not connected: ranks 1" in text


class Exported(NamedTuple):
    port: int
    stop: Callable[[], None]


@pytest.fixture
def exported() -> Iterator[Exported]:
    """A balancer in a thread of its own, scraped until stopped."""
    ready, done = threading.Event(), threading.Event()
    ports: list[int] = []

    async def main() -> None:
        async with sb.StreamBalancer(SHOWN) as balancer, prometheus.exporter(balancer, port=0) as port:
            await balancer.put(make_rollout(3))
            ports.append(port)
            ready.set()
            await anyio.to_thread.run_sync(done.wait)

    thread = threading.Thread(target=anyio.run, args=[main], daemon=True)
    thread.start()
    assert ready.wait(GUARD_S)

    def stop() -> None:
        done.set()
        thread.join(GUARD_S)

    yield Exported(ports[0], stop)
    stop()


def test_the_command_reads_a_port_or_a_url(exported: Exported) -> None:
    for source in (exported.port, f"http://127.0.0.1:{exported.port}/metrics"):
        result = run(source, "--once")
        assert result.exit_code == 0, result.output
        assert "1 wait (window 8)" in result.stdout
    found = json.loads(run(exported.port, "--once", "--json").stdout)
    assert (found["waiting_rollouts"], found["batches"]["window"]) == (1.0, 0.0)


def test_the_page_is_made_anew_until_the_balancer_is_gone(exported: Exported) -> None:
    results: list[Result] = []
    command = threading.Thread(target=lambda: results.append(run(exported.port, "--every", 0.1)), daemon=True)
    command.start()
    command.join(0.5)
    exported.stop()
    command.join(GUARD_S)
    assert results[0].exit_code == 0, results[0].output
    assert "rollouts put" in results[0].stdout
    assert "the balancer is gone" in results[0].stdout


@pytest.mark.parametrize("source", ["1", "http://127.0.0.1:1/metrics", "file:///dev/null", "nowhere"])
def test_mistakes_are_one_line(source: str) -> None:
    result = run(source, "--once")
    assert result.exit_code == 2
    assert "gives no figures of a balancer" in result.stderr
    assert result.stderr.count("\n") == 1
