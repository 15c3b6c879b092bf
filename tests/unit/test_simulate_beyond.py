"""The simulator of what goes beyond a window: prompts that siblings share, rollouts that several ranks share."""

from __future__ import annotations

import numpy as np
import pytest

from stream_balancer.config import BalancerConfig, Policy
from stream_balancer.core.machine import BalancerCore
from stream_balancer.cost import QuadraticCost
from stream_balancer.tools.generation import Generation
from stream_balancer.tools.simulate import as_policy, report_of, simulate
from stream_balancer.tools.simulation_run import Run, shared_prefixes
from stream_balancer.tools.trace import Trace


def test_siblings_share_their_prompt_where_it_is_the_same() -> None:
    trace = Trace(
        prompt_tokens=np.array([500, 500, 70, 80, 40, 300, 300]),
        output_tokens=np.array([100, 0, 9, 9, 9, 1, 7]),
        group_ids=np.array([0, 0, 1, 1, 2, 3, 3]),
    )
    assert shared_prefixes(trace).tolist() == [500, 499, 0, 0, 0, 300, 300]  # a token of its own at least


@pytest.mark.parametrize("policy", ["fifo", "window"])
def test_what_sharing_adds_counts_as_idle_in_the_simulator_and_in_statistics(policy: Policy) -> None:
    lengths = np.random.default_rng(5).lognormal(8.0, 1.7, 600).clip(16, 200_000).astype(np.int64)
    trace = Trace(prompt_tokens=0 * lengths, output_tokens=lengths, group_ids=np.arange(600))
    config = as_policy(
        BalancerConfig(dp_size=8, batch_size=32, cost=QuadraticCost(), context_parallel={"sizes": (1, 2, 4, 8)}), policy
    )
    core = BalancerCore(config)
    run = Run(trace, core, Generation(trace, 64, 30.0, 0), float("inf"))
    run.to_the_end(None)
    steps = report_of(run, 0).steps
    costs = np.asarray(config.cost(lengths))
    work = np.bincount(run.step_of, weights=costs) / 8
    assert steps.mean_load == pytest.approx(work)
    added = steps.rank_work.mean(axis=1) - work
    assert (added > -1e-9 * work).all()
    assert added.max() > 0.05 * work.max()
    assert (steps.lower_bound <= steps.step_work * (1 + 1e-9)).all()
    assert core.statistics(0.0).idle_fraction == pytest.approx(1 - work.sum() / steps.step_work.sum())
    whole = simulate(trace, config.replace(context_parallel={"sizes": (1,)}), slots=64, warm_up=0)
    assert whole.overall.idle_fraction > 1.3 * (1 - work.sum() / steps.step_work.sum())
