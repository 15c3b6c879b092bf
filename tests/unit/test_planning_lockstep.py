"""Ranks that meet at every micro-batch under a token cap: who goes, in how long a step, and what no step can beat."""

from __future__ import annotations

import numpy as np
import pytest
from test_planning_selection import Stream

import stream_balancer as sb
from stream_balancer.core.machine import BalancerCore
from stream_balancer.planning import PlanKnobs, plan_batch
from stream_balancer.testing import make_rollout


def step_time(costs, ranks, speeds=None):
    """Sum over locksteps of the rank that is done last."""
    rate = np.ones(len(ranks)) if speeds is None else speeds
    works = np.zeros((max(map(len, ranks)), len(ranks)))
    for rank, share in enumerate(ranks):
        works[: len(share), rank] = [costs[one].sum() / rate[rank] for one in share]
    return float(works.max(axis=1).sum())


# ---------------------------------------------------------------------------------------------------------------------
# Who goes
# ---------------------------------------------------------------------------------------------------------------------


def run(lengths, knobs, window, steps, warm_up=0):
    """Dispatch after dispatch from a full window. -> [steps] (work per rank, time, tokens) of the steps after the
    warm-up; the guarantees are checked on the way."""
    stream, taken, figures = Stream(), 0, []
    for step in range(steps):
        new = lengths[taken : taken + window - stream.costs.size]
        taken += new.size
        stream.come(new * (new + 24576.0), lengths=new)
        ranks = plan_batch(stream.columns, knobs, num_rollouts=knobs.batch_size, step=step).ranks
        chosen, held = np.concatenate([one for share in ranks for one in share]), stream.lengths
        assert np.unique(chosen).size == chosen.size == knobs.batch_size
        assert all(held[one].sum() <= knobs.max_tokens_per_micro_batch for share in ranks for one in share)
        assert len({len(share) for share in ranks}) == 1
        if step >= warm_up:
            work = stream.costs[chosen].sum() / knobs.num_ranks
            figures.append((work, step_time(stream.costs, ranks), held[chosen].sum()))
        stream.go(chosen, knobs.max_skips)
    return np.array(figures)


def idle(figures):
    return 100 * (1 - figures[:, 0].sum() / figures[:, 1].sum())


def capped(num_ranks, batch_size, cap, max_skips=8, **more):
    return PlanKnobs(
        num_ranks=num_ranks,
        batch_size=batch_size,
        max_skips=max_skips,
        sync="micro_batch",
        max_tokens_per_micro_batch=cap,
        **more,
    )


def tails(seed, n, sigma=1.2, longest=32768):
    drawn = np.random.default_rng(seed).lognormal(np.log(3000), sigma, n)
    return np.clip(drawn, 64, longest).astype(np.int64)


@pytest.mark.parametrize(
    ("sigma", "longest", "room", "batch", "ranks"),
    [(1.2, 32768, 1.0, 64, 8), (0.6, 32768, 1.0, 64, 4), (1.5, 65536, 2.0, 64, 8), (0.1, 4096, 1.3, 64, 8)],
)
def test_a_window_is_never_worse_than_first_in_first_out(sigma, longest, room, batch, ranks):
    cap, steps = int(room * longest), 24
    figures = {1: [], 2: []}
    for seed in (41, 42):
        lengths = tails(seed, batch * (steps + 4), sigma, longest)
        for width, max_skips in ((1, 0), (2, 8)):
            figures[width].append(run(lengths, capped(ranks, batch, cap, max_skips), width * batch, steps, warm_up=8))
    first, window = (idle(np.concatenate(figures[width])) for width in (1, 2))
    assert window <= first + 0.1


@pytest.mark.parametrize(("sigma", "longest"), [(0.6, 6_000), (0.9, 4_000)])
def test_rollouts_cut_at_the_longest_length_go_in_locksteps_of_their_own(sigma, longest):
    lengths = tails(44, 128 * 30, sigma, longest)  # an eighth, and a third, are cut
    figures = run(lengths, capped(8, 128, longest), 256, 28, warm_up=8)
    before = run(lengths, capped(8, 128, longest, 0), 128, 28, warm_up=8)
    assert idle(figures) <= 0.8 * idle(before)


@pytest.mark.parametrize("policy", ["window", "fifo", "round_robin"])
@pytest.mark.parametrize("cost", [sb.cost.QuadraticCost(), sb.cost.PaddedCost()])
def test_a_batchs_imbalance_is_that_of_its_micro_batches(policy, cost):
    """Ranks of equal sums still wait for each other, micro-batch by micro-batch."""
    knobs = {"sync": "micro_batch", "micro_batches": sb.MicroBatches(max_tokens=100), "policy": policy, "cost": cost}
    core = BalancerCore(sb.BalancerConfig(dp_size=2, batch_size=16, window=16, **knobs))
    for number, length in enumerate([90, 70, 60, 10, 20, 30, 40, 50, 55, 45, 35, 25, 15, 5, 65, 12]):
        core.add(make_rollout(length, f"r{number}"), 0.0)
    batch = core.poll(0.0)

    def time_of(micro_batch):
        costs = [0.0 if r.is_padding else float(cost(r.num_tokens)) for r in micro_batch.rollouts]
        return len(costs) * max(costs) if cost.padded else sum(costs)

    micro_batches = [rank.micro_batches for rank in batch.ranks]
    took = sum(max(map(time_of, together)) for together in zip(*micro_batches, strict=True))
    mean = sum(batch.loads) / 2
    assert batch.finish == pytest.approx(took)
    assert batch.finish >= max(batch.loads)
    assert batch.lower_bound <= batch.finish * (1 + 1e-12)
    assert batch.imbalance == pytest.approx(took / mean - 1)
    assert core.statistics(0.0).idle_fraction == pytest.approx(1 - mean / took)
