"""A rank that comes again after its controller was lost, or is refused: when it does, and when it must not."""

from __future__ import annotations

import anyio
import pytest
from helpers import settle
from scripted import Filled
from test_feed_steps import Rig

import stream_balancer as sb
from stream_balancer.errors import RefusalReason, refused_error
from stream_balancer.testing import MemoryNetwork

pytestmark = pytest.mark.anyio


async def test_a_controller_without_its_journal_is_not_joined() -> None:
    """Else its steps 0, 1, ... would count as trained on, and nobody would have trained on them."""
    network, got = MemoryNetwork(dp_size=1), []
    peer = network.connect(0, rejoin=True)
    feed = sb.RankFeed(peer)

    async def serve(filled: Filled, scope: anyio.CancelScope) -> None:
        with scope:
            await sb.serve(filled.balancer, network)

    async def train() -> None:
        async for step in feed:
            got.append(step.step)  # noqa: PERF401 - those before an error count

    async with Filled(3, 1, hold=True) as first, anyio.create_task_group() as tasks:
        tasks.start_soon(serve, first, scope := anyio.CancelScope())
        with anyio.move_on_after(5):
            await train()
        scope.cancel()
    assert got == [0, 1, 2]
    async with Filled(1, 1, hold=True) as second, anyio.create_task_group() as tasks:
        tasks.start_soon(serve, second, scope := anyio.CancelScope())
        with pytest.raises(sb.errors.RefusedError, match="without its journal"), anyio.fail_after(60):
            await train()
        scope.cancel()
    assert got == [0, 1, 2]


@pytest.mark.parametrize("reason", ["authentication", "protocol", "value", "busy", "closed"])
async def test_who_is_refused_does_not_come_again(reason: RefusalReason) -> None:
    rig = Rig(rejoin=True)
    await settle()
    assert rig.controller.connection is not None
    rig.controller.connection.fail(refused_error(reason, "not you"))
    with pytest.raises(sb.errors.RefusedError, match="not you") as raised:
        await anext(rig.feed)
    assert raised.value.reason == reason
    await anyio.sleep(100)
    assert rig.peer.joined == 1


@pytest.mark.parametrize("how", ["closed", "ended"])
async def test_who_has_left_does_not_come_again(how: str) -> None:
    rig = Rig(rejoin=True)
    await settle()
    if how == "ended":
        rig.controller.end()
        assert [step async for step in rig.feed] == []
    await rig.feed.aclose()
    rig.peer.cut()
    await anyio.sleep(100)
    assert rig.peer.joined == 1


async def test_without_being_asked_to_a_rank_does_not_wait() -> None:
    rig = Rig()
    await settle()
    rig.peer.cut()
    with pytest.raises(sb.errors.RankLostError, match="open a new RankFeed"):
        await anext(rig.feed)
    await anyio.sleep(100)
    assert rig.peer.joined == 1
