"""Statistics as people read them: a line for each matter, and none for what there is nothing to say of."""

from __future__ import annotations

from dataclasses import replace

import stream_balancer as sb
from stream_balancer.core.machine import BalancerCore
from stream_balancer.statistics import Statistics, Straggler, TrainingAge
from stream_balancer.testing import make_rollout


def statistics() -> Statistics:
    """Six rollouts came, four of them left at second 3."""
    core = BalancerCore(sb.BalancerConfig(dp_size=2, batch_size=4, window=5))
    for n in range(6):
        core.add(make_rollout(100 if n < 4 else 1_000, f"r{n}"), float(n))
    assert core.poll(5.0) is not None
    return core.statistics(8.0)


def test_a_line_each() -> None:
    assert str(statistics()).splitlines() == [
        "rollouts     2 wait (2,000 tokens, the oldest 4.0 s; window 5), 4 in flight, 0 acknowledged",
        "batches      1 window",
        "idle         0.0% predicted (0.0% unavoidable), ? measured",
    ]


def test_what_is_known_besides() -> None:
    known = replace(
        statistics(),
        evicted={"stale": 1_003, "lost": 0, "filtered": 2},
        blocked_puts=7,
        measured_idle_fraction=0.0451,
        idle_seconds={"no_data": 12.34, "window": 0.0, "transport": 1_000.0},
        version=12,
        training_age=TrainingAge(rollouts=9, mean=1.25, p99=3, max=4),
        straggler=Straggler(rank=1, slowdown=1.5, since_step=3, since_s=4.0),
        window_tokens=4_096,
    )
    lines = str(known).splitlines()
    assert "window 4,096 tokens" in lines[0]
    assert lines[1:3] == ["evicted      1,003 stale, 2 filtered", "held back    7 puts wait for room"]
    assert lines[4].endswith("4.5% measured")
    assert lines[5:] == [
        "idle seconds 12.3 no_data, 1,000.0 transport",
        "versions     policy version 12; trained on at age 1.25, at most 4",
        "slow         rank 1 takes 1.50 times as long as the median rank for the same work, since step 3 (4 s ago)",
    ]


def test_of_a_balancer_that_has_just_begun() -> None:
    core = BalancerCore(sb.BalancerConfig(dp_size=2, batch_size=4))
    lines = str(core.statistics(0.0)).splitlines()
    assert lines[1:] == ["batches      none yet", "idle         ? predicted (? unavoidable), ? measured"]
    assert repr(core.statistics(0.0)).startswith("Statistics(waiting=0, ")
