"""``stream-balancer status``: a running balancer on one page, from the Prometheus text that its exporter serves.

Every figure has the name it has in ``metrics.METRICS``; nothing is computed here but rates and fractions.
"""

from __future__ import annotations

import json
import math
import re
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from stream_balancer.cli._options import fail

if TYPE_CHECKING:
    from rich.console import RenderableType

Figures: TypeAlias = dict[str, dict[str, float]]
"""Name, without prefix and suffix -> the label's value ("" where there is no label) -> number. ``time`` is when."""

# prometheus_client, which has a parser, is an extra; three parts of a line are all that is needed here
_SAMPLE = re.compile(r'^stream_balancer_(\w+?)(?:_total)?(?:\{\w+="(.*)"\})? (\S+)$', re.MULTILINE)
_TIMEOUT_S = 10.0
_MOST_RANKS = 16  # of more, the busiest: they decide how long a step takes
_LINES = {
    "waiting": "{waiting_rollouts:,.0f} wait (window {window_rollouts:,.0f}), {waiting_tokens:,.0f} tokens, the oldest "
    "for {oldest_wait_seconds:,.1f} s",
    "rollouts": "{accepted_rollouts:,.0f} accepted, {in_flight_rollouts:,.0f} in flight, "
    "{acknowledged_rollouts:,.0f} acknowledged",
    "idle": "{idle_fraction:.1%} predicted ({unavoidable_idle_fraction:.1%} unavoidable), "
    "{measured_idle_fraction:.1%} measured",
    "policy version": "{policy_version:.0f}",
}
_COUNTS = {  # figures with a label
    "waiting lengths": "waiting_length_tokens",
    "evicted": "evicted_rollouts",
    "batches": "batches",
    "idle seconds": "idle_seconds",
    "producers idle": "producer_idle_seconds",
    "versions behind": "training_age_versions",
}
_NEED = {"idle_seconds": ("no_data",), "producer_idle_seconds": ("put", "reserve")}
"""Causes that more machines on the other side end."""


def status(
    source: Annotated[str, typer.Argument(help="The exporter's port on this machine, or its URL.")] = "9400",
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two readings.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one page and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one reading a line.")] = False,
) -> None:
    """Look at a running balancer: what waits, ranks, rates, idle time, staleness, warnings.

    Reads what `async with exporter(balancer, port=9400)` (stream_balancer.metrics.prometheus) serves; see
    docs/observing.md.
    """
    url = f"http://127.0.0.1:{source}/metrics" if source.isdecimal() else source
    readings = _readings(url, math.inf if once else every)
    try:
        if as_json:
            for figures in readings:
                typer.echo(json.dumps({name: numbers.get("", numbers) for name, numbers in figures.items()}))
        else:
            _show(readings, url)
    except (OSError, ValueError) as error:
        fail(
            f"{url} gives no figures of a balancer ({getattr(error, 'reason', error)}): run `async with "
            "exporter(balancer, port=9400)` in its process (stream_balancer.metrics.prometheus)"
        )
    except KeyboardInterrupt:
        raise typer.Exit from None
    if not (once or as_json):
        typer.echo("the balancer is gone")


def parse(text: str, now: float = 0.0) -> Figures:
    """The figures in Prometheus text. Raises ValueError where there are none of a balancer."""
    figures: Figures = {}
    for name, label, value in _SAMPLE.findall(text):
        figures.setdefault(name, {})[label] = float(value)
    if not figures:
        raise ValueError("the text has none")
    return figures | {"time": {"": now}}


def read(url: str) -> Figures:
    """The figures of this moment. Raises OSError if nobody answers, ValueError for another text."""
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
        return parse(answer.read().decode(), time.time())


def _readings(url: str, every: float) -> Iterator[Figures]:
    """A reading now, and another ``every`` so many seconds until nobody answers. Raises OSError if the first is not
    answered."""
    yield read(url)
    while every < math.inf:
        time.sleep(every)
        try:
            yield read(url)
        # gone, not failed: a run that ends takes its exporter with it
        except OSError:
            return


def _show(readings: Iterator[Figures], url: str) -> None:
    """Pages, every new one in the place of the one before."""
    from rich.live import Live

    before: Figures | None = None
    with Live(auto_refresh=False) as live:
        for figures in readings:
            live.update(page(figures, before, url), refresh=True)
            before = figures
    if not live.console.is_terminal:
        typer.echo()  # rich ends the line on a terminal only


