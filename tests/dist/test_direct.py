"""Direct hand-over between real processes: tokens go from the producer to the rank that trains on them, exactly once,
whoever dies."""

from __future__ import annotations

import random
import signal
from contextlib import ExitStack
from typing import Any

import anyio
import pytest
import torch
from helpers import until
from processes import END, Rank, RemoteProducer, Spec, fingerprint, make, names, served

import stream_balancer as sb
from stream_balancer.wire.codec import RemoteRollout


def expected(specs: list[Spec]) -> dict[str, Any]:
    return {spec[1]: fingerprint(make(*spec)) for spec in specs}


def trained(told: list[list[Any]]) -> dict[str, Any]:
    """All that ranks trained on; each rollout once."""
    seen: dict[str, Any] = {}
    for said in told:
        for _, real in said[:-1]:
            assert not seen.keys() & real.keys()
            seen |= real
    return seen


async def test_tokens_bypass_the_controller_and_arrive_exactly_once() -> None:
    chance = random.Random(0)
    away = [[(1 + int(chance.lognormvariate(5, 1)), f"{p}.{n}", None, "rich") for n in range(45)] for p in "ab"]
    local = [(20 + n, f"local.{n}", None, "rich") for n in range(10)]  # mixed with puts through the controller
    with ExitStack() as stack:
        async with served(sb.serve, dp_size=2, batch_size=8, window=12, capacity=24) as (balancer, transport):
            ranks = [Rank(transport.address, rank, 2) for rank in range(2)]
            remotes = [
                stack.enter_context(RemoteProducer(transport.address, [[spec] for spec in specs], hand_over="direct"))
                for specs in away
            ]
            for spec in local:
                await balancer.put(make(*spec))
            await until(lambda: balancer.statistics().accepted > 40)
            for rollout in balancer.snapshot().waiting:
                tensors = (*rollout.tokens.values(), *rollout.tensors.values())
                is_away = all(tensor.is_meta for tensor in tensors)
                assert is_away == isinstance(rollout, RemoteRollout) == (not rollout.rollout_id.startswith("local"))
            assert [await anyio.to_thread.run_sync(remote.hear) for remote in remotes] == [45, 45]
            balancer.end()
        told = [await anyio.to_thread.run_sync(rank.told) for rank in ranks]
        for remote in remotes:
            await anyio.to_thread.run_sync(remote.leave)  # at once: nothing is held any more
    assert [said[-1] for said in told] == [END, END]
    assert trained(told) == expected([*away[0], *away[1], *local])
    stats = balancer.statistics()
    assert (stats.acknowledged, sum(stats.evicted.values())) == (100, 0)


async def test_tokens_in_flight_that_died_with_their_producer_are_masked_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The steps before are trained on, the one that needs them too, without them; on all ranks alike."""
    async with served(sb.serve, policy="fifo") as (balancer, transport):
        for n in range(4):
            await balancer.put(make(9, f"safe{n}"))
        specs = [[(9, f"v{n}")] for n in range(3)]
        with RemoteProducer(transport.address, specs, hand_over="direct", label="the victim") as victim:
            assert await anyio.to_thread.run_sync(victim.hear) == 3
            await balancer.put(make(9, "survivor"))
            victim.kill(signal.SIGSTOP)  # it answers nobody any more
            rank = Rank(transport.address, 0, 1, step_s=0.3)
            await until(lambda: balancer.statistics().waiting == 0)  # the rank trains on 0 and fetches 1
            victim.kill()
            balancer.end()
            told = await anyio.to_thread.run_sync(rank.told)
    assert [said[0] for said in told[:-1]] == [0, 1]
    assert trained([told]).keys() == {*(f"safe{n}" for n in range(4)), "survivor"}
    assert balancer.statistics().evicted["lost"] == 3
    assert "3 rollouts are gone with their producer, and the step goes on without" in caplog.text
    assert "the victim" in caplog.text


async def test_payloads_are_held_until_acknowledged_and_their_mask_may_have_any_name() -> None:
    def one(name: str) -> sb.Rollout:
        columns = {"input_ids": torch.arange(3), "logprobs": torch.zeros(3), "old_logprobs": torch.ones(3)}
        return sb.Rollout(tokens={**columns, "response_mask": torch.tensor([0, 1, 1])}, rollout_id=name)

    async with served(sb.serve, capacity=16, loss_mask_column="response_mask") as (balancer, transport):
        async with sb.connect(transport.address, hand_over="direct") as untold:
            with pytest.raises(sb.errors.RolloutError, match="loss_mask_column='response_mask'"):
                await untold.put(one("not told"))
        options: dict[str, Any] = {"hand_over": "direct", "loss_mask_column": "response_mask"}
        async with sb.connect(transport.address, **options) as producer:  # the rank is in the same process
            for n in range(4):
                await producer.put(one(f"r{n}"))
            with pytest.raises(ValueError, match="are kept by their producers"):
                balancer.state_dict()
            feed = sb.RankFeed(transport.address, rank=0, dp_size=1)
            batch = await anext(feed)
            packed = batch.micro_batches[0].packed()
            assert batch.global_num_loss_tokens == 8
            assert packed["loss_mask"].tolist() == [0, 1, 1] * 4
            assert packed["old_logprobs"].tolist() == [1.0] * 12
            held = producer._kept
            assert held is not None
            assert len(held) == 4
            batch.ack()
            await producer.released()
            assert len(held) == 0
            await producer.put(one("last"))
            balancer.end()
            assert [name async for batch in feed for name in names(batch.rollouts)] == ["last"]


async def test_without_serve_nobody_could_fetch_so_it_is_refused() -> None:
    async with served() as (_, transport), sb.connect(transport.address, hand_over="direct") as producer:
        with pytest.raises(sb.errors.RolloutError, match="serve"):
            await producer.put(make(3, "a"))
    with pytest.raises(ValueError, match="hand_over"):
        sb.connect("tcp://127.0.0.1:1", hand_over="fast")  # type: ignore[arg-type]
