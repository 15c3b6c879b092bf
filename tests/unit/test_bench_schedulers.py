"""The benchmark of schedulers: its own arithmetic, ours in it, and how others' files are had."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stream_balancer as sb
from stream_balancer.tools.length_models import LengthModel

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import scheduler_runs
import schedulers
from scheduler_list import SCHEDULERS, Scheduler, Step

FIFO, WINDOW = [one for one in SCHEDULERS if one.name.startswith("stream_balancer")][:2]


@pytest.fixture(autouse=True)
def _short_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_runs, "WARM_UP", 4)


def stream(siblings: int = 1, longest: int = 8_000) -> scheduler_runs.Stream:
    model = LengthModel(mu=6.0, sigma_between=0.3, sigma_within=1.0, cap=longest, siblings=siblings)
    trace = sb.generate_trace(500, model, seed=1)
    return scheduler_runs.Stream("small", trace, schedulers.trace_flops, whole_groups=siblings > 1)


@pytest.mark.parametrize(("policy", "sync"), [("fifo", "step"), ("window", "step"), ("window", "micro_batch")])
def test_steps_are_those_of_a_simulated_run(policy: Any, sync: Any) -> None:
    source = stream(longest=1_000)  # several micro-batches a rank
    run = scheduler_runs.Run.of(source, batch_size=16, ranks=4, steps=8)
    scheduler = FIFO if policy == "fifo" else WINDOW
    record = scheduler_runs.planned(run, scheduler, scheduler.load(), sync, 10.0)
    times = [scheduler_runs.finish(layout, run.costs_of(run.lengths[at]), sync) for at, layout in record.layouts]
    config = sb.BalancerConfig(
        dp_size=4,
        batch_size=16,
        window=None if policy == "fifo" else 32,
        max_skips=16,
        policy=policy,
        sync=sync,
        cost=sb.cost.QuadraticCost(),
        micro_batches=sb.MicroBatches(max_tokens=run.max_tokens),
    )
    trace = scheduler_runs.alone(source.trace).resampled(run.lengths.size, scheduler_runs.FIRST_SEED)
    report = sb.simulate(trace, config, slots=64, seed=scheduler_runs.FIRST_SEED)
    unit = float(config.cost(run.lengths[:1])[0] / run.costs_of(run.lengths[:1])[0])
    first = scheduler_runs.WARM_UP
    assert np.allclose(np.array(times) * unit, report.steps.step_work[first : first + 8])


def test_ranks_that_share_a_rollout_wait_for_each_other_and_for_nobody_else() -> None:
    costs = np.array([6.0, 2.0, 4.0, 1.0, 7.0])
    layout = [[[1], [0], [3]], [[2], [0]], [[], [], []]]  # 3.0 each of the first rollout, once rank 1 is free
    assert scheduler_runs.finish(layout, costs, "step") == 4.0 + 3.0 + 1.0
    layout = [[[1], [0]], [[3], [0]], [[], [], [2]], [[4], []]]
    assert scheduler_runs.finish(layout, costs, "step") == 7.0
    assert scheduler_runs.finish(layout, costs, "micro_batch") == 7.0 + 3.0 + 4.0


def test_figures_of_a_layout_made_by_hand() -> None:
    source = stream()
    run = replace(
        scheduler_runs.Run.of(source, 4, 2, steps=2), max_tokens=1_000, costs_of=lambda lengths: lengths * 2.0
    )
    run.lengths[16:24] = [400, 600, 500, 100, 800, 200, 300, 100]  # after the warm-up

    def plan(step: Step) -> Any:
        return [[[0, 1], [2]], [[3]]]  # 1,500 tokens beside 100; then 1,300 beside 100

    by_hand = Scheduler("by hand", "", lambda: plan)
    once, often = scheduler_runs.measure(run, by_hand, plan, 10.0)
    assert once.idle == pytest.approx(100 * (1 - 1500 / 2800), abs=0.01)
    assert often.idle == once.idle
    assert once.time == pytest.approx((1500 + 1300) / (900 + 800), abs=1e-4)  # 400 and 500; 800
    assert once.over_cap == 0
    assert once.token_variation == pytest.approx(100 / 1500, abs=1e-3)
    once, _ = scheduler_runs.measure(replace(run, max_tokens=999), by_hand, plan, 10.0)
    assert once.over_cap == 2


# --- others' files ----------------------------------------------------------------------------------------------------
