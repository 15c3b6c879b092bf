"""What the Grafana dashboard shows: its own queries, answered by a Prometheus that scrapes a balancer."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt

from stream_balancer.metrics.prometheus import dashboard_json

__all__ = ["Panel", "Series", "draw", "panels", "prometheus", "series"]

VARIABLES = {"$job": ".*", "$instance": ".*"}
COLOURS = ["#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#8ab8ff", "#fade2a", "#96d98d", "#ffa6b0"]
COLOURS += ["#ffffff", "#806eb7"]
PAPER, PANEL, INK, GRID = "#111217", "#181b1f", "#ccccdc", "#2c3235"


class Panel(NamedTuple):
    """One picture of the dashboard."""

    title: str
    unit: str
    column: int
    row: int
    queries: list[tuple[str, str]]
    """(PromQL, legend) each."""


class Series(NamedTuple):
    """One line of a panel."""

    name: str
    times_s: list[float]
    values: list[float]


def panels(rate_over: str) -> list[Panel]:
    """The dashboard's, with Grafana's variables filled in; rates are over that long, "15s" say."""

    def filled(query: str) -> str:
        for name, value in (VARIABLES | {"$__rate_interval": rate_over}).items():
            query = query.replace(name, value)
        return query

    return [
        Panel(
            one["title"],
            one["fieldConfig"]["defaults"]["unit"],
            one["gridPos"]["x"] // one["gridPos"]["w"],
            one["gridPos"]["y"] // one["gridPos"]["h"],
            [(filled(target["expr"]), target["legendFormat"]) for target in one["targets"]],
        )
        for one in json.loads(dashboard_json())["panels"]
    ]


@contextmanager
def prometheus(folder: Path, target_port: int, every: str) -> Iterator[str]:
    """A Prometheus on loopback that scrapes that port every "1s", say; yields its address. Raises FileNotFoundError
    where none is installed."""
    if not shutil.which("prometheus"):
        raise FileNotFoundError("Prometheus is not installed (Debian: apt-get install prometheus)")
    scrape = {"job_name": "training", "scrape_interval": every, "scrape_timeout": every}
    scrape["static_configs"] = [{"targets": [f"127.0.0.1:{target_port}"]}]  # type: ignore[assignment]
    (folder / "prometheus.yml").write_text(json.dumps({"scrape_configs": [scrape]}))  # JSON is YAML
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command = ["setpriv", "--pdeathsig", "KILL", *command, f"--web.listen-address={address}", "--log.level=error"]
    with subprocess.Popen(command) as process:
        try:
            yield f"http://{address}"
        finally:
            process.kill()


def series(url: str, query: str, legend: str, since_s: float, until_s: float, step_s: float = 1.0) -> list[Series]:
    """What Prometheus answers. Raises ValueError for what it does not understand, URLError while it is not up."""
    asked = {"query": query, "start": since_s, "end": until_s, "step": step_s}
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query_range?{urllib.parse.urlencode(asked)}", timeout=60) as reply:
            found = json.load(reply)["data"]["result"]
    except urllib.error.HTTPError as error:
        if error.code == 503:  # it is still starting
            raise urllib.error.URLError("not ready") from None
        raise ValueError(f"{query}: {json.load(error)['error']}") from None
    return [
        Series(
            re.sub(r"{{(\w+)}}", lambda match: one["metric"].get(match[1], ""), legend),  # noqa: B023 - used at once
            [float(time_s) for time_s, _ in one["values"]],
            [float(value) for _, value in one["values"]],
        )
        for one in found
    ]


def draw(answered: list[tuple[Panel, list[Series]]], since_s: float) -> plt.Figure:
    """The panels where the dashboard has them, in the colours of Grafana's dark theme."""
    rows = 1 + max(panel.row for panel, _ in answered)
    style = {"text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.facecolor": PANEL}
    with plt.rc_context({**style, "figure.facecolor": PAPER, "axes.edgecolor": GRID, "font.size": 8}):
        figure, axes = plt.subplots(rows, 2, figsize=(8.6, 2.1 * rows), squeeze=False, layout="constrained")
        for panel, lines in answered:
            axis = axes[panel.row][panel.column]
            share = 100.0 if panel.unit == "percentunit" else 1.0
            for line, colour in zip(lines, COLOURS, strict=False):
                times, values = [t - since_s for t in line.times_s], [share * v for v in line.values]
                axis.plot(times, values, color=colour, linewidth=1, label=line.name)
            unit = {"percentunit": ", %", "s": ", s", "ops": ", per second"}.get(panel.unit, "")
            axis.set_title(panel.title + unit, loc="left", fontsize=9)
            axis.set_ylim(0, max(1.0, 1.1 * axis.get_ylim()[1]))
            axis.grid(color=GRID, linewidth=0.5)
            axis.locator_params(nbins=5)
            columns = 2 if max(len(line.name) for line in lines) > 20 else 4
            axis.legend(
                frameon=False, fontsize=7.5, ncols=columns, loc="upper left", bbox_to_anchor=(0, -0.08), labelcolor=INK
            )
    return figure
