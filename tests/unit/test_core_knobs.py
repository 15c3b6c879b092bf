"""Knobs that change while rollouts wait: what waits can still leave, or the change is refused and changes nothing."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from helpers import polled
from invariants import verify

import stream_balancer as sb
from stream_balancer.config.figures import longest_rollout
from stream_balancer.core.machine import BalancerCore
from stream_balancer.testing import make_rollout, make_rollouts


def core_of(**knobs: Any) -> BalancerCore:
    return BalancerCore(sb.BalancerConfig(**{"dp_size": 1, "batch_size": 2, "window": 4, **knobs}))


def test_a_rollout_above_the_cap_comes_in_if_ranks_may_share_it() -> None:
    config = sb.BalancerConfig(
        dp_size=4,
        batch_size=4,
        context_parallel=sb.ContextParallel(sizes=(1, 2, 4, 8)),
        micro_batches=sb.MicroBatches(max_tokens=51),
        cost=sb.cost.QuadraticCost(),
    )
    assert longest_rollout(config) == 200, "four ranks with two chunks of 25 tokens each"
    assert longest_rollout(config.replace(context_parallel={"sizes": (1,)})) == 51
    assert longest_rollout(config.replace(micro_batches={"max_tokens": None})) is None
    core = BalancerCore(config)
    core.add(make_rollout(200), 0.0)
    with pytest.raises(sb.errors.RolloutError, match=r"201 tokens, above .*tokens \(51\) on each of 4 ranks"):
        core.add(make_rollout(201), 0.0)
    with pytest.raises(
        sb.errors.ConfigError, match=r"\(51\) on each of 2 ranks with micro_batches.oversize='refuse' is below rollout"
    ):
        core.reconfigure(config.replace(context_parallel={"sizes": (1, 2)}))


@pytest.mark.parametrize(
    "before", [{"micro_batches": {"max_tokens": 100}}, {}, {"micro_batches": {"oversize": "alone"}}]
)
def test_a_token_cap_below_a_waiting_rollout_is_refused(before: dict[str, Any]) -> None:
    core = core_of(**before)
    core.add_all(list(make_rollouts([3, 70, 5, 6])), 0.0)
    config = core.config
    with pytest.raises(
        sb.errors.ConfigError,
        match=r"\(50\).*has 70 tokens.*cap >= 70 until it has left, or set micro_batches.oversize=",
    ):
        core.reconfigure(config.replace(micro_batches={"max_tokens": 50, "oversize": "refuse"}))
    assert core.config is config
    core.reconfigure(config.replace(micro_batches={"max_tokens": 70, "oversize": "refuse"}))
    core.reconfigure(config.replace(micro_batches={"max_tokens": 50, "oversize": "alone"}))
    with pytest.raises(sb.errors.ConfigError, match="has 70 tokens"):  # what waits is oversize already
        core.reconfigure(core.config.replace(micro_batches={"oversize": "refuse"}))
    while (batch := core.poll(0.0)) is not None:
        core.acknowledge(batch.step)
    core.end()
    assert core.poll(0.0) is not None


def test_a_knob_changed_between_the_halves_of_a_group_does_not_forget_the_first() -> None:
    """Half of a group left at its deadline; the buffer is empty when a knob changes."""
    core = core_of(groups=sb.Groups(size=2), deadline_s=1.0)
    core.add(make_rollout(5, group_id="g"), 0.0)
    assert core.poll(1.0) is not None
    core.reconfigure(core.config.replace(deadline_s=50.0))
    core.add(make_rollout(6, group_id="g"), 1.0)
    core.force_flush()
    batch = polled(core, 1.0)
    assert batch.num_rollouts == 1


def test_a_grouped_balancer_refuses_a_rollout_without_a_group() -> None:
    core = core_of(batch_size=8, window=8, groups=sb.Groups(size=8))
    with pytest.raises(
        sb.errors.RolloutError, match=r"groups.size=8, but rollout 'r' has no group_id.*the same group_id, or"
    ):
        core.add(make_rollout(5, "r"), 0.0)
    assert core.statistics(0.0).accepted == 0
    core = core_of(batch_size=8, window=8, groups=sb.Groups(size=8, keep="free"))  # there groups play no part
    core.add(make_rollout(5), 0.0)


@pytest.mark.parametrize("max_skips", [None, 10**8, 10**30])
def test_no_bound_costs_nothing_and_plans_alike(max_skips: int | None) -> None:
    """Work and memory follow what waits: 10^8 allocated 750 MB at every step."""
    core = core_of(dp_size=2, batch_size=4, window=12, max_skips=max_skips)
    assert core.config.max_skips == max_skips
    core.add_all(list(make_rollouts([3, 4, 500, 4, 3, 4, 5, 3, 4, 3, 3, 4], minimal=True)), 0.0)
    tracemalloc.start()
    batch = core.poll(0.0)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert batch is not None
    assert peak_bytes < 10**6
    assert 500 not in [r.num_tokens for r in batch.rollouts]  # an outlier may wait
    core.end()
    while core.poll(0.0) is not None:
        pass
    verify(core)
