"""Every scheduler of bench/schedulers.py, in a small run; what cannot be fetched is counted as not run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")
sys.path.append(str(Path(__file__).parents[2] / "bench"))
import scheduler_runs
import schedulers
import scoreboard

import stream_balancer as sb

PLANS, MISSING = schedulers.available("")


@pytest.mark.parametrize(
    "scheduler", [one for one in schedulers.SCHEDULERS if not one.groups], ids=lambda one: one.name
)
def test_plans_have_every_rollout_once_and_keep_the_cap(scheduler: schedulers.Scheduler) -> None:
    if "pinned files" in (why := MISSING.get(scheduler, "")):
        pytest.skip(why)
    assert scheduler in PLANS, why
    trace = sb.generate_trace(2_000, "lognormal", seed=3)
    run = scheduler_runs.Run.of(scheduler_runs.Stream("small", trace, schedulers.trace_flops), 32, 4, steps=4)
    for row in scheduler_runs.measure(run, scheduler, PLANS[scheduler], 20.0):  # refuses a plan that is none
        assert row.steps == 4
        assert 0.0 <= row.idle < 100.0
        assert row.over_cap == 0 or scheduler.name.startswith("OpenRLHF")


def test_a_page_has_a_row_of_all_that_was_written() -> None:
    results = Path(__file__).parents[2] / "bench" / "results" / "schedulers.jsonl"
    html = scoreboard.page(results.read_text().splitlines())
    assert html.count("<tr>") == 1 + results.read_text().count('"stream":')
    assert html.index("<td>stream_balancer") < html.index("<td>round-robin")
