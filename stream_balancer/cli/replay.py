"""``stream-balancer replay``: three policies over a trace, side by side."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import typer

from stream_balancer.cli._options import (
    Simulated,
    batch_text,
    deadline_text,
    progress,
    stdout,
    window_text,
)

if TYPE_CHECKING:
    from rich.table import Table

    from stream_balancer.config import BalancerConfig, Policy
    from stream_balancer.tools.simulation_report import Segment, SimulationReport
    from stream_balancer.tools.trace import Trace

__all__ = ["Replay"]


@dataclass(frozen=True, kw_only=True)
class Replay(Simulated):
    """What the window would do for your lengths: three policies side by side, under a simulated clock.

    round-robin: arrival order, to the ranks in turn. arrival order: the same rollouts, partitioned as well as
    they can be. window: the balanced choice from the waiting rollouts.
    """

    window: int | None = None
    """(default: 2 x batch size)"""
    window_tokens: int | None = None
    deadline_s: float | None = None
    """(default: wait for the window)"""
    max_skips: str | None = None
    """'none' = no bound. (default: 16)"""
    capacity: int | None = None
    """(default: 2 x window)"""
    warm_up: int | None = None
    """Dispatches to leave out of the figures. (default: 3 x max skips, at most a quarter)"""

    def run(self) -> None:
        from stream_balancer.tools.simulate import as_policy

        lengths = self.lengths()
        config = self.config()
        policies: tuple[Policy, ...] = ("round_robin", "fifo", "window")
        runs = {policy: as_policy(config, policy) for policy in policies}
        how = self.simulation() | {"warm_up": self.warm_up}
        reports = _simulate_all(lengths, runs, how)
        if self.json:
            typer.echo(json.dumps(_as_json(lengths, config, self.cost, how, reports)))
        else:
            _print_replay(lengths, config, self.cost, how, reports)


Reports: TypeAlias = dict["Policy", "SimulationReport"]


def _simulate_all(trace: Trace, runs: dict[Policy, BalancerConfig], how: dict[str, Any]) -> Reports:
    """Each policy in turn, with a progress display on a terminal."""
    from stream_balancer.tools.simulate import simulate

    reports: Reports = {}
    with progress() as shown:
        bars = {policy: shown.add_task(_NAMES[policy], total=len(trace), start=False) for policy in runs}
        for policy, config in runs.items():
            bar = bars[policy]
            shown.start_task(bar)

            def show(done: int, bar: Any = bar) -> None:
                shown.update(bar, completed=done)

            reports[policy] = simulate(trace, config, progress=show, **how)
    return reports


_NAMES: dict[Policy, str] = {"round_robin": "round-robin", "fifo": "arrival order", "window": "window"}


def _as_json(trace: Trace, config: BalancerConfig, cost: str, how: dict[str, Any], reports: Reports) -> dict[str, Any]:
    knobs = {f.name: getattr(config, f.name) for f in fields(config) if f.name in Replay.__dataclass_fields__}
    return {
        "trace": {
            "name": trace.name,
            "rollouts": len(trace),
            "groups": trace.num_groups,
            "tokens": trace.num_tokens,
            "longest": int(trace.lengths.max()),
            "arrivals_recorded": trace.arrival_s is not None,
        },
        "knobs": knobs | {"cost": cost},
        "simulation": how,
        "policies": {policy: report.to_dict() for policy, report in reports.items()},
    }


def _print_replay(trace: Trace, config: BalancerConfig, cost: str, how: dict[str, Any], reports: Reports) -> None:
    lengths = sorted(trace.lengths.tolist())
    arrivals = (
        "recorded arrivals"
        if trace.arrival_s is not None
        else f"{how['slots']} slots at {how['tokens_per_second']:g} tokens/s"
    )
    stdout().print(
        f"[bold]{trace.name}[/bold]: {len(trace):,} rollouts, {trace.num_tokens:,} tokens; length p50 "
        f"{lengths[len(lengths) // 2]:,}, longest {lengths[-1]:,}; {arrivals}; trainer {how['trainer']}"
    )
    stdout().print(
        f"{config.dp_size} ranks, {batch_text(config)} a dispatch, window {window_text(config)}, max_skips "
        f"{config.max_skips}, deadline {deadline_text(config.deadline_s)}, cost {cost}"
    )
    nothing_shared = float(np.asarray(config.cost(trace.lengths)).sum()) / config.dp_size
    stdout().print(_table(reports, nothing_shared, instant=how["trainer"] == "instant"))
    for line in _verdict(reports):
        stdout().print(line)


def _table(reports: Reports, nothing_shared: float, *, instant: bool) -> Table:
    """``nothing_shared``: work of a rank if all are alike, and every rollout pays its own prefix."""
    from rich.table import Table

    table = Table()
    table.add_column("")
    for policy in reports:
        table.add_column(_NAMES[policy], justify="right")

    def row(name: str, show: Callable[[SimulationReport], str], *, bold: bool = False) -> None:
        table.add_row(name, *(show(report) for report in reports.values()), style="bold" if bold else None)

    usual = reports["round_robin"].overall.work_s
    steady = _all_steady(reports)
    row("idle fraction", lambda r: f"{_segment(r, steady).idle_fraction:.2%}", bold=True)
    row("  a better assignment might save", lambda r: f"{_segment(r, steady).avoidable_idle:.2%}")
    row("  no assignment can save", lambda r: f"{_segment(r, steady).unavoidable_idle:.2%}")
    if steady:
        row("  with warm-up and tail", lambda r: f"{r.overall.idle_fraction:.2%}")
    if reports["window"].config.batch_size_range is not None:
        row("rollouts of a step, least / mean / most", _rollouts_of_a_step)
    row("tokens of a step, std / mean", lambda r: f"{_segment(r, steady).token_variation:.2f}")
    row("trainer time, round-robin = 1", lambda r: f"{r.overall.work_s / usual if usual else 1.0:.3f}")
    if reports["window"].config.share_prefixes:
        row("trainer time, nothing shared and no idle = 1", lambda r: f"{r.overall.work_s / nothing_shared:.3f}")
    if not instant:
        row("idle, the wait for rollouts included", lambda r: f"{r.whole_idle_fraction:.2%}")
        row("end to end, s", lambda r: f"{r.elapsed_s:,.0f}")
        row("trainer busy", lambda r: f"{r.trainer_busy:.1%}")
        row("put waited, mean s", lambda r: f"{r.blocked_s:,.1f}")
    row("wait p50 / p99 / max, s", lambda r: f"{r.delay_s.p50:,.0f} / {r.delay_s.p99:,.0f} / {r.delay_s.max:,.0f}")
    row(
        "passed over, mean / p99 / max",
        lambda r: f"{r.delay_dispatches.mean:.2f} / {r.delay_dispatches.p99:.0f} / {r.max_skips_seen}",
    )
    row("staleness mean / max, steps", lambda r: f"{r.staleness.mean:.2f} / {r.staleness.max:.0f}")
    row("length-wait correlation", lambda r: _or_dash(r.length_bias.length_delay_correlation))
    row("spread of batch means, i.i.d. = 1", lambda r: _or_dash(r.length_bias.batch_mean_spread))
    row("mean length, came / went", lambda r: f"{r.arrived_lengths.mean:,.0f} / {r.dispatched_lengths.mean:,.0f}")
    for stratum in reports["window"].strata:
        row(f"{stratum}: share / steps without", partial(_of_stratum, stratum))
    row("dispatches", lambda r: ", ".join(f"{n} {why}" for why, n in r.reasons.items()))
    if steady:
        row("  left out: warm-up, tail", lambda r: f"{r.warm_up.batches}, {r.tail.batches}")
    if any(r.padding_copies for r in reports.values()):
        row("padding copies", lambda r: f"{r.padding_copies}")
    if any(r.evicted for r in reports.values()):
        row("evicted", lambda r: f"{r.evicted}")
    return table


def _rollouts_of_a_step(report: SimulationReport) -> str:
    rollouts = report.steps.rollouts[report.shown_steps]
    return f"{rollouts.min()} / {rollouts.mean():.1f} / {rollouts.max()}"


def _of_stratum(stratum: str, report: SimulationReport) -> str:
    of_it = report.strata[stratum]
    return f"{of_it.share:.1%} / {of_it.steps_without:.0%}"


def _or_dash(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


GOOD_ENOUGH = 0.02  # idle fraction of arrival order with a good partition below which a window has little left to win
AT_BOUND = 0.002  # unavoidable idle fraction of arrival order up to which a window has nothing to win
WORTH = 0.02  # idle fraction a window must save to be worth its wait


def _verdict(reports: Reports) -> Iterator[str]:
    """The conclusion, in a sentence or two."""
    window, fifo = reports["window"], reports["fifo"]
    steady = _all_steady(reports)
    if not steady:
        yield (
            "Too short a run for a steady state: the figures are of all dispatches, tail included. "
            "Try --rollouts 10000, or a smaller batch."
        )
    idle = {policy: _segment(report, steady).idle_fraction for policy, report in reports.items()}
    arrival = f"Arrival order with a good partition idles {idle['fifo']:.1%}, the window {idle['window']:.1%}"
    if idle["fifo"] <= GOOD_ENOUGH or idle["fifo"] - idle["window"] < WORTH:
        at_bound = _segment(fifo, steady).unavoidable_idle <= AT_BOUND
        earns = "a window buys little here"
        if at_bound:
            earns = "first in, first out is already at its bound, a window earns nothing here"
        yield f"{arrival}: {earns}. Use policy='fifo', or other knobs."
        return
    waits = window.staleness.mean - fifo.staleness.mean
    yield f"{arrival} (round-robin {idle['round_robin']:.1%}), for {waits:.2f} more steps of mean staleness."


def _all_steady(reports: Reports) -> bool:
    return all(report.is_steady for report in reports.values())


def _segment(report: SimulationReport, steady: bool) -> Segment:
    """The same kind of segment for every policy, or they could not be compared."""
    return report.steady if steady else report.overall
