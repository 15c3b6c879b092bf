"""Statistics on their way to another process: the same values, and no more bytes than may travel."""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest
from helpers import config
from hypothesis import given
from hypothesis import strategies as st

import stream_balancer as sb
from stream_balancer.errors import WireError
from stream_balancer.statistics import Statistics, StratumStatistics
from stream_balancer.testing import make_rollout
from stream_balancer.wire.statistics import MAX_STATISTICS_BYTES, decode_statistics, encode_statistics


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


def test_too_many_strata_are_refused_before_they_are_sent() -> None:
    one = StratumStatistics(waiting=1, mean_wait_s=0.0, share=None)
    strata = {f"environment {n}": one for n in range(50_000)}
    statistics = replace(statistics_of(), strata=strata)
    with pytest.raises(ValueError, match=f"50000 strata take .* more than the {MAX_STATISTICS_BYTES}"):
        encode_statistics(statistics)


@given(st.binary(max_size=200))
def test_no_bytes_do_harm(raw: bytes) -> None:
    with pytest.raises(WireError):
        decode_statistics(raw)
