"""``stream-balancer replay``: three policies over a trace, side by side."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
import typer

from stream_balancer.cli._options import Simulated, batch_text, deadline_text, window_text

if TYPE_CHECKING:
    from stream_balancer.config import BalancerConfig, Policy
    from stream_balancer.tools.simulation_report import Segment, SimulationReport
    from stream_balancer.tools.trace import Trace

__all__ = ["Replay"]

Reports: TypeAlias = dict["Policy", "SimulationReport"]

_NAMES: dict[Policy, str] = {"round_robin": "round-robin", "fifo": "arrival order", "window": "window"}


@dataclass(frozen=True, kw_only=True)
class Replay(Simulated):
    """Gain of the window for your lengths: three policies side by side, under a simulated clock.

    round-robin: arrival order, to the ranks in turn. arrival order: the same rollouts, partitioned as well as
    they can be. window: the balanced choice from the waiting rollouts.
    """

    KNOBS: ClassVar = (*Simulated.KNOBS, "window", "step_size.window_tokens", "deadline_s", "max_skips", "capacity")

    warm_up: int | None = None
    """Dispatches to leave out of the figures. (default: 3 x max skips, at most a quarter)"""

    def run(self) -> None:
        # imported here: `--help` must not wait for torch
        from stream_balancer.tools.shown import Bars
        from stream_balancer.tools.simulate import as_policy, simulate

        # refused here, before a bar is shown
        lengths, config = self.lengths(), self.balancer()
        runs = {policy: as_policy(config, policy) for policy in _NAMES}
        how = self.simulation() | {"warm_up": self.warm_up}
        reports: Reports = {}
        with Bars() as bars:
            added = {policy: bars.add_task(name, total=len(lengths), start=False) for policy, name in _NAMES.items()}
            for policy, bar in added.items():
                bars.start_task(bar)
                show = partial(bars.show, bar, total=len(lengths))
                reports[policy] = simulate(lengths, runs[policy], progress=show, **how)
        if self.json:
            knobs = {path: attrgetter(path)(config) for path in self.KNOBS} | {"cost": self.cost}
            policies = {policy: report.to_dict() for policy, report in reports.items()}
            said = {"trace": _about(lengths), "knobs": knobs, "simulation": how, "policies": policies}
            typer.echo(json.dumps(said))
        else:
            _print(lengths, config, self.cost, how, reports)


def _about(trace: Trace) -> dict[str, Any]:
    return {
        "name": trace.name,
        "rollouts": len(trace),
        "groups": trace.num_groups,
        "tokens": trace.num_tokens,
        "longest": int(trace.lengths.max()),
        "arrivals_recorded": trace.arrival_s is not None,
    }


def _print(trace: Trace, config: BalancerConfig, cost: str, how: dict[str, Any], reports: Reports) -> None:
    from stream_balancer.tools.shown import stdout, table

    lengths = sorted(trace.lengths.tolist())
    arrivals = f"{how['slots']} slots at {how['tokens_per_second']:g} tokens/s"
    if trace.arrival_s is not None:
        arrivals = "recorded arrivals"
    nothing_shared = float(np.asarray(config.cost(trace.lengths)).sum()) / config.dp_size
    rows = _rows(reports, nothing_shared, instant=how["trainer"] == "instant")
    stdout().print(
        f"[bold]{trace.name}[/bold]: {len(trace):,} rollouts, {trace.num_tokens:,} tokens; length p50 "
        f"{lengths[len(lengths) // 2]:,}, longest {lengths[-1]:,}; {arrivals}; trainer {how['trainer']}\n"
        f"{config.dp_size} ranks, {batch_text(config)} a dispatch, window {window_text(config)}, max_skips "
        f"{config.max_skips}, deadline {deadline_text(config.deadline_s)}, cost {cost}",
        table(
            ["", *_NAMES.values()],
            ([name, *map(show, reports.values())] for name, show in rows),
            bold=["idle fraction"],
        ),
        *_verdict(reports),
        sep="\n",
    )


Row: TypeAlias = tuple[str, Callable[["SimulationReport"], str]]


def _rows(reports: Reports, nothing_shared: float, *, instant: bool) -> Iterator[Row]:
    """``nothing_shared``: work of a rank if all are alike, and every rollout pays its own prefix."""
    usual, config = reports["round_robin"].overall.work_s, reports["window"].config
    # of the same stretch for all three, or a warm-up would be compared with a steady state
    steady = _all_steady(reports)
    yield "idle fraction", lambda r: f"{_segment(r, steady).idle_fraction:.2%}"
    yield "  a better assignment might save", lambda r: f"{_segment(r, steady).avoidable_idle:.2%}"
    yield "  no assignment can save", lambda r: f"{_segment(r, steady).unavoidable_idle:.2%}"
    if steady:
        yield "  with warm-up and tail", lambda r: f"{r.overall.idle_fraction:.2%}"
    if config.step_size.rollouts is not None:
        yield "rollouts of a step, least / mean / most", _rollouts_of_a_step
    yield "tokens of a step, std / mean", lambda r: f"{_segment(r, steady).token_variation:.2f}"
    yield "trainer time, round-robin = 1", lambda r: f"{r.overall.work_s / usual if usual else 1.0:.3f}"
    if config.groups.share_prefixes:
        yield "trainer time, nothing shared and no idle = 1", lambda r: f"{r.overall.work_s / nothing_shared:.3f}"
    if not instant:
        yield "idle, the wait for rollouts included", lambda r: f"{r.whole_idle_fraction:.2%}"
        yield "end to end, s", lambda r: f"{r.elapsed_s:,.0f}"
        yield "trainer busy", lambda r: f"{r.trainer_busy:.1%}"
        yield "put waited, mean s", lambda r: f"{r.blocked_s:,.1f}"
    yield "wait p50 / p99 / max, s", lambda r: f"{r.delay_s.p50:,.0f} / {r.delay_s.p99:,.0f} / {r.delay_s.max:,.0f}"
    yield (
        "passed over, mean / p99 / max",
        lambda r: f"{r.delay_dispatches.mean:.2f} / {r.delay_dispatches.p99:.0f} / {r.max_skips_seen}",
    )
    yield "staleness mean / max, steps", lambda r: f"{r.staleness.mean:.2f} / {r.staleness.max:.0f}"
    yield "length-wait correlation", lambda r: _or_dash(r.length_bias.length_delay_correlation)
    yield "spread of batch means, i.i.d. = 1", lambda r: _or_dash(r.length_bias.batch_mean_spread)
    yield "mean length, came / went", lambda r: f"{r.arrived_lengths.mean:,.0f} / {r.dispatched_lengths.mean:,.0f}"
    for stratum in reports["window"].strata:
        yield f"{stratum}: share / steps without", partial(_of_stratum, stratum)
    yield "dispatches", lambda r: ", ".join(f"{n} {why}" for why, n in r.reasons.items())
    if steady:
        yield "  left out: warm-up, tail", lambda r: f"{r.warm_up.batches}, {r.tail.batches}"
    for name in ("padding_copies", "evicted"):
        if any(getattr(report, name) for report in reports.values()):
            yield name.replace("_", " "), lambda r, name=name: str(getattr(r, name))  # type: ignore[misc]


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
