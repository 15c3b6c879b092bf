"""A picture as text on a terminal. Pure: pictures in, something that rich can print out."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from stream_balancer.watch.status import LengthRow, RankRow, Status

__all__ = ["picture"]

_MOST_RANKS = 16
"""Ranks shown; of more, the idlest and the busiest."""
_BAR = 24


def picture(status: Status, before: Status | None = None) -> RenderableType:
    """One moment; rates are since ``before``, an earlier picture of the same balancer."""
    parts: list[RenderableType] = [_headline(status), _window(status), _next(status)]
    if status.in_flight:
        parts.append(_in_flight(status))
    if status.ranks:
        parts.append(_ranks(status.ranks))
    parts.append(_totals(status, before))
    parts += [Text(f"! {warning}", style="bold yellow") for warning in status.warnings]
    return Group(*parts)


def _headline(status: Status) -> Text:
    name = status.name or "stream_balancer"
    deadline = "no deadline" if status.deadline_s is None else f"deadline {status.deadline_s:g} s"
    said = f"{name} (pid {status.pid})   {status.dp_size} ranks, batch {status.batch_size}, window {status.window}"
    said += f", {deadline}"
    if status.policy != "window":
        said += f", policy {status.policy}"
    return Text(said + (", draining" if status.ended else ""), style="bold")


def _window(status: Status) -> RenderableType:
    table = Table(box=None, pad_edge=False, title=None)
    for heading in ("tokens", "waiting", "", "oldest"):
        table.add_column(heading, justify="left" if heading == "" else "right")
    most = max((row.rollouts for row in status.lengths), default=1)
    for row in status.lengths:
        table.add_row(
            _range(row), f"{row.rollouts:,}", "█" * max(1, round(_BAR * row.rollouts / most)), _s(row.oldest_s)
        )
    full = 100.0 * status.waiting / status.window
    title = f"{status.waiting:,} waiting ({full:.0f} % of the window), oldest {_s(status.oldest_wait_s)}"
    return Panel(table if status.lengths else Text("nothing waits"), title=title, title_align="left")


def _range(row: LengthRow) -> str:
    return f"{row.least:,} - {2 * row.least - 1:,}" if row.least > 1 else "1"


def _next(status: Status) -> Text:
    following = status.next_batch
    if following is None:
        return Text(f"next batch: {status.waits_for}")
    return Text(
        f"next batch, if it left now: {following.rollouts:,} rollouts, {following.tokens:,} tokens, imbalance "
        f"{following.imbalance:.2%} ({following.unavoidable_imbalance:.2%} unavoidable); {status.waits_for}"
    )


def _in_flight(status: Status) -> Text:
    shown = [
        f"step {one.step} ({one.reason}, {one.rollouts:,} rollouts, imbalance {one.imbalance:.2%})"
        for one in status.in_flight[:3]
    ]
    more = len(status.in_flight) - len(shown)
    return Text("in flight: " + ", ".join(shown) + (f", and {more} more" if more else ""))


def _ranks(ranks: Sequence[RankRow]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("rank", "state", "queue", "last step", "busy", "idle for"):
        table.add_column(heading, justify="left" if heading in ("state", "idle for") else "right")
    for row in _most_telling(ranks):
        idle_s = sum(row.idle_s.values())
        total_s = row.busy_s + idle_s
        causes = sorted(row.idle_s.items(), key=lambda item: -item[1])[:3]
        said = ", ".join(f"{cause} {seconds / total_s:.1%}" for cause, seconds in causes if total_s > 0)
        table.add_row(
            str(row.rank),
            row.state,
            "" if row.queue is None else str(row.queue),
            "" if row.last_step_s is None else _s(row.last_step_s),
            f"{row.busy_s / total_s:.1%}" if total_s > 0 else "",
            said,
        )
    if len(ranks) > _MOST_RANKS:
        table.add_row("", f"of {len(ranks)} ranks, those least and most busy", "", "", "", "")
    return table


def _most_telling(ranks: Sequence[RankRow]) -> list[RankRow]:
    if len(ranks) <= _MOST_RANKS:
        return list(ranks)
    by_busy = sorted(ranks, key=lambda row: row.busy_s)
    chosen = by_busy[: _MOST_RANKS // 2] + by_busy[-_MOST_RANKS // 2 :]
    return sorted(chosen, key=lambda row: row.rank)


def _totals(status: Status, before: Status | None) -> RenderableType:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column()
    table.add_row("rollouts", f"{status.accepted:,} accepted, {status.acknowledged:,} trained on" + _evicted(status))
    left = ", ".join(f"{count:,} {reason}" for reason, count in status.batches.items() if count)
    table.add_row("batches", left or "none yet")
    table.add_row(
        "idle",
        f"{_share(status.idle_fraction)} predicted ({_share(status.unavoidable_idle_fraction)} unavoidable), "
        f"{_share(status.measured_idle_fraction)} measured",
    )
    if before is not None and status.time_s > before.time_s:
        seconds = status.time_s - before.time_s
        table.add_row(
            "per second",
            f"{(status.accepted - before.accepted) / seconds:,.1f} rollouts put, "
            f"{(status.acknowledged - before.acknowledged) / seconds:,.1f} trained on, "
            f"{(status.dispatched_tokens - before.dispatched_tokens) / seconds:,.0f} tokens dispatched",
        )
    return table


def _share(fraction: float | None) -> str:
    return "?" if fraction is None else f"{fraction:.1%}"


def _evicted(status: Status) -> str:
    given_up = [f"{count:,} {reason}" for reason, count in status.evicted.items() if count]
    return ", evicted: " + ", ".join(given_up) if given_up else ""


def _s(seconds: float) -> str:
    """Seconds as people read them."""
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 60:
        return f"{seconds / 60:.1f} min"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
