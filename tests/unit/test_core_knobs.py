"""Knobs that change while rollouts wait: what waits can still leave, or the change is refused and nothing has changed."""

from __future__ import annotations

from typing import Any

import pytest

import stream_balancer as sb
from stream_balancer._core import BalancerCore
from stream_balancer.testing import make_rollout, make_rollouts


def core_of(**knobs: Any) -> BalancerCore:
    return BalancerCore(sb.BalancerConfig(**{"dp_size": 1, "batch_size": 2, "window": 4, **knobs}))


@pytest.mark.parametrize("before", [{"max_tokens_per_micro_batch": 100}, {}, {"oversize": "alone"}])
def test_a_token_cap_below_a_waiting_rollout_is_refused(before: dict[str, Any]) -> None:
    core = core_of(**before)
    core.add_all(list(make_rollouts([3, 70, 5, 6])), 0.0)
    config = core.config
    with pytest.raises(sb.ConfigError, match=r"\(50\).*has 70 tokens.*cap >= 70 until it has left, or set oversize="):
        core.reconfigure(config.replace(max_tokens_per_micro_batch=50, oversize="refuse"))
    assert core.config is config
    core.reconfigure(config.replace(max_tokens_per_micro_batch=70, oversize="refuse"))
    core.reconfigure(config.replace(max_tokens_per_micro_batch=50, oversize="alone"))
    with pytest.raises(sb.ConfigError, match="has 70 tokens"):  # what waits is oversize already
        core.reconfigure(core.config.replace(oversize="refuse"))
    while (batch := core.poll(0.0)) is not None:
        core.acknowledge(batch.step)
    core.end()
    assert core.poll(0.0) is not None


def test_a_knob_changed_between_the_halves_of_a_group_does_not_forget_the_first() -> None:
    """Half of a group left at its deadline; the buffer is empty when a knob changes."""
    core = core_of(group_size=2, deadline_s=1.0)
    core.add(make_rollout(5, group_id="g"), 0.0)
    assert core.poll(1.0) is not None
    core.reconfigure(core.config.replace(deadline_s=50.0))
    core.add(make_rollout(6, group_id="g"), 1.0)
    core.squeeze()
    batch = core.poll(1.0)
    assert batch is not None
    assert batch.num_rollouts == 1


def test_a_grouped_balancer_refuses_a_rollout_without_a_group() -> None:
    core = core_of(batch_size=8, window=8, group_size=8)
    with pytest.raises(sb.RolloutError, match="group_size=8, but rollout 'r' has no group_id.*same group_id, or leave"):
        core.add(make_rollout(5, "r"), 0.0)
    assert core.statistics(0.0).accepted == 0
    core = core_of(batch_size=8, window=8, group_size=8, groups="free")  # there groups play no part
    core.add(make_rollout(5), 0.0)
