"""torch.distributed keeps the transport contract: real gloo pairs and threads, both ends in one process."""

from __future__ import annotations

import errno
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from stream_balancer.controller.serve import serve
from stream_balancer.rank.feed import RankFeed
from stream_balancer.testing.transports import CLAUSES, Opener, ScriptedBalancer, make_batch, same_rollout
from stream_balancer.transport.gloo import shared_memory as _shared
from stream_balancer.transport.gloo.shared_memory import available
from stream_balancer.transport.gloo.torch_dist import TorchTransport
from stream_balancer.transport.rank_port import RankPort
from stream_balancer.types import RankBatch

LINGER_S = 35.0  # more than the guards: a good-bye that is not answered shows as a hang


class _Harness:
    def __init__(self, dp_size: int, *, shared_memory: bool) -> None:
        self.transport = TorchTransport.listen(dp_size=dp_size, linger_s=LINGER_S, shared_memory=shared_memory)
        self.feeds: list[RankFeed] = []

    def connect(self, rank: int, *, dp_size: int | None = None, **options: Any) -> RankFeed:
        dp_size = dp_size or self.transport.dp_size
        self.feeds.append(RankFeed(self.transport.address, rank=rank, dp_size=dp_size, linger_s=LINGER_S, **options))
        return self.feeds[-1]

    def kill(self, feed: RankFeed) -> None:
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
    with anyio.fail_after(30):
        await clause(opener)


async def _first_batch(harness: _Harness, feed: RankFeed, **batch: int) -> RankBatch:
    share = make_batch(0, 1, **batch).ranks[0]
    link = await harness.transport.accept()
    link.send(share)
    received = await anext(feed)
    assert [r.rollout_id for r in received.rollouts] == [r.rollout_id for r in share.rollouts]
    return received


@pytest.mark.skipif(not available(), reason="needs memfd")
@pytest.mark.parametrize("refused_by", ["nobody", "controller", "rank"])
async def test_shared_memory_is_chosen_by_itself_and_may_be_refused(refused_by: str) -> None:
    with anyio.fail_after(30):
        async with _open(1, shared_memory=refused_by != "controller") as harness:
            feed = harness.connect(0, shared_memory=refused_by != "rank")
            await _first_batch(harness, feed)
            assert harness.transport.sessions[0].channel.shares_memory == (refused_by == "nobody")


def mapped_files() -> set[str]:
    """Inodes of the shared buffers that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:stream_balancer" in line}


@pytest.mark.skipif(not available(), reason="needs memfd")
async def test_a_buffer_is_used_again_only_when_its_last_tensor_is_gone() -> None:
    with anyio.fail_after(30):
        mapped_before = mapped_files()
        async with _open(1, shared_memory=True) as harness:
            feed = harness.connect(0)
            first = await _first_batch(harness, feed, num_tokens=1000)
            kept = [mb.packed()["input_ids"][3:9] for mb in first.micro_batches]
            before = [tensor.clone() for tensor in kept]
            del first
            link = harness.transport.sessions[0]
            for step in range(1, 12):
                while not link.credits:
                    await anyio.sleep(0.001)
                link.send(make_batch(step, 1, num_tokens=1000).ranks[0])
                assert (await anext(feed)).step == step
            assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))
            assert link.channel.shares_memory
            # The kept one, depth + 1, and one on its way back.
            assert 0 < len(mapped_files() - mapped_before) <= 5


@pytest.mark.skipif(not available(), reason="needs memfd")
async def test_tensors_outlive_the_feed_and_the_controller() -> None:
    with anyio.fail_after(30):
        async with _open(1, shared_memory=True) as harness:
            batch = await _first_batch(harness, harness.connect(0), num_tokens=1000)
        expected = make_batch(0, 1, num_tokens=1000).ranks[0]
        for mine, theirs in zip(batch.rollouts, expected.rollouts, strict=True):
            assert torch.equal(mine.tokens["input_ids"], theirs.tokens["input_ids"])


async def test_without_a_descriptor_for_shared_memory_a_batch_goes_through_the_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(size: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    balancer = ScriptedBalancer([make_batch(step, 1) for step in range(6)])
    with anyio.fail_after(30):
        async with OPENERS["shared_memory"](1) as harness, anyio.create_task_group() as tasks:
            tasks.start_soon(serve, balancer, harness.transport)
            held = []
            async for batch in harness.connect(0):
                held.append(batch)
                if batch.step == 1:
                    monkeypatch.setattr(_shared, "_make", none_left)
    assert [batch.step for batch in held] == list(range(6))
    for batch in held:
        for ours, theirs in zip(make_batch(batch.step, 1).ranks[0].rollouts, batch.rollouts, strict=True):
            assert same_rollout(ours, theirs)
