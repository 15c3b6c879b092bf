"""torch.distributed keeps the transport contract: real gloo pairs and threads, both ends in one process."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import pytest
from guard import GUARD_S
from scripted import make_batch, same_rollout

import stream_balancer as sb
from stream_balancer.errors import RankLostError
from stream_balancer.testing.harness import until
from stream_balancer.testing.transports import CLAUSES, Opener, ScriptedBalancer
from stream_balancer.transport.gloo import shared_memory as _shared
from stream_balancer.transport.gloo.shared_memory import available
from stream_balancer.transport.rank_port import RankPort
from stream_balancer.types import RankBatch

LINGER_S = 35.0  # more than the guards: a good-bye that is not answered shows as a hang


class _Harness:
    def __init__(self, dp_size: int, *, shared_memory: bool) -> None:
        self.transport = sb.TorchTransport.listen(dp_size=dp_size, linger_s=LINGER_S, shared_memory=shared_memory)
        self.feeds: list[sb.RankFeed] = []

    def connect(self, rank: int, *, dp_size: int | None = None, **options: Any) -> sb.RankFeed:
        dp_size = dp_size or self.transport.dp_size
        self.feeds.append(sb.RankFeed(self.transport.address, rank=rank, dp_size=dp_size, linger_s=LINGER_S, **options))
        return self.feeds[-1]

    def kill(self, feed: sb.RankFeed) -> None:
        port = feed._port
        assert isinstance(port, RankPort)
        port.abort()  # the sockets close without a good-bye


@asynccontextmanager
async def _open(dp_size: int, *, shared_memory: bool) -> AsyncIterator[_Harness]:
    harness = _Harness(dp_size, shared_memory=shared_memory)
    async with harness.transport:
        try:
            yield harness
        finally:
            with anyio.CancelScope(shield=True):
                for feed in harness.feeds:
                    await feed.aclose()
            if not shared_memory:
                assert not any(session.channel.shares_memory for session in harness.transport.sessions.values())


OPENERS = {
    "sockets": functools.partial(_open, shared_memory=False),
    "shared_memory": functools.partial(_open, shared_memory=True),
}


@pytest.mark.parametrize("opener", OPENERS.values(), ids=OPENERS)
@pytest.mark.parametrize("clause", CLAUSES, ids=lambda clause: clause.__name__)
async def test_clause(clause: Callable[[Opener], Awaitable[None]], opener: Opener) -> None:
    with anyio.fail_after(GUARD_S):
        await clause(opener)


async def _first_batch(harness: _Harness, feed: sb.RankFeed, **batch: int) -> RankBatch:
    share = make_batch(0, 1, **batch).ranks[0]
    link = await harness.transport.accept()
    link.send(share)
    received = await anext(feed)
    assert [r.rollout_id for r in received.rollouts] == [r.rollout_id for r in share.rollouts]
    return received


@pytest.mark.skipif(not available(), reason="needs memfd")
@pytest.mark.parametrize("refused_by", ["nobody", "controller", "rank"])
async def test_shared_memory_is_chosen_by_itself_and_may_be_refused(refused_by: str) -> None:
    with anyio.fail_after(GUARD_S):
        async with _open(1, shared_memory=refused_by != "controller") as harness:
            feed = harness.connect(0, shared_memory=refused_by != "rank")
            await _first_batch(harness, feed)
            assert harness.transport.sessions[0].channel.shares_memory == (refused_by == "nobody")


def _memory_files() -> int:
    """Shared memory of this process, in pieces."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of this listing
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum(link.startswith("/memfd:") for link in links)


@pytest.mark.skipif(not available(), reason="needs memfd")
@pytest.mark.parametrize("how", ["killed", "closed"])
async def test_shared_memory_of_a_lost_rank_is_released(how: str) -> None:
    """While its controller goes on: ranks that are lost now and then must not fill the machine."""
    before = _memory_files()
    with anyio.fail_after(GUARD_S):
        async with OPENERS["shared_memory"](1) as harness:
            feed = harness.connect(0)
            await _first_batch(harness, feed)
            assert _memory_files() > before
            if how == "killed":
                harness.kill(feed)
            else:
                harness.transport.sessions[0].close(RankLostError("go", rank=0, step=0, cause="a test"))
                with pytest.raises(RankLostError, match="go"):
                    await anext(feed)
                await feed.aclose()
            await until(lambda: _memory_files() == before)


async def test_without_a_descriptor_for_shared_memory_a_batch_goes_through_the_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(size: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    balancer = ScriptedBalancer([make_batch(step, 1) for step in range(6)])
    with anyio.fail_after(GUARD_S):
        async with OPENERS["shared_memory"](1) as harness, anyio.create_task_group() as tasks:
            tasks.start_soon(sb.serve, balancer, harness.transport)
            held = []
            async for batch in harness.connect(0):
                held.append(batch)
                if batch.step == 1:
                    monkeypatch.setattr(_shared, "_make", none_left)
    assert [batch.step for batch in held] == list(range(6))
    for batch in held:
        for ours, theirs in zip(make_batch(batch.step, 1).ranks[0].rollouts, batch.rollouts, strict=True):
            assert same_rollout(ours, theirs)
