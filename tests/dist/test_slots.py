"""A slot in another process says when its rollout would be too old."""

from __future__ import annotations

from typing import Any

import anyio
from forked import forked, hear
from guard import GUARD_S
from helpers import config, until

import stream_balancer as sb
from stream_balancer.testing import make_rollout


def generate(address: str, pipe: Any) -> None:
    """A plain thread: one rollout is stopped, and another begun with the newest policy."""
    with sb.connect(address) as producer:
        with producer.reserve() as slot:
            pipe.send(slot.version)
            slot.stale(timeout_s=GUARD_S)
        with producer.reserve() as slot:
            slot.put(make_rollout(3, "young"))
            pipe.send(slot.version)


async def test_a_worker_in_another_process_stops_what_would_be_evicted() -> None:
    async with (
        sb.StreamBalancer(config(window=8, staleness={"max_versions": 1})) as balancer,
        sb.TorchTransport.listen(dp_size=balancer.config.dp_size) as transport,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(sb.serve, balancer, transport)
        balancer.set_version(0)
        worker, pipe = forked(generate, transport.address)
        await until(lambda: balancer.statistics().reserved == 1)
        for version in (1, 2):
            balancer.set_version(version)
        await until(lambda: balancer.statistics().waiting == 1)
        assert [hear(pipe), hear(pipe)] == [0, 2]
        statistics = balancer.statistics()
        assert (statistics.accepted, statistics.evicted["stale"], statistics.reserved) == (1, 0, 0)
        worker.kill()
        tasks.cancel_scope.cancel()
