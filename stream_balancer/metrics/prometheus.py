"""``statistics()`` for Prometheus: a collector, and an endpoint to scrape.

::

    async with StreamBalancer(config) as balancer, exporter(balancer, port=9400):
        ...                                        # http://127.0.0.1:9400/metrics

A scrape comes in a thread; the figures are read in the event loop, one at a time, so it costs the balancer what a
call of ``statistics()`` costs. Needs the ``prometheus`` extra. The dashboard beside this file
(:func:`dashboard_json`) shows what is exported here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from typing import Any

import anyio
from anyio.from_thread import BlockingPortal
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import stream_balancer as sb
from stream_balancer.metrics import METRICS, RANK_METRICS, values

__all__ = ["StatisticsCollector", "dashboard_json", "exporter"]

PREFIX = "stream_balancer_"


class StatisticsCollector(Collector):
    """For a registry of your own: ``REGISTRY.register(StatisticsCollector(balancer.statistics))``.

    ``read`` is called at every scrape, in the scrape's thread, and ``read_ranks`` too: give ``statistics`` and
    ``rank_states`` of a ``sb.blocking`` balancer, which may be called from any thread; for one in an event loop there
    is :func:`exporter`.
    """

    def __init__(
        self, read: Callable[[], sb.Statistics], read_ranks: Callable[[], Sequence[Any]] | None = None
    ) -> None:
        self._read, self._read_ranks = read, read_ranks

    def collect(self) -> Iterator[Metric]:
        """Families, one per name, with the numbers of this moment."""
        yield from _families(METRICS, self._read())
        yield from _families(RANK_METRICS, self._read_ranks() if self._read_ranks else ())

    def describe(self) -> Iterator[Metric]:
        """Nothing: so that registering it reads no statistics."""
        # prometheus_client would call collect() for names that it can check for doubles
        return iter(())


def _families(table: Sequence[Any], source: Any) -> Iterator[Metric]:
    for metric in table:
        family_of = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        labels = [] if metric.label is None else [metric.label]
        family = family_of(PREFIX + metric.name, metric.help, labels=labels)
        for label, value in values(metric, source):
            family.add_metric([] if label is None else [label], value)
        yield family


@asynccontextmanager
async def exporter(balancer: sb.StreamBalancer, *, port: int, host: str = "127.0.0.1") -> AsyncIterator[int]:
    """Serve ``http://host:port/metrics`` while the block runs; yields the port (0 = any that is free).

    Listens on loopback unless `host` says otherwise: the endpoint asks for no password. Raises OSError if the port is
    taken.
    """
    portal = BlockingPortal()
    await portal.__aenter__()
    try:
        registry = CollectorRegistry()
        # in the loop: statistics() reads its clock, and no put may come in between
        calls = [partial(portal.call, read) for read in (balancer.statistics, balancer.rank_states)]
        registry.register(StatisticsCollector(*calls))
        server, thread = start_http_server(port, addr=host, registry=registry)

        def close() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        try:
            yield server.server_port
        finally:
            with anyio.CancelScope(shield=True):  # in a thread: a scrape under way still needs the loop
                await anyio.to_thread.run_sync(close)
    finally:
        await portal.__aexit__(None, None, None)  # not by `async with`, which wraps the block's errors in a group


def dashboard_json() -> str:
    """A Grafana dashboard of what is exported here: import it under Dashboards > New > Import."""
    return files("stream_balancer.metrics").joinpath("grafana.json").read_text(encoding="utf-8")
