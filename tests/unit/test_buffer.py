"""The waiting rollouts: columns and order hold whatever comes, leaves, and whenever somebody looks; what they weigh."""

from __future__ import annotations

import gc
import tracemalloc

import torch

import stream_balancer as sb
from stream_balancer.core.machine import BalancerCore

IDS = torch.zeros(64, dtype=torch.int64)


def rollout(length: int, name: str) -> sb.Rollout:
    return sb.Rollout(tokens={"input_ids": IDS[:length]}, rollout_id=name)


def dispatch_all(num_rollouts: int) -> None:
    core = BalancerCore(sb.BalancerConfig(dp_size=4, batch_size=16, cost=sb.cost.QuadraticCost()))
    for number in range(num_rollouts):
        core.add(rollout(1 + number % 60, str(number)), float(number))
        batch = core.poll(float(number))
        if batch is not None:
            core.acknowledge(batch.step)


def num_alive() -> int:
    return sum(type(one) in (sb.Rollout, sb.Batch, sb.types.RankBatch, sb.types.MicroBatch) for one in gc.get_objects())


def test_nothing_waits_for_pythons_cycle_collector() -> None:
    dispatch_all(64)  # first-time costs
    gc.collect()
    gc.disable()
    try:
        before = num_alive()
        dispatch_all(400)
        assert num_alive() == before
    finally:
        gc.enable()


def test_book_keeping_is_small_and_linear() -> None:
    rollouts = [rollout(1 + number % 60, str(number)) for number in range(8192)]
    core = BalancerCore(sb.BalancerConfig(dp_size=4, batch_size=16, window=16384))
    tracemalloc.start()
    sizes = []
    for number, one in enumerate(rollouts):
        core.add(one, float(number))
        if number + 1 in (1024, 8192):
            sizes.append(tracemalloc.get_traced_memory()[0] / (number + 1))
    tracemalloc.stop()
    assert max(sizes) < 256  # bytes for each waiting rollout; its columns alone are 72
