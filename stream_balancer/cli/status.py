"""``stream-balancer status``: a running balancer on one page, from the Prometheus text that its exporter serves.

Every figure has the name it has in ``metrics.METRICS``; nothing is computed here but rates and fractions.
"""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from stream_balancer.cli._options import fail

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

__all__ = ["page", "parse", "read", "status"]

Figures: TypeAlias = dict[str, dict[str, float]]
"""Name, without prefix and suffix -> the label's value ("" where there is no label) -> number. ``time`` is when."""

_SAMPLE = re.compile(r'^stream_balancer_(\w+?)(?:_total)?(?:\{\w+="(.*)"\})? (\S+)$', re.MULTILINE)
_TIMEOUT_S = 10.0
_MOST_RANKS = 16  # of more, the idlest and the busiest


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
    readings = _readings(url, None if once else every)
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


def _readings(url: str, every: float | None) -> Iterator[Figures]:
    """One now, and one ``every`` so many seconds until nobody answers. Raises OSError if the first is not answered."""
    began = False
    while every is not None or not began:
        if began:
            time.sleep(every or 0.0)
        try:
            yield read(url)
        except OSError:
            if began:
                return
            raise
        began = True


def _show(readings: Iterator[Figures], url: str) -> None:
    """Each page in the place of the one before."""
    from rich.live import Live

    before: Figures | None = None
    with Live(auto_refresh=False) as live:
        for figures in readings:
            live.update(page(figures, before, url), refresh=True)
            before = figures
    if not live.console.is_terminal:
        typer.echo()  # rich ends the line on a terminal only


def page(now: Figures, before: Figures | None = None, title: str = "") -> RenderableType:
    """One moment; rates are since ``before``, an earlier reading of the same balancer."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    for name, said in _lines(now, before):
        table.add_row(name, said)
    warnings = [Text(f"! {warning}", style="bold yellow") for warning in _warnings(now)]
    return Group(Text(title, style="bold"), table, _ranks(now), *warnings)


def _lines(now: Figures, before: Figures | None) -> Iterator[tuple[str, str]]:
    waiting, of_window = _one(now, "waiting_rollouts"), _one(now, "waiting_rollouts") / _one(now, "window_rollouts", 1)
    said = f"{waiting:,.0f} rollouts ({of_window:.0%} of the window), {_one(now, 'waiting_tokens'):,.0f} tokens"
    if waiting:
        said += f", the oldest for {_seconds(_one(now, 'oldest_wait_seconds'))}"
    yield "waiting", said
    lengths = now.get("waiting_length_tokens", {})
    yield "their lengths", ", ".join(f"{which} {length:,.0f}" for which, length in lengths.items()) or "-"
    counts = {what: _one(now, f"{what}_rollouts") for what in ("accepted", "in_flight", "acknowledged")}
    counts |= {f"evicted ({why})": count for why, count in now.get("evicted_rollouts", {}).items()}
    yield "rollouts", _counts(counts) or "none yet"
    yield "batches", _counts(now.get("dispatches", {})) or "none yet"
    idle = [now.get(f"{kind}idle_fraction", {}).get("") for kind in ("", "unavoidable_", "measured_")]
    predicted, unavoidable, measured = ("?" if part is None else f"{part:.1%}" for part in idle)
    yield "idle", f"{predicted} predicted ({unavoidable} unavoidable), {measured} measured"
    causes = now.get("idle_seconds", {})
    if total_s := sum(causes.values()) + sum(now.get("rank_busy_seconds", {}).values()):
        largest = sorted(causes.items(), key=lambda one: -one[1])
        yield "idle because of", ", ".join(f"{name} {s / total_s:.1%}" for name, s in largest if s) or "nothing"
    if "policy_version" in now:
        age = now.get("training_age_versions", {})
        behind = "; trained on were rollouts {mean:.2f} versions behind (p99 {p99:.0f}, max {max:.0f})"
        yield "staleness", f"policy version {_one(now, 'policy_version'):.0f}" + (behind.format(**age) if age else "")
    if before is not None and (seconds := _one(now, "time") - _one(before, "time")) > 0:
        names = ("accepted_rollouts", "acknowledged_rollouts", "dispatched_tokens")
        put, trained, tokens = ((_one(now, name) - _one(before, name)) / seconds for name in names)
        yield "per second", f"{put:,.1f} rollouts put, {trained:,.1f} trained on, {tokens:,.0f} tokens dispatched"


def _ranks(now: Figures) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("rank", "state", "queue", "busy", "speed"):
        table.add_column(heading, justify="left" if heading == "state" else "right")
    names = ("rank_connected", "rank_queue_steps", "rank_busy_seconds", "rank_idle_seconds", "rank_speed")
    connected, queue, busy_s, idle_s, speed = (now.get(name, {}) for name in names)
    ranks = sorted(connected.keys() | busy_s.keys(), key=lambda rank: busy_s.get(rank, 0.0))
    half = _MOST_RANKS // 2
    shown = ranks if len(ranks) <= _MOST_RANKS else ranks[:half] + ranks[-half:]
    for rank in sorted(shown, key=int):
        total_s = busy_s.get(rank, 0.0) + idle_s.get(rank, 0.0)
        table.add_row(
            rank,
            {0.0: "not connected", 1.0: "connected"}.get(connected.get(rank, -1.0), ""),
            f"{queue[rank]:.0f}" if rank in queue else "",
            f"{busy_s[rank] / total_s:.1%}" if total_s else "",
            f"{speed[rank]:.2f}" if rank in speed else "",
        )
    if len(ranks) > len(shown):
        table.add_row("", f"of {len(ranks)} ranks, those least and most busy")
    return table


def _warnings(now: Figures) -> Iterator[str]:
    if "straggler_rank" in now:
        rank, slowdown, since_s = (_one(now, f"straggler_{part}") for part in ("rank", "slowdown", "since_seconds"))
        yield f"rank {rank:.0f} takes {slowdown:.2f} times as long as the median rank, since {_seconds(since_s)}"
    if missing := [rank for rank, connected in now.get("rank_connected", {}).items() if not connected]:
        yield f"{len(missing)} ranks are not connected: {', '.join(missing[:8])}"
    if blocked := _one(now, "blocked_puts"):
        yield f"{blocked:.0f} puts wait for room: training is slower than generation"
    if stale := now.get("evicted_rollouts", {}).get("stale"):
        yield f"{stale:.0f} stale rollouts were evicted; reserve() throttles generation instead"


def _one(figures: Figures, name: str, default: float = 0.0) -> float:
    """The number of a name without a label."""
    return figures.get(name, {}).get("", default)


def _counts(by_kind: dict[str, float]) -> str:
    return ", ".join(f"{count:,.0f} {kind.replace('_', ' ')}" for kind, count in by_kind.items() if count)


def _seconds(seconds: float) -> str:
    if seconds >= 60:
        return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
