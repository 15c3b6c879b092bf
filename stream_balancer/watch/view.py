"""A picture as text on a terminal. Pure: pictures in, something that rich can print out."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from stream_balancer.watch.status import Status

__all__ = ["picture"]

_MOST_RANKS = 16
"""Ranks shown; of more, the idlest and the busiest."""
_BAR = 24


def picture(status: Status, before: Status | None = None) -> RenderableType:
    """One moment; rates are since ``before``, an earlier picture of the same balancer."""
    parts = [_headline(status), _window(status), Text(_batches(status)), _ranks(status), _totals(status, before)]
    return Group(*parts, *(Text(f"! {warning}", style="bold yellow") for warning in status.warnings))


def _headline(status: Status) -> Text:
    knobs = status.config
    parts = [
        f"{status.name or 'stream_balancer'} (pid {status.pid})   {knobs['dp_size']} ranks",
        f"batch {knobs['batch_size']}" if knobs["batch_tokens"] is None else f"batch {knobs['batch_tokens']:,} tokens",
        f"window {knobs['window']}" if knobs["window_tokens"] is None else f"window {knobs['window_tokens']:,} tokens",
        "no deadline" if knobs["deadline_s"] is None else f"deadline {knobs['deadline_s']:g} s",
        f"policy {knobs['policy']}" if knobs["policy"] != "window" else "",
        "draining" if status.ended else "",
    ]
    return Text(", ".join(filter(None, parts)), style="bold")


def _window(status: Status) -> RenderableType:
    waiting, tokens = status.statistics["waiting"], status.config["window_tokens"]
    full = waiting / status.config["window"] if tokens is None else status.statistics["waiting_tokens"] / tokens
    oldest = _s(status.statistics["oldest_wait_s"])
    table = _table("tokens", "waiting", "<", "oldest")
    most = max((rollouts for _, rollouts, _ in status.lengths), default=1)
    for least, rollouts, oldest_s in status.lengths:
        lengths = f"{least:,} - {2 * least - 1:,}" if least > 1 else "1"
        table.add_row(lengths, f"{rollouts:,}", "█" * max(1, round(_BAR * rollouts / most)), _s(oldest_s))
    title = f"{waiting:,} waiting ({100.0 * full:.0f} % of the window), oldest {oldest}"
    return Panel(table if status.lengths else Text("nothing waits"), title=title, title_align="left")


def _batches(status: Status) -> str:
    text = "next batch: "
    if following := status.next_batch:
        text = (
            f"next batch, if it left now: {following['rollouts']:,} rollouts, {following['tokens']:,} tokens, "
            f"imbalance {following['imbalance']:.2%} ({following['unavoidable_imbalance']:.2%} unavoidable); "
        )
    text += status.waits_for
    one_batch = "step {step} ({reason}, {rollouts:,} rollouts, imbalance {imbalance:.2%})"
    shown = [one_batch.format(**batch) for batch in status.in_flight[:3]]
    more = f", and {len(status.in_flight) - 3} more" if len(status.in_flight) > 3 else ""
    return text + ("\nin flight: " + ", ".join(shown) + more if shown else "")


def _ranks(status: Status) -> Table:
    table = _table("rank", "<state", "queue", "last step", "busy", "<idle for")
    busy_s, idle_s = status.statistics["rank_busy_seconds"], status.statistics["rank_idle_seconds"]
    by_busy = sorted(range(len(status.ranks)), key=lambda rank: busy_s[rank])
    half = _MOST_RANKS // 2
    for rank in sorted(by_busy if len(by_busy) <= _MOST_RANKS else by_busy[:half] + by_busy[-half:]):
        row, causes = status.ranks[rank], sorted(idle_s[rank].items(), key=lambda item: -item[1])[:3]
        total_s = busy_s[rank] + sum(idle_s[rank].values())
        table.add_row(
            str(rank),
            row.state,
            "" if row.queue is None else str(row.queue),
            "" if row.last_step_s is None else _s(row.last_step_s),
            f"{busy_s[rank] / total_s:.1%}" if total_s else "",
            ", ".join(f"{cause} {seconds / total_s:.1%}" for cause, seconds in causes if seconds),
        )
    if len(by_busy) > _MOST_RANKS:
        table.add_row("", f"of {len(by_busy)} ranks, those least and most busy")
    return table


def _totals(status: Status, before: Status | None) -> Table:
    now, table = status.statistics, Table(box=None, pad_edge=False, show_header=False)
    evicted = _counts(now["evicted"])
    rollouts = f"{now['accepted']:,} accepted, {now['acknowledged']:,} trained on"
    table.add_row("rollouts", rollouts + (f", evicted: {evicted}" if evicted else ""))
    table.add_row("batches", _counts(now["batches"]) or "none yet")
    names = ("idle_fraction", "unavoidable_idle_fraction", "measured_idle_fraction")
    idle = ["?" if now[name] is None else f"{now[name]:.1%}" for name in names]
    table.add_row("idle", f"{idle[0]} predicted ({idle[1]} unavoidable), {idle[2]} measured")
    if (variation := now["token_variation"]) is not None:
        mean = now["dispatched_tokens"] / sum(now["batches"].values())
        table.add_row("tokens a step", f"{mean:,.0f}, standard deviation {variation:.0%} of that")
    if before is not None and (seconds := status.time_s - before.time_s) > 0:
        names = ("accepted", "acknowledged", "dispatched_tokens")
        put, trained, tokens = ((now[name] - before.statistics[name]) / seconds for name in names)
        rates = f"{put:,.1f} rollouts put, {trained:,.1f} trained on, {tokens:,.0f} tokens dispatched"
        table.add_row("per second", rates)
    return table


def _table(*headings: str) -> Table:
    """Columns are flush right, unless "<" says otherwise."""
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading.lstrip("<"), justify="left" if heading.startswith("<") else "right")
    return table


def _counts(by_reason: dict[str, Any]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in by_reason.items() if count)


def _s(seconds: float) -> str:
    """Seconds as people read them."""
    if seconds >= 60:
        return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
