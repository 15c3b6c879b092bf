"""``stream-balancer replay``: three policies over a trace, side by side."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import typer

from stream_balancer.cli._options import Simulated, deadline_text, put_waited

if TYPE_CHECKING:
    from stream_balancer.config import BalancerConfig, Policy
    from stream_balancer.tools.simulation_report import Segment, SimulationReport
    from stream_balancer.tools.trace import Trace

Reports: TypeAlias = dict["Policy", "SimulationReport"]

_NAMES: dict[Policy, str] = {"round_robin": "round-robin", "fifo": "arrival order", "window": "window"}


@dataclass(frozen=True, kw_only=True)
class Replay(Simulated):
    """Gain of the window for your lengths: three policies side by side, under a simulated clock.

    round-robin: arrival order, to the ranks in turn. arrival order: the same rollouts, partitioned as well as
    they can be. window: the balanced choice from the waiting rollouts.
    """

    KNOBS: ClassVar = (*Simulated.KNOBS, "window", "deadline_s", "max_skips", "capacity")

    warm_up: int | None = None
    """Steps to leave out of the figures. (default: 3 x max skips, at most a quarter)"""

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

    arrivals = f"{how['slots']} slots at {how['tokens_per_second']:g} tokens/s"
    if trace.arrival_s is not None:
        arrivals = "recorded arrivals"
    # of the same stretch for all three, or a warm-up would be compared with a steady state
    steady = all(report.is_steady for report in reports.values())
    parts = {policy: report.figures if steady else report.overall for policy, report in reports.items()}
    lines = _LINES | (_IN_TIME if how["trainer"] != "instant" else {}) | _WAITS | (_LEFT_OUT if steady else {})
    stdout().print(
        f"[bold]{trace.name}[/bold]: {len(trace):,} rollouts, {trace.num_tokens:,} tokens; length p50 "
        f"{statistics.median(trace.lengths):,.0f}, longest {trace.lengths.max():,}; {arrivals}; trainer "
        f"{how['trainer']}\n"
        f"{config.dp_size} ranks, {config.batch_size} rollouts a step, window {config.window}, max_skips "
        f"{config.max_skips}, deadline {deadline_text(config.deadline_s)}, cost {cost}",
        table(["", *_NAMES.values()], _rows(lines, reports, parts), bold=["idle fraction"]),
        *_verdict(reports, parts, steady=steady),
        sep="\n",
    )


_LINES = {
    "idle fraction": "{part.idle_fraction:.2%}",
    "  a better assignment might save": "{part.avoidable_idle:.2%}",
    "  no assignment can save": "{part.unavoidable_idle:.2%}",
    "tokens of a step, std / mean": "{part.token_variation:.2f}",
    "trainer time, round-robin = 1": "{time:.3f}",
}
_IN_TIME = {
    "idle, the wait for rollouts included": "{run.whole_idle_fraction:.2%}",
    "end to end, s": "{run.elapsed_s:,.0f}",
    "generation idle: put waited": "{put}",
}
_WAITS = {
    "wait p50 / p99 / max, s": "{run.delay_s.p50:,.0f} / {run.delay_s.p99:,.0f} / {run.delay_s.max:,.0f}",
    "passed over, mean / p99 / max": "{run.delay_steps.mean:.2f} / {run.delay_steps.p99:.0f} / {run.max_skips_seen}",
    "staleness mean / max, steps": "{run.staleness.mean:.2f} / {run.staleness.max:.0f}",
    "length-wait correlation": "{run.length_bias.length_delay_correlation:.2f}",
    "mean length, came / went": "{run.arrived_lengths.mean:,.0f} / {run.dispatched_lengths.mean:,.0f}",
    "padding copies, evicted": "{run.padding_copies}, {run.evicted}",
    "steps": "{reasons}",
}
_LEFT_OUT = {"  left out: warm-up, tail": "{run.shown_steps.start}, {tail}"}


def _rows(lines: Mapping[str, str], reports: Reports, parts: Mapping[Policy, Segment]) -> Iterator[list[str]]:
    """Rows of the table: what each line says of a run, and of the stretch of it that is compared."""
    usual = reports["round_robin"].overall.work_s or 1.0
    found = [
        {
            "run": run,
            "part": parts[policy],
            "time": run.overall.work_s / usual,
            "put": put_waited(run),
            "reasons": ", ".join(f"{n} {why}" for why, n in run.reasons.items()),
            "tail": run.overall.batches - run.shown_steps.stop,
        }
        for policy, run in reports.items()
    ]
    for name, line in lines.items():
        # no number where every rollout waited alike
        yield [name, *(line.format_map(one).replace("nan", "-") for one in found)]


GOOD_ENOUGH = 0.02  # idle fraction of arrival order with a good partition below which a window has little left to win
WORTH = 0.02  # idle fraction a window must save to be worth its wait


def _verdict(reports: Reports, parts: Mapping[Policy, Segment], *, steady: bool) -> Iterator[str]:
    """The conclusion, in a sentence or two."""
    if not steady:
        yield (
            "Too short a run for a steady state: the figures are of all steps, tail included. "
            "Try --rollouts 10000, or a smaller batch."
        )
    idle = {policy: part.idle_fraction for policy, part in parts.items()}
    arrival = f"Arrival order with a good partition idles {idle['fifo']:.1%}, the window {idle['window']:.1%}"
    # either there is hardly anything to win, or the window wins hardly anything
    if idle["fifo"] <= GOOD_ENOUGH or idle["fifo"] - idle["window"] < WORTH:
        yield f"{arrival}: a window buys little here. Use policy='fifo', or other knobs."
    else:
        waits = reports["window"].staleness.mean - reports["fifo"].staleness.mean
        yield f"{arrival} (round-robin {idle['round_robin']:.1%}), for {waits:.2f} more steps of mean staleness."
