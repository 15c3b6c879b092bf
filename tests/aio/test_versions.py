"""version and version_after(): the policy version as those who generate see it, in virtual time on both loops."""

from __future__ import annotations

import anyio
from helpers import config, settle

import stream_balancer as sb
from stream_balancer.testing import make_rollouts


async def test_version_after_returns_at_once_where_there_is_a_later_one_and_else_waits() -> None:
    async with sb.StreamBalancer(config()) as balancer, anyio.create_task_group() as tasks:
        assert balancer.version is None
        seen: list[int] = []

        async def follow() -> None:
            version = None
            while True:
                version = await balancer.version_after(version)
                seen.append(version)

        tasks.start_soon(follow)
        await settle()
        assert seen == []
        for version in (0, 3):
            balancer.set_version(version)
            await settle()
        balancer.set_version(3)
        await settle()
        assert seen == [0, 3]
        for version in (5, 6):  # the newest counts
            balancer.set_version(version)
        await settle()
        assert seen == [0, 3, 6]
        assert balancer.version == 6
        assert await balancer.version_after(2) == 6
        tasks.cancel_scope.cancel()


async def test_a_version_from_a_checkpoint_is_one() -> None:
    async with sb.StreamBalancer(config()) as first:
        first.set_version(7)
        for rollout in make_rollouts([3, 4]):
            await first.put(rollout)
        state = first.state_dict()
    async with sb.StreamBalancer(config()) as second, anyio.create_task_group() as tasks:
        seen: list[int] = []

        async def follow() -> None:
            seen.append(await second.version_after(None))

        tasks.start_soon(follow)
        await settle()
        second.load_state_dict(state)
        await settle()
        assert seen == [7]
        assert second.version == 7
