"""Statistics as people read them, why nothing is dispatched in a sentence, and their way to another process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import anyio
import pytest
from helpers import config
from hypothesis import given
from hypothesis import strategies as st

import stream_balancer as sb
from stream_balancer.core.diagnosis import RankState, why_no_batch, why_ranks_wait
from stream_balancer.core.machine import BalancerCore
from stream_balancer.errors import WireError
from stream_balancer.statistics import Statistics, Straggler, TrainingAge
from stream_balancer.testing import make_rollout
from stream_balancer.wire.statistics import decode_statistics, encode_statistics


def two_left() -> Statistics:
    """Six rollouts came, four of them left at second 3."""
    core = BalancerCore(sb.BalancerConfig(dp_size=2, batch_size=4, window=5))
    for n in range(6):
        core.add(make_rollout(100 if n < 4 else 1_000, f"r{n}"), float(n))
    assert core.poll(5.0) is not None
    return core.statistics(8.0)


def test_a_line_each() -> None:
    assert str(two_left()).splitlines() == [
        "rollouts     2 wait (2,000 tokens, the oldest 4.0 s; window 5), 4 in flight, 0 acknowledged",
        "batches      1 window",
        "idle         0.0% predicted (0.0% unavoidable), ? measured",
    ]


def test_what_is_known_besides() -> None:
    known = replace(
        two_left(),
        evicted={"stale": 1_003, "lost": 0, "filtered": 2},
        blocked_puts=7,
        measured_idle_fraction=0.0451,
        idle_seconds={"no_data": 12.34, "window": 0.0, "transport": 1_000.0},
        version=12,
        training_age=TrainingAge(rollouts=9, mean=1.25, p99=3, max=4),
        straggler=Straggler(rank=1, slowdown=1.5, since_step=3, since_s=4.0),
    )
    lines = str(known).splitlines()
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


READY = RankState(rank=0, ready=True, since_s=5.0, connected=True)


def waiting_for(waiting: int, oldest_wait_s: float, **more: int) -> Statistics:
    core = BalancerCore(sb.BalancerConfig(dp_size=2, batch_size=32))
    return replace(core.statistics(0.0), waiting=waiting, oldest_wait_s=oldest_wait_s, **more)


DEADLINE = {"deadline_s": 30.0}
WAIT = "rollouts wait (window 64), the oldest for"


@pytest.mark.parametrize(
    ("knobs", "statistics", "expected"),
    [
        ({}, waiting_for(37, 812.4), f"37 {WAIT} 812 s; no deadline_s is set"),
        (DEADLINE, waiting_for(37, 12.0), f"37 {WAIT} 12 s; deadline_s is 30"),
        (
            {**DEADLINE, "min_batch_size": 8},
            waiting_for(7, 31.0),
            f"7 {WAIT} 31 s; deadline_s (30) sends no fewer than min_batch_size (8)",
        ),
        (DEADLINE, waiting_for(64, 31.0, blocked_puts=3), f"64 {WAIT} 31 s; 3 puts wait for room"),
        (
            {},
            replace(waiting_for(0, 0.0), evicted={"stale": 2, "lost": 0, "filtered": 7}),
            "no rollout waits; 64 make a window; evicted so far: 2 stale, 7 filtered",
        ),
    ],
)
def test_the_balancers_part(knobs: dict[str, Any], statistics: Statistics, expected: str) -> None:
    config = sb.BalancerConfig(dp_size=2, batch_size=32, window=64, **knobs)
    assert why_no_batch(BalancerCore(config), statistics) == expected


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
            "6 rollouts wait (window 6), the oldest for 0 s; no deadline_s is set; groups that wait for siblings, the "
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


def statistics_of(**knobs: object) -> Statistics:
    async def run() -> Statistics:
        async with sb.StreamBalancer(config(**knobs)) as balancer:
            balancer.set_version(4)
            for n in range(12):
                await balancer.put(make_rollout(3 + n, f"r{n}", version=3))
            batches = balancer.batches()
            for _ in range(2):
                batch = await anext(batches)
                for rank in range(2):
                    balancer.record_step_seconds(batch.step, rank, 0.5 + rank)
            return balancer.statistics()

    return anyio.run(run)


def test_statistics_arrive_as_they_were_taken() -> None:
    for cost in (sb.cost.TokenCost(), sb.cost.CalibratedCost(sb.cost.TokenCost())):
        statistics = statistics_of(cost=cost)
        assert statistics.in_flight
        assert repr(decode_statistics(encode_statistics(statistics))) == repr(statistics)  # nan is unlike itself


@given(st.binary(max_size=200))
def test_no_bytes_do_harm(raw: bytes) -> None:
    with pytest.raises(WireError):
        decode_statistics(raw)
