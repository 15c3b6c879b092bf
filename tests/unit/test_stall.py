"""The sentence that says why nothing is dispatched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import stream_balancer as sb
from stream_balancer.core.diagnosis import RankState, why_no_batch, why_ranks_wait
from stream_balancer.core.machine import BalancerCore
from stream_balancer.statistics import Statistics
from stream_balancer.testing import make_rollout

READY = RankState(rank=0, ready=True, since_s=5.0, connected=True)


def statistics_of(waiting: int, oldest_wait_s: float, **more: int) -> Statistics:
    core = BalancerCore(sb.BalancerConfig(dp_size=2, batch_size=32))
    return replace(core.statistics(0.0), waiting=waiting, oldest_wait_s=oldest_wait_s, **more)


DEADLINE = {"deadline_s": 30.0}
WAIT = "rollouts wait (window 64), the oldest for"


@pytest.mark.parametrize(
    ("knobs", "statistics", "expected"),
    [
        ({}, statistics_of(37, 812.4), f"37 {WAIT} 812 s; no deadline_s is set"),
        (DEADLINE, statistics_of(37, 12.0), f"37 {WAIT} 12 s; deadline_s is 30"),
        (
            {**DEADLINE, "min_batch_size": 8},
            statistics_of(7, 31.0),
            f"7 {WAIT} 31 s; deadline_s (30) sends no fewer than min_batch_size (8)",
        ),
        (DEADLINE, statistics_of(64, 31.0, blocked_puts=3), f"64 {WAIT} 31 s; 3 puts wait for room"),
        (
            {},
            replace(statistics_of(0, 0.0), evicted={"stale": 2, "lost": 0, "filtered": 7}),
            "no rollout waits; 64 make a window; evicted so far: 2 stale, 7 filtered",
        ),
    ],
)
def test_the_balancers_part(knobs: dict[str, Any], statistics: Statistics, expected: str) -> None:
    config = sb.BalancerConfig(dp_size=2, batch_size=32, window=64, **knobs)
    assert why_no_batch(BalancerCore(config).state, statistics) == expected


async def test_who_takes_batches_is_named() -> None:
    async with sb.StreamBalancer(sb.BalancerConfig(dp_size=1, batch_size=1, window=1)) as balancer:
        assert balancer.why_no_batch() == "no rollout waits; 1 make a window; nobody iterates batches()"
        waits = "1 rollout waits (window 1), the oldest for 0 s; "
        await balancer.put(make_rollout(5))
        assert balancer.why_no_batch() == waits + "a batch is ready; nobody iterates batches()"
        batches = balancer.batches()
        await anext(batches)
        await balancer.put(make_rollout(5))
        assert balancer.why_no_batch() == waits + "a batch is ready; the loop over batches() is busy with its last one"
        balancer.end()
        await anext(batches)
        assert balancer.why_no_batch() == "end() was called and nothing waits"


async def test_incomplete_groups_are_named() -> None:
    config = sb.BalancerConfig(dp_size=1, batch_size=4, groups=sb.Groups(size=4))
    async with sb.StreamBalancer(config) as balancer:
        for n in range(5):
            await balancer.put(make_rollout(5, group_id=f"g{n}"))
        await balancer.put(make_rollout(5, group_id="g1"))
        assert balancer.why_no_batch() == (
            "6 rollouts wait (window 8), the oldest for 0 s; no deadline_s is set; groups that wait for siblings, the "
            "oldest for 0 s: 'g0' (1 of 4), 'g1' (2 of 4), 'g2' (1 of 4) and 2 more; nobody iterates batches()"
        )


async def test_what_is_held_back_for_its_age_is_counted() -> None:
    config = sb.BalancerConfig(dp_size=1, batch_size=2, window=2, staleness=sb.Staleness(max_versions=0))
    async with sb.StreamBalancer(config) as balancer:
        balancer.set_version(3)
        for _ in range(4):
            await balancer.put(make_rollout(5, version=3))
        await anext(balancer.batches(auto_ack=False))
        assert balancer.why_no_batch() == (
            "2 rollouts wait (window 2), the oldest for 0 s; 2 are too old (staleness.max_versions=0) to leave before "
            "the trainer is through with the 1 batches ahead of them; no deadline_s is set"
        )


def test_the_ranks_part() -> None:
    absent = RankState(rank=3, ready=False, since_s=95.0, connected=False)
    assert why_ranks_wait([READY]) == ""
    assert why_ranks_wait([READY, absent]) == "rank 3 has not connected in 95 s"
    lost = replace(absent, rank=1, since_s=12.0, lost="connection closed by peer")
    assert why_ranks_wait([lost, READY]) == "rank 1 was lost 12 s ago (connection closed by peer) and has not come back"
    busy = replace(READY, rank=2, ready=False, since_s=40.0, step=7)
    assert why_ranks_wait([lost, busy, absent]).split("; ")[:2] == [
        "rank 3 has not connected in 95 s",
        "rank 2 has given no credit for 40 s",
    ]
    assert why_ranks_wait([replace(busy, step=None)]) == "rank 2 has given no credit for 40 s"
