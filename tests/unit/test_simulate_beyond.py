"""The simulator of what goes beyond a window: prompts that siblings share, rollouts that several ranks share."""

from __future__ import annotations

import numpy as np
import pytest

from stream_balancer.config import BalancerConfig
from stream_balancer.core.machine import BalancerCore
from stream_balancer.cost import QuadraticCost
from stream_balancer.tools.generation import Generation
from stream_balancer.tools.simulation_run import Run, shared_prefixes
from stream_balancer.tools.trace import Trace


def test_siblings_share_their_prompt_where_it_is_the_same() -> None:
    trace = Trace(
        prompt_tokens=np.array([500, 500, 70, 80, 40, 300, 300]),
        output_tokens=np.array([100, 0, 9, 9, 9, 1, 7]),
        group_ids=np.array([0, 0, 1, 1, 2, 3, 3]),
    )
    assert shared_prefixes(trace).tolist() == [500, 499, 0, 0, 0, 300, 300]  # a token of its own at least


@pytest.mark.parametrize("share", [False, True])
def test_rollouts_of_a_run_say_their_prefix_and_leave_its_price_to_the_cost(share: bool) -> None:
    trace = Trace(
        prompt_tokens=np.array([500, 500, 300]), output_tokens=np.array([100, 10, 9]), group_ids=np.array([0, 0, 1])
    )
    config = BalancerConfig(dp_size=2, batch_size=2, cost=QuadraticCost(), share_prefixes=share)
    run = Run(trace, BalancerCore(config), Generation(trace, 2, 30.0, 0), 1.0)
    found = [run._rollout(row) for row in range(3)]
    if share:
        assert [(one.prefix, one.group_id, one.cost) for one in found] == [
            (500, "0", None),
            (500, "0", None),
            (0, None, None),
        ]
    else:
        assert [(one.prefix, one.group_id) for one in found] == [(0, None)] * 3
        assert [one.cost for one in found] == np.asarray(config.cost(trace.lengths)).tolist()
