"""Remote control over sockets, by blocking methods."""

from __future__ import annotations

import anyio
import pytest
from guard import GUARD_S
from processes import served

import stream_balancer as sb
from stream_balancer.testing import make_rollout


async def test_threads_reserve_wait_and_ask_with_blocking_methods() -> None:
    async with served(sb.serve) as (_, transport):

        def work(producer: sb.Producer, feed: sb.RankFeed) -> sb.Statistics:
            feed.set_version(2)
            blocking = producer.blocking
            assert blocking.version_after(None, timeout_s=GUARD_S) == blocking.version == 2
            says = r"version_after\(\) had no answer within 0.01 s: no version was set"
            with pytest.raises(TimeoutError, match=says):
                blocking.version_after(2, timeout_s=0.01)
            with blocking.reserve(2) as slot:
                slot.put(make_rollout(3, "a"))
                assert (slot.version, slot.left) == (2, 1)
                assert feed.statistics(timeout_s=GUARD_S).waiting == 1
            with blocking.reserve(8), pytest.raises(TimeoutError, match=r"reserve\(\) had no answer within 0.05 s"):
                blocking.reserve(8, timeout_s=0.05).__enter__()
            statistics = blocking.statistics()
            blocking.end()
            return statistics

        async with sb.connect(transport.address) as producer, sb.RankFeed(transport.address, rank=0, dp_size=1) as feed:
            statistics = await anyio.to_thread.run_sync(work, producer, feed)
            assert (statistics.accepted, statistics.reserved, statistics.version) == (1, 0, 2)
            assert [r.rollout_id async for batch in feed for r in batch.rollouts] == ["a"]
