"""Which tokens are trained on: under whatever name it is put, the mask is ``loss_mask`` on the ranks, and counted."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch
from served import attended

import stream_balancer as sb
from stream_balancer.rollouts import Batch

config = partial(helpers.config, window=4)


def rollout(name: str, **columns: Any) -> sb.Rollout:
    return sb.Rollout(tokens={"input_ids": [1, 2, 3], **columns}, rollout_id=name)


def check(batch: Batch) -> None:
    """Two of three tokens of each rollout are trained on, and the ranks see which."""
    for share in batch.ranks:
        assert share.global_num_loss_tokens == 2 * batch.num_rollouts
        for micro_batch in share.micro_batches:
            packed = micro_batch.packed()
            assert packed["loss_mask"].view(-1, 3).tolist() == [[0, 1, 1]] * len(micro_batch.rollouts)
            assert "response_mask" not in packed
        assert all(r.num_loss_tokens == 2 for r in share.rollouts)


@pytest.mark.parametrize("column", ["loss_mask", "response_mask", "whatever"])
async def test_the_column_may_have_any_name(column: str) -> None:
    async with sb.StreamBalancer(config(loss_mask_column=column), accept=lambda ones: True) as balancer:
        balancer.put_nowait(rollout("a", **{column: [0, 1, 1]}))
        await balancer.put(rollout("b", **{column: [0, 1, 1]}))
        await balancer.put_group(
            [sb.Rollout(tokens={"input_ids": [1, 2, 3], column: [0, 1, 1]}, group_id="g") for _ in range(2)]
        )
        check(await anext(balancer.batches()))


async def test_a_producer_elsewhere_need_not_know() -> None:
    async with attended(sb.StreamBalancer(config(loss_mask_column="response_mask"))) as (balancer, transport, _):
        async with sb.connect(transport.connect_producer()) as producer:
            for number in range(4):
                await producer.put(rollout(f"r{number}", response_mask=[0, 1, 1]))
            with pytest.raises(sb.errors.RolloutError, match="no column 'response_mask', which loss_mask_column names"):
                await producer.put(rollout("bad"))
        check(await anext(balancer.batches()))


def test_it_comes_back_from_a_journal_and_a_checkpoint(tmp_path: Path) -> None:
    knobs = config(loss_mask_column="response_mask")
    with sb.blocking(knobs, journal=tmp_path) as balancer:
        for number in range(5):
            balancer.put(rollout(f"r{number}", response_mask=[0, 1, 1]))
        check(next(iter(balancer.batches(auto_ack=False))))
        state = balancer.state_dict()
    with sb.blocking(knobs, journal=tmp_path) as balancer:
        check(next(iter(balancer.batches())))
    with sb.blocking(knobs) as balancer:
        balancer.load_state_dict(state)
        for number in range(5, 8):
            balancer.put(rollout(f"r{number}", response_mask=[0, 1, 1]))
        batches = iter(balancer.batches())
        check(next(batches))
        check(next(batches))


@pytest.mark.parametrize(
    ("knob", "columns", "why"),
    [
        ("loss_mask", ["response_mask"], r"has no 'loss_mask'.*loss_mask_column='response_mask'"),
        ("loss_mask", ["completion_mask"], "loss_mask_column='completion_mask'"),
        ("loss_mask", ["action_mask"], "loss_mask_column='action_mask'"),
        ("loss_mask", ["labels"], "labels != -100"),
        ("response_mask", [], "has no column 'response_mask'"),
        ("response_mask", ["completion_mask"], "has no column 'response_mask'"),
        ("response_mask", ["response_mask", "loss_mask"], "which tokens are trained on"),
        (None, ["loss_mask"], "loss_mask_column is None"),
    ],
)
async def test_what_is_not_sure_is_refused(knob: str | None, columns: list[str], why: str) -> None:
    async with sb.StreamBalancer(config(loss_mask_column=knob)) as balancer:
        bad = rollout("bad", **{name: [0, 1, 1] for name in columns})
        with pytest.raises(sb.errors.RolloutError, match=why):
            balancer.put_nowait(bad)
        with pytest.raises(sb.errors.RolloutError, match=why):
            await balancer.put(bad)
        assert balancer.statistics().accepted == 0


@pytest.mark.parametrize(
    ("knob", "columns"),
    [
        ("loss_mask", []),
        ("loss_mask", ["loss_mask", "response_mask", "labels"]),
        (None, ["response_mask", "labels"]),
        (None, []),
    ],
)
async def test_what_is_sure_is_taken(knob: str | None, columns: list[str]) -> None:
    async with sb.StreamBalancer(config(loss_mask_column=knob)) as balancer:
        balancer.put_nowait(rollout("good", **dict.fromkeys(columns, torch.tensor([0, 1, 1]))))
        balancer.end()
        batch = await anext(balancer.batches())
        assert batch.ranks[0].global_num_loss_tokens == 2