def page(now: Figures, before: Figures | None = None, title: str = "") -> RenderableType:
    """A page of one moment; rates are since ``before``, an earlier reading of the same balancer."""
    # imported here: `--help` must not wait for rich
    from rich.console import Group
    from rich.text import Text

    from stream_balancer.tools.shown import table

    lines = table(["", ""], _lines(now, before), left=2, box=None, pad_edge=False, show_header=False)
    headings = ["rank", "state", "queue", "busy", "speed"]
    ranks = table(headings, _ranks(now), left=2, box=None, pad_edge=False)
    warnings = [Text(f"! {warning}", style="bold yellow") for warning in _warnings(now)]
    return Group(Text(title, style="bold"), lines, ranks, *warnings)


def _lines(now: Figures, before: Figures | None) -> Iterator[tuple[str, str]]:
    ones = _ones(now)
    for name, line in _LINES.items():
        # of a run without versions, or before the first step, there are figures that nobody knows
        yield name, line.format_map(ones).replace("nan%", "?").replace("nan", "?")
    for name, figure in _COUNTS.items():
        counts = (f"{label} {_number(count)}" for label, count in now.get(figure, {}).items() if count)
        yield name, ", ".join(counts) or "none"
    then = ones if before is None else _ones(before)
    if before is not None and (seconds := ones["time"] - then["time"]) > 0:
        names = ("accepted_rollouts", "acknowledged_rollouts", "dispatched_tokens")
        put, trained, tokens = ((ones[name] - then[name]) / seconds for name in names)
        yield "per second", f"{put:,.1f} rollouts put, {trained:,.1f} trained on, {tokens:,.0f} tokens dispatched"
        # seconds a second are how many idle at a time: the pair that says which side lacks machines
        ranks, rollouts = ((_waited(now, name) - _waited(before, name)) / seconds for name in _NEED)
        yield "idle at a time", f"{ranks:,.1f} ranks without rollouts, {rollouts:,.1f} rollouts without room or slot"


def _waited(figures: Figures, name: str) -> float:
    return sum(seconds for cause, seconds in figures.get(name, {}).items() if cause in _NEED[name])


def _ranks(now: Figures) -> Iterator[tuple[str, ...]]:
    names = ("rank_connected", "rank_queue_steps", "rank_busy_seconds", "rank_idle_seconds", "rank_speed")
    connected, queue, busy_s, idle_s, speed = (now.get(name, {}) for name in names)
    ranks = sorted(connected.keys() | busy_s.keys(), key=lambda rank: busy_s.get(rank, 0.0))
    # in the order of their numbers, so that a page looks like the one before
    for rank in sorted(ranks[-_MOST_RANKS:], key=int):
        total_s = busy_s.get(rank, 0.0) + idle_s.get(rank, 0.0)
        yield (
            rank,
            {0.0: "not connected", 1.0: "connected"}.get(connected.get(rank, -1.0), ""),
            f"{queue[rank]:.0f}" if rank in queue else "",
            f"{busy_s[rank] / total_s:.1%}" if total_s else "",
            f"{speed[rank]:.2f}" if rank in speed else "",
        )
    if len(ranks) > _MOST_RANKS:
        yield "", f"the busiest of {len(ranks)} ranks"


def _warnings(now: Figures) -> Iterator[str]:
    ones = _ones(now)
    if "straggler_rank" in now:
        slow = "rank {straggler_rank:.0f} takes {straggler_slowdown:.2f} times as long as the median rank, since "
        yield (slow + "{straggler_since_seconds:,.0f} s").format_map(ones)
    if missing := [rank for rank, connected in now.get("rank_connected", {}).items() if not connected]:
        yield f"not connected: ranks {', '.join(missing[:8])}" + (", ..." if len(missing) > 8 else "")
    if ones["blocked_puts"] > 0:
        yield "{blocked_puts:.0f} puts wait for room: training is slower than generation".format_map(ones)
    if stale := now.get("evicted_rollouts", {}).get("stale"):
        yield f"{stale:.0f} stale rollouts were evicted; reserve() throttles generation instead"


def _ones(figures: Figures) -> defaultdict[str, float]:
    """The numbers without a label; NaN for those that are not told."""
    # 0 would look like a figure
    return defaultdict(lambda: math.nan, {name: numbers.get("", math.nan) for name, numbers in figures.items()})


def _number(value: float) -> str:
    return f"{value:,.2f}".removesuffix(".00")
