"""The waiting rollouts: columns and order hold whatever comes, leaves, and whenever somebody looks; what they weigh."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from invariants import verify_buffer

import stream_balancer as sb
from stream_balancer.core.buffer import Buffer
from stream_balancer.core.machine import BalancerCore

IDS = torch.zeros(64, dtype=torch.int64)

PLACES = st.lists(st.floats(0.0, 1.0, exclude_max=True), max_size=5)
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 6), st.integers(0, 2)),
        st.tuples(st.just("add many"), st.integers(60, 140), st.integers(0, 2)),
        st.tuples(st.just("remove"), PLACES, st.just(0)),
        st.tuples(st.just("pass over"), PLACES, st.just(0)),
        st.tuples(st.just("reprice"), st.floats(0.0, 9.0), st.just(0)),
        st.tuples(st.just("look"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


def rollout(length: int, name: str) -> sb.Rollout:
    return sb.Rollout(tokens={"input_ids": IDS[:length]}, rollout_id=name)


@given(MOVES)
def test_rows_and_order_hold_whenever_somebody_looks(moves: list[tuple[str, Any, int]]) -> None:
    buffer, model = Buffer(None), list[tuple[sb.Rollout, float, int]]()  # rollout, cost, skips
    for number, (move, what, skips) in enumerate(moves):
        rows = np.unique([int(one * len(model)) for one in what] if isinstance(what, list) and model else [])
        rows = rows.astype(np.int64)
        if move == "add":
            model.append((rollout(what, str(number)), float(what), skips))
            buffer.add(model[-1][0], float(what), float(number), skips)
        elif move == "add many":
            for length in range(what):
                name, cost = f"{number}-{length}", float(length % 17)
                model.append((rollout(1 + length % 7, name), cost, skips))
                buffer.add(model[-1][0], cost, float(number), skips)
        elif move == "remove":
            assert buffer.remove(rows) == [model[row][0] for row in rows]
            model = [one for row, one in enumerate(model) if row not in rows]
        elif move == "pass over":  # all but these
            could_go = np.ones(len(model), dtype=bool)
            could_go[rows] = False
            buffer.pass_over(could_go)
            model = [(one, cost, n + bool(could)) for (one, cost, n), could in zip(model, could_go, strict=True)]
        elif move == "reprice":
            model = [(one, cost * what, n) for one, cost, n in model]
            buffer.reprice(np.array([cost for _, cost, _ in model]))
        else:
            in_order = sorted(one.num_tokens for one, _, _ in model)
            fractions = (0.0, 0.5, 0.9, 1.0)
            expected = tuple(in_order[round(f * (len(model) - 1))] for f in fractions) if model else ()
            assert buffer.length_quantiles(fractions) == expected
            waiting = buffer.waiting(np.zeros(len(model), dtype=bool))
            assert waiting.costs.tolist() == [cost for _, cost, _ in model]
            assert buffer.by_cost().tolist() == sorted(range(len(model)), key=lambda row: (model[row][1], row))
        assert buffer.rollouts() == [one for one, _, _ in model]
        assert buffer.skips.tolist() == [n for _, _, n in model]
        verify_buffer(buffer)


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
