"""``stream-balancer replay``: three policies over a trace, side by side."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
import typer

from stream_balancer.cli._options import Simulated, batch_text, deadline_text, put_waited

if TYPE_CHECKING:
    from stream_balancer.config import BalancerConfig, Policy
    from stream_balancer.tools.simulation_report import Segment, SimulationReport
    from stream_balancer.tools.trace import Trace

Reports: TypeAlias = dict["Policy", "SimulationReport"]
Show: TypeAlias = Callable[["SimulationReport", "Segment"], str]

_NAMES: dict[Policy, str] = {"round_robin": "round-robin", "fifo": "arrival order", "window": "window"}


@dataclass(frozen=True, kw_only=True)
class Replay(Simulated):
    """Gain of the window for your lengths: three policies side by side, under a simulated clock.

    round-robin: arrival order, to the ranks in turn. arrival order: the same rollouts, partitioned as well as
    they can be. window: the balanced choice from the waiting rollouts.
    """

    KNOBS: ClassVar = (*Simulated.KNOBS, "window", "step_size.window_tokens", "deadline_s", "max_skips", "capacity")

    warm_up: int | None = None
    """Steps to leave out of the figures. (default: 3 x max skips, at most a quarter)"""
    certify: bool = False
    """Prove how little any schedule of these arrivals could idle."""

    def run(self) -> None:
        # imported here: `--help` must not wait for torch
        from stream_balancer.tools.shown import Bars
        from stream_balancer.tools.simulate import as_policy, check_certifiable, simulate

        # refused here, before a bar is shown
        lengths, config = self.lengths(), self.balancer()
        runs = {policy: as_policy(config, policy) for policy in _NAMES}
        if self.certify:
            check_certifiable(config)
        how = self.simulation() | {"warm_up": self.warm_up}
        reports: Reports = {}
        with Bars() as bars:
            added = {policy: bars.add_task(name, total=len(lengths), start=False) for policy, name in _NAMES.items()}
            for policy, bar in added.items():
                bars.start_task(bar)
                show = partial(bars.show, bar, total=len(lengths))
                certify = self.certify and policy == config.policy
                reports[policy] = simulate(lengths, runs[policy], certify=certify, progress=show, **how)
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
    in_tokens = config.step_size.window_tokens
    window = f"{config.window}" if in_tokens is None else f"{in_tokens:,} tokens"
    # of the same stretch for all three, or a warm-up would be compared with a steady state
    steady = all(report.is_steady for report in reports.values())
    parts = {policy: report.figures if steady else report.overall for policy, report in reports.items()}
    rows = _rows(reports, how)
    if steady:
        rows["  left out: warm-up, tail"] = lambda r, _: (
            f"{r.shown_steps.start}, {r.overall.batches - r.shown_steps.stop}"
        )
    stdout().print(
        f"[bold]{trace.name}[/bold]: {len(trace):,} rollouts, {trace.num_tokens:,} tokens; length p50 "
        f"{np.median(trace.lengths):,.0f}, longest {trace.lengths.max():,}; {arrivals}; trainer {how['trainer']}\n"
        f"{config.dp_size} ranks, {batch_text(config)} a step, window {window}, max_skips "
        f"{config.max_skips}, deadline {deadline_text(config.deadline_s)}, cost {cost}",
        table(
            ["", *_NAMES.values()],
            ([name, *map(show, reports.values(), parts.values())] for name, show in rows.items()),
            bold=["idle fraction"],
        ),
        *_verdict(reports, parts, steady=steady),
        *_proven(reports[config.policy]),
        sep="\n",
    )


def _rows(reports: Reports, how: dict[str, Any]) -> dict[str, Show]:
    """Rows of the table, by name: what each says of a run, and of the stretch of it that is compared."""
    usual = reports["round_robin"].overall.work_s or 1.0
    rows: dict[str, Show] = {
        "idle fraction": lambda _, part: f"{part.idle_fraction:.2%}",
        "  a better assignment might save": lambda _, part: f"{part.avoidable_idle:.2%}",
        "  no assignment can save": lambda _, part: f"{part.unavoidable_idle:.2%}",
        "tokens of a step, std / mean": lambda _, part: f"{part.token_variation:.2f}",
        "trainer time, round-robin = 1": lambda r, _: f"{r.overall.work_s / usual:.3f}",
    }
    if how["trainer"] != "instant":
        rows |= {
            "idle, the wait for rollouts included": lambda r, _: f"{r.whole_idle_fraction:.2%}",
            "end to end, s": lambda r, _: f"{r.elapsed_s:,.0f}",
            "generation idle: put waited": lambda r, _: put_waited(r),
        }
    rows |= {
        "wait p50 / p99 / max, s": lambda r, _: " / ".join(
            f"{s:,.0f}" for s in (r.delay_s.p50, r.delay_s.p99, r.delay_s.max)
        ),
        "passed over, mean / p99 / max": lambda r, _: (
            f"{r.delay_steps.mean:.2f} / {r.delay_steps.p99:.0f} / {r.max_skips_seen}"
        ),
        "staleness mean / max, steps": lambda r, _: f"{r.staleness.mean:.2f} / {r.staleness.max:.0f}",
        # no number where every rollout waited alike
        "length-wait correlation": lambda r, _: f"{r.length_bias.length_delay_correlation:.2f}".replace("nan", "-"),
        "mean length, came / went": lambda r, _: f"{r.arrived_lengths.mean:,.0f} / {r.dispatched_lengths.mean:,.0f}",
    }
    for stratum in reports["window"].strata:
        rows[f"{stratum}: share / steps without"] = partial(_of_stratum, stratum)
    rows["padding copies, evicted"] = lambda r, _: f"{r.padding_copies}, {r.evicted}"
    rows["steps"] = lambda r, _: ", ".join(f"{n} {why}" for why, n in r.reasons.items())
    return rows


def _of_stratum(stratum: str, report: SimulationReport, part: Segment) -> str:
    of_it = report.strata[stratum]
    return f"{of_it.share:.1%} / {of_it.steps_without:.0%}"


def _proven(report: SimulationReport) -> Iterator[str]:
    found = report.certificate
    if found is not None:
        # the same work in both, without padding copies and fixed costs
        ours = 1 - found.work / (report.config.dp_size * report.overall.work_s)
        # only where the trainer takes each step at once the window says what there is to choose from
        is_instant = math.isinf(report.work_per_second) and not report.config.auto_windows
        which = "with this window" if is_instant else "to which rollouts come as they did here"
        bound = f"no schedule {which} is below {found.idle:.1%}, which is proven"
        nothing = f"that any schedule {which} has to idle is not proven"
        yield f"Whole run, drain included: idle {ours:.1%}; {bound if found.idle > 0 else nothing}."


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
