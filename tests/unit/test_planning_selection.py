"""Who goes now: plan_batch and planning.choose. The guarantees are driven over many steps, at tiny sizes."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stream_balancer as sb
from stream_balancer import planning
from stream_balancer.core.machine import BalancerCore
from stream_balancer.planning import LengthBias, Plan, PlanKnobs, Waiting, plan_batch, smallest_max_skips
from stream_balancer.planning.cost_order import CostOrder
from stream_balancer.planning.outliers import Candidates, choose
from stream_balancer.planning.selection import Units, select
from stream_balancer.planning.swaps import swap_with_waiting
from stream_balancer.testing import make_rollout


def waiting(costs, *, lengths=None, skips=None, due=None, groups=None, complete=None):
    costs = np.asarray(costs, dtype=np.float64)
    n = costs.size
    return Waiting(
        costs=costs,
        lengths=np.maximum(costs, 1).astype(np.int64) if lengths is None else np.asarray(lengths, dtype=np.int64),
        skips=np.zeros(n, dtype=np.int64) if skips is None else np.asarray(skips, dtype=np.int64),
        due=np.zeros(n, dtype=np.bool_) if due is None else np.asarray(due, dtype=np.bool_),
        groups=np.full(n, -1, dtype=np.int64) if groups is None else np.asarray(groups, dtype=np.int64),
        group_complete=np.ones(n, dtype=np.bool_) if complete is None else np.asarray(complete, dtype=np.bool_),
    )


def picked(plan):
    return np.sort(np.concatenate([np.empty(0, dtype=np.int64), *(one for share in plan.ranks for one in share)]))


def latest_finish(plan, columns, knobs):
    """When the last rank is done: of micro-batches that cost rows x the longest, and at which the ranks meet, if so."""
    of_one = (lambda costs: costs.size * costs.max()) if knobs.padded else np.sum
    took = [[float(of_one(columns.costs[one])) for one in share] for share in plan.ranks]
    if knobs.sync == "micro_batch":
        return sum(map(max, zip_longest(*took, fillvalue=0.0)))
    return max(map(sum, took))


def check(plan, columns, knobs):
    chosen = picked(plan)
    assert np.unique(chosen).size == chosen.size
    assert len(plan.ranks) == knobs.dp_size
    assert all(one.size for share in plan.ranks for one in share)
    loads = [sum(columns.costs[one].sum() for one in share) for share in plan.ranks]
    np.testing.assert_allclose(plan.loads, loads)
    assert plan.finish >= plan.lower_bound * (1 - 1e-12)
    if chosen.size and plan.loads.sum() > 0:
        assert plan.imbalance == pytest.approx(latest_finish(plan, columns, knobs) / plan.loads.mean() - 1, abs=1e-9)
    if chosen.size >= knobs.dp_size and knobs.max_tokens_per_micro_batch is None:
        assert all(share for share in plan.ranks)
    return chosen


heavy_tails = st.sampled_from([0.0, 1.0, 1.0, 2.0, 3.0, 5.0, 8.0, 40.0, 200.0, 1000.0])


class Stream:
    """What waits, over many steps."""

    def __init__(self):
        self.costs, self.label = np.empty(0), 0
        self.lengths, self.skips, self.groups = (np.empty(0, dtype=np.int64) for _ in range(3))

    def come(self, costs, *, lengths=None, grouped=False):
        """Rollouts, together a group if they are siblings."""
        new = {
            "costs": costs,
            "lengths": np.maximum(costs, 1) if lengths is None else lengths,
            "skips": 0,
            "groups": self.label if grouped else -1,
        }
        for name, values in new.items():
            column = getattr(self, name)
            more = np.broadcast_to(np.asarray(values), len(costs)).astype(column.dtype)
            setattr(self, name, np.concatenate((column, more)))
        self.label += 1

    @property
    def columns(self):
        return waiting(self.costs, lengths=self.lengths, skips=self.skips, groups=self.groups)

    def go(self, chosen, max_skips):
        """-> labels of the groups that stay. Nobody has been passed over more often than this."""
        left = np.ones(self.costs.size, dtype=np.bool_)
        left[chosen] = False
        assert not (set(self.groups[chosen]) & set(self.groups[left])) - {-1}, "siblings go together"
        for name in ("costs", "lengths", "skips", "groups"):
            setattr(self, name, getattr(self, name)[left])
        self.skips += 1
        assert max_skips is None or (self.skips <= max_skips).all()


@pytest.mark.parametrize("groups", [False, True])
@given(data=st.data())
def test_nobody_is_passed_over_more_than_max_skips_times(groups, data):
    """The guarantee, with arrivals in bursts up to the capacity that the theorem allows:
    (max_skips + 1) * (batch_size - group_size + 1), groups of any sizes up to group_size."""
    group_size = data.draw(st.integers(1, 3), "group_size") if groups else 1
    batch = data.draw(st.integers(group_size, 6), "batch")
    max_skips = data.draw(st.integers(0, 4), "max_skips")
    knobs = PlanKnobs(
        dp_size=data.draw(st.integers(1, 3)),
        batch_size=batch,
        max_skips=max_skips,
        counts="free" if groups else data.draw(st.sampled_from(["free", "equal"])),
        sync=data.draw(st.sampled_from(["step", "micro_batch"])),
        micro_batch_multiple=1 if groups else data.draw(st.integers(1, 2)),
        whole_groups=groups,
        group_size=group_size,
    )
    stream = Stream()
    for step in range(data.draw(st.integers(1, 12), "steps")):
        for size in data.draw(st.lists(st.integers(1, group_size), max_size=8), "sizes"):
            if stream.costs.size + size > (max_skips + 1) * (batch - group_size + 1):
                break
            stream.come(data.draw(st.lists(heavy_tails, min_size=size, max_size=size)), grouped=groups)
        if stream.costs.size < batch:
            continue
        columns = stream.columns
        plan = plan_batch(columns, knobs, num_rollouts=batch, step=step)
        chosen = check(plan, columns, knobs)
        assert batch - group_size < chosen.size <= batch
        assert plan.incomplete_groups == ()
        stream.go(chosen, max_skips)


@given(st.data())
def test_exactly_batch_size_and_the_due_go_now(data):
    costs = data.draw(st.lists(heavy_tails, min_size=1, max_size=24))
    n = len(costs)
    knobs = PlanKnobs(
        dp_size=data.draw(st.integers(1, 4)),
        batch_size=data.draw(st.integers(1, n)),
        max_skips=6,
        counts=data.draw(st.sampled_from(["free", "equal"])),
        sync=data.draw(st.sampled_from(["step", "micro_batch"])),
        padded=data.draw(st.booleans()),
        max_tokens_per_micro_batch=data.draw(st.sampled_from([None, 1000, 1500])),
        order=data.draw(st.sampled_from(["heaviest_first", "pipeline"])),
    )
    due = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    skips = np.sort(data.draw(st.lists(st.integers(0, 6), min_size=n, max_size=n)))[::-1]
    number = data.draw(st.integers(1, knobs.batch_size))
    columns = waiting(costs, due=due, skips=skips)
    before = [column.copy() for column in (columns.costs, columns.lengths, columns.skips, columns.due)]
    chosen = check(plan_batch(columns, knobs, num_rollouts=number, step=3), columns, knobs)
    assert chosen.size == number
    after = (columns.costs, columns.lengths, columns.skips, columns.due)
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
    urgent = np.flatnonzero(due | (skips >= 6))
    if urgent.size <= number and number == knobs.batch_size and n <= 2 * number:
        assert set(urgent) <= set(chosen)
    again = picked(plan_batch(columns, knobs, num_rollouts=number, step=3))
    assert (again == chosen).all()


def test_outliers_wait_and_then_go_together():
    rng = np.random.default_rng(0)
    knobs = PlanKnobs(dp_size=4, batch_size=16, max_skips=6)
    stream, came = Stream(), 0
    heavies_together = []
    for step in range(60):
        need = 32 - stream.costs.size
        stream.come(np.where((np.arange(came, came + need) % 16) == 0, 4000.0, rng.uniform(90, 110, need)))
        came += need
        chosen = picked(plan_batch(stream.columns, knobs, num_rollouts=16, step=step))
        heavies_together.append(int((stream.costs[chosen] == 4000.0).sum()))
        stream.go(chosen, 6)
    alone = [number for number in heavies_together[10:] if number]
    assert min(alone) >= 4  # one for every rank, never one for a step


def test_under_equal_counts_the_lightest_lie_beside_an_outlier():
    """700 beside 100, 100, 100 and four of 250: it need not wait, though others of the window are heavier."""
    columns, knobs = waiting([700.0, 100.0, 100.0, 100.0] + [250.0] * 12), PlanKnobs(2, 8, 8, counts="equal")
    _, go = select(columns, Units.of(columns, knobs), knobs, 8)
    assert np.flatnonzero(go).tolist() == list(range(8))


@pytest.mark.parametrize("outliers", [1, 2])
def test_under_equal_counts_the_lightest_go_with_outliers_that_must(outliers):
    """Three beside each: with heavier ones its rank would take longer, and the step waits for it."""
    ranks = 2 * outliers
    costs = [2400.0] * outliers + [100.0] * (3 * outliers) + [500.0] * (12 * outliers)
    columns, knobs = waiting(costs), PlanKnobs(ranks, 4 * ranks, 8, counts="equal")
    columns.skips[:outliers] = 8
    _, go = select(columns, Units.of(columns, knobs), knobs, 4 * ranks)
    assert np.flatnonzero(go).tolist() == list(range(4 * ranks))


def test_no_more_rollouts_above_half_a_share_go_than_there_are_ranks():
    """Many are cut at the longest length: of three the newest waits, or two of them would lie on one rank."""
    columns, knobs = waiting([100.0, 100.0, 100.0] + [20.0] * 9), PlanKnobs(2, 6, 8)
    _, go = select(columns, Units.of(columns, knobs), knobs, 6)
    assert np.flatnonzero(go).tolist() == [0, 1, 3, 4, 5, 6]


def test_a_heavy_tail_idles_little_for_little_delay_of_its_longest() -> None:
    """Seeded faults: no level beyond what must go (33 %), or no filling up (18 %)."""
    knobs, work, took, delays = PlanKnobs(dp_size=8, batch_size=32, max_skips=8), 0.0, 0.0, []
    for seed in range(1, 4):
        lengths = np.clip(np.random.default_rng(seed).lognormal(7.5, 1.3, 2048), 64, 65536)
        costs, stream = lengths * (lengths + 24576.0), Stream()
        heavy = np.quantile(costs, 0.9)
        for step in range(60):
            came = 32 * step + 32 * (step > 0)
            stream.come(costs[came : 32 * step + 64])
            plan = plan_batch(stream.columns, knobs, num_rollouts=32, step=step)
            chosen = picked(plan)
            if step >= 10:
                work, took = work + stream.costs[chosen].sum() / 8, took + plan.finish
                delays += stream.skips[chosen][stream.costs[chosen] > heavy].tolist()
            stream.go(chosen, 8)
    assert 1 - work / took < 0.155
    assert np.mean(delays) < 3.8


@pytest.mark.parametrize(("skips", "goes"), [(0, False), (3, False), (8, True)])
def test_an_outlier_goes_with_another_once_it_is_urgent(skips: int, goes: bool) -> None:
    """A step as long as the heavier one wastes more now, and saves a step of its own: the sooner the surer."""
    costs = [1000.0, 2000.0] + [100.0] * 30
    columns = waiting(costs, skips=[9, skips] + [0] * 30)
    plan = plan_batch(columns, PlanKnobs(dp_size=4, batch_size=16, max_skips=9), num_rollouts=16, step=0)
    assert 0 in picked(plan)
    assert (1 in picked(plan)) == goes


def test_a_group_larger_than_a_batch_goes_in_pieces_and_is_flagged():
    knobs = PlanKnobs(dp_size=2, batch_size=4, max_skips=5, whole_groups=True)
    plan = plan_batch(waiting(np.ones(10), groups=[7] * 10), knobs, num_rollouts=4, step=0)
    assert picked(plan).tolist() == [0, 1, 2, 3]
    assert plan.incomplete_groups == (7,)


def test_fewer_rollouts_than_ranks_leave_the_last_ranks_empty():
    plan = plan_batch(waiting([3.0, 2.0]), PlanKnobs(dp_size=4, batch_size=8, max_skips=5), num_rollouts=2, step=0)
    assert sorted(len(share) for share in plan.ranks) == [0, 0, 1, 1]
    nothing = plan_batch(waiting([]), PlanKnobs(dp_size=4, batch_size=8, max_skips=5), num_rollouts=0, step=0)
    assert [share for share in nothing.ranks if share] == []


@pytest.mark.parametrize(
    ("window", "batch", "capacity", "group", "least"),
    [
        (512, 256, 1024, 1, 3),
        (768, 256, 1024, 1, 6),
        (256, 256, 256, 1, 0),
        (512, 256, 4096, 1, 15),
        (64, 32, 128, 8, 5),
    ],
)
def test_smallest_max_skips(window, batch, capacity, group, least):
    assert smallest_max_skips(window, batch, capacity, group) == least


# -- groups -----------------------------------------------------------------------------------------------------------


def plan_groups(
    costs_of: list[list[float]], dp_size: int, batch_size: int, *, max_skips: int = 8, **more: Any
) -> tuple[set[int], Plan]:
    """-> (the groups that go, the plan). ``more``: ``must``, ``incomplete``: groups; ``tokens``; and knobs."""
    costs = np.concatenate(costs_of)
    labels = np.repeat(np.arange(len(costs_of)), [len(group) for group in costs_of])
    of = {name: np.isin(labels, more.pop(name, [])) for name in ("must", "incomplete")}
    waiting = replace(
        Waiting.of(costs), groups=labels, skips=np.where(of["must"], max_skips, 0), group_complete=~of["incomplete"]
    )
    waiting = replace(waiting, lengths=np.array(more.pop("tokens", waiting.lengths)))
    knobs = PlanKnobs(dp_size, batch_size, max_skips, whole_groups=True, group_size=max(map(len, costs_of)), **more)
    plan = plan_batch(waiting, knobs, num_rollouts=int((~of["incomplete"]).sum()), step=0)
    return set(labels[np.concatenate([one for share in plan.ranks for one in share])].tolist()), plan


UNEVEN = [[900.0, 100.0], [500.0, 100.0], [900.0, 110.0], [700.0, 100.0], [520.0, 90.0]]


def test_a_group_is_swapped_for_a_waiting_one_that_makes_the_step_even() -> None:
    went, plan = plan_groups(UNEVEN, 2, 4)
    assert went != {0, 1}
    assert plan.imbalance < 0.01


def test_an_incomplete_group_does_not_come_in() -> None:
    went, _ = plan_groups(UNEVEN, 2, 4, incomplete=[2, 3, 4])
    assert went == {0, 1}


ALMOST = [[400.0, 250.0], [400.0, 150.0], [400.0, 100.0], [600.0, 150.0]]
"""The third group instead of the first makes the step even."""


def test_no_group_comes_in_that_costs_ranks_in_step_a_micro_batch_more() -> None:
    in_step: dict[str, Any] = {"sync": "micro_batch", "max_tokens_per_micro_batch": 100}
    assert plan_groups(ALMOST, 2, 4, tokens=[50] * 8, **in_step)[0] == {1, 2}
    assert plan_groups(ALMOST, 2, 4, tokens=[50, 50, 50, 50, 100, 50, 50, 50], **in_step)[0] == {0, 1}


@settings(max_examples=40)
@given(st.data())
def test_swaps_keep_groups_whole_and_their_number(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=4, max_size=16), "sizes")
    costs = np.array(data.draw(st.lists(st.floats(0.01, 100.0), min_size=sum(sizes), max_size=sum(sizes)), "costs"))
    groups = [one.tolist() for one in np.split(costs, np.cumsum(sizes)[:-1])]
    must = data.draw(st.sets(st.integers(0, len(sizes) - 1), max_size=2), "must")
    dp_size, counts = data.draw(st.integers(1, 3), "ranks"), data.draw(st.sampled_from(["free", "equal"]), "counts")
    cap = data.draw(st.sampled_from([None, 150]), "cap")
    more: dict[str, Any] = {"counts": counts, "max_tokens_per_micro_batch": cap, "must": list(must)}
    went, plan = plan_groups(groups, dp_size, 6, **more)
    picked = np.sort(np.concatenate([one for share in plan.ranks for one in share]))
    assert picked.size == sum(sizes[group] for group in went) <= 6  # every one of them once
    assert picked.size > min(6, sum(sizes)) - max(sizes)
    assert must <= went
    if counts == "equal":
        held = [sum(map(len, share)) for share in plan.ranks]
        assert max(held) - min(held) <= 1


def test_a_stream_of_groups_idles_little() -> None:
    """Groups of 8, 32 rollouts on 8 ranks, quadratic cost: without swaps 0.8 %."""
    rng, stream, mean, finish = np.random.default_rng(8), Stream(), 0.0, 0.0
    knobs = PlanKnobs(dp_size=8, batch_size=32, max_skips=8, whole_groups=True, group_size=8)
    for step in range(20):
        while stream.costs.size < 64:
            lengths = rng.choice(np.exp(8.0 + 0.4 * rng.standard_normal() + 0.4 * rng.standard_normal(3)), 8)
            stream.come(lengths * lengths + 24_576.0 * lengths, grouped=True)
        plan = plan_batch(stream.columns, knobs, num_rollouts=64, step=step)
        mean, finish = mean + plan.loads.mean(), finish + plan.loads.max()
        stream.go(np.concatenate([one for share in plan.ranks for one in share]), 8)
    assert 1.0 - mean / finish < 0.005


def step_time(costs, ranks):
    """Sum over locksteps of the rank that is done last."""
    works = np.zeros((max(map(len, ranks)), len(ranks)))
    for rank, share in enumerate(ranks):
        works[: len(share), rank] = [costs[one].sum() for one in share]
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
            work = stream.costs[chosen].sum() / knobs.dp_size
            figures.append((work, step_time(stream.costs, ranks), held[chosen].sum()))
        stream.go(chosen, knobs.max_skips)
    return np.array(figures)


def idle(figures):
    return 100 * (1 - figures[:, 0].sum() / figures[:, 1].sum())


def capped(dp_size, batch_size, cap, max_skips=8, **more):
    return PlanKnobs(
        dp_size=dp_size,
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


def test_a_step_that_one_micro_batch_a_rank_cannot_hold_does_not_balance():
    """A second micro-batch would have few rollouts to even out: the long ones go where they fit."""
    tokens = np.array([90, 90, 80, 80, 20, 20, 30, 30])  # oldest first
    nobody, costs = np.zeros(8, dtype=np.bool_), tokens.astype(float)
    units = Candidates(CostOrder(costs), costs, must=nobody, remaining=np.full(8, 8), num_more=4, ranks=2)
    assert np.flatnonzero(choose(units)).tolist() == [0, 1, 2, 3]
    assert np.flatnonzero(choose(replace(units, tokens=tokens, room=190.0))).tolist() == [4, 5, 6, 7]
    assert np.flatnonzero(choose(replace(units, tokens=tokens, room=200.0))).tolist() == [2, 3, 4, 5]
    # 90 must go: the oldest ones that fit beside it
    must = tokens == 90
    go = choose(replace(units, must=must, num_more=2, tokens=tokens, room=240.0))
    assert np.flatnonzero(go).tolist() == [0, 1, 4, 5]


def test_few_rollouts_in_two_locksteps_are_exchanged_with_those_that_wait():
    lengths = tails(45, 32 * 44, 0.5, 9_000)
    figures = run(lengths, capped(8, 32, int(lengths.max())), 64, 40, warm_up=8)
    assert idle(figures) < 2.5  # 3.1 without the exchanges, and with micro-batches as full as can be


def test_what_goes_in_another_lockstep_does_not_come_in():
    costs = np.array([50.0, 40.0, 40.0, 30.0, 30.0, 28.0])
    row, nobody, order = [[np.array([0, 1])], [np.array([2, 3])]], np.zeros(6, dtype=np.bool_), CostOrder(costs)
    elsewhere = np.arange(6) == 4

    def after(elsewhere=None):
        return [one.tolist() for [one] in swap_with_waiting(costs, row, nobody, order, elsewhere=elsewhere)]

    assert after() == [[0, 4], [1, 2]]
    assert after(elsewhere) == [[0, 5], [2, 3]]


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


def test_a_pool_of_ones_own_passes_nobody_over_too_often() -> None:
    random = np.random.default_rng(0)
    pool, idle, taken = [(int(length), 0) for length in random.lognormal(6, 1.2, 32).astype(int) + 1], [], 0
    for step in range(60):
        lengths, skips = zip(*pool, strict=True)
        go = planning.choose(lengths, dp_size=4, batch_size=16, max_skips=8, skips=skips, step=step)
        assert go.size == 16
        assert (np.diff(go) > 0).all()
        parts = planning.split(np.array(lengths)[go], 4)
        loads = [np.array(lengths)[go][part].sum() for part in parts]
        idle.append(1 - np.mean(loads) / max(loads))
        taken += go.size
        assert max(skips) <= 8
        left = [(length, skipped + 1) for place, (length, skipped) in enumerate(pool) if place not in go]
        pool = left + [(int(length), 0) for length in random.lognormal(6, 1.2, 16).astype(int) + 1]
    assert taken == 60 * 16
    assert np.mean(idle) < 0.1


def test_siblings_go_together_and_who_is_due_goes() -> None:
    groups = [7, 3, 7, 3, 5, 5, 9]
    go = planning.choose([10] * 7, dp_size=2, batch_size=4, groups=groups, due=[False] * 4 + [True] * 2 + [False])
    assert sorted(groups[place] for place in go) in ([3, 3, 5, 5], [5, 5, 7, 7])
    assert planning.choose([5, 6], dp_size=1, batch_size=9).tolist() == [0, 1]
    one = planning.choose([10, 10, 10, 10], [1.0, 9.0, 1.0, 1.0], dp_size=2, batch_size=2)
    assert 1 not in one, "what balances is the work, not the tokens"


def test_groups_are_complete_as_they_stand_unless_their_size_is_given() -> None:
    groups = [7, 7, 7, 3, 3, 5]
    go = planning.choose([10] * 6, dp_size=2, batch_size=5, groups=groups)
    assert sorted(groups[place] for place in go) == [3, 3, 7, 7, 7]
    go = planning.choose([10] * 6, dp_size=2, batch_size=5, groups=groups, group_size=2 + 1)
    assert [groups[place] for place in go] == [7, 7, 7], "3 and 5 wait for siblings"
    alone = planning.choose([10] * 4, dp_size=2, batch_size=2, groups=[-1, -1, -1, -1])
    assert alone.size == 2, "a negative label is no group"


def test_what_is_chosen_is_int64_even_where_nothing_may_go() -> None:
    go = planning.choose([10, 10], dp_size=1, batch_size=4, groups=[1, 2], group_size=2)
    assert go.shape == (0,)
    assert go.dtype == np.int64
    assert planning.choose([10, 10], dp_size=1, batch_size=1).dtype == np.int64
    whole = planning.choose([10] * 6, dp_size=2, batch_size=5, groups=[1, 1, 1, 2, 2, 2])
    assert whole.tolist() == [0, 1, 2], "two groups are more than a batch, and none is cut"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lengths": []}, "lengths must be"),
        ({"lengths": [1, 0]}, "tokens >= 1"),
        ({"costs": [1.0]}, "costs as many"),
        ({"skips": [1, 2, 3]}, r"skips must be \[2\]"),
        ({"groups": [1]}, r"groups must be \[2\]"),
        ({"skips": 3}, r"skips must be \[2\]"),
        ({"due": True}, r"due must be \[2\]"),
        ({"skips": [0, -1]}, "skips must be whole numbers >= 0"),
        ({"skips": [0.5, 1.0]}, "skips must be whole numbers"),
        ({"due": [2, 0]}, r"due must be \[2\] booleans"),
        ({"groups": [0.5, 1.0]}, "groups must be whole numbers"),
        ({"lengths": [1.5, 2.0]}, "lengths must be whole numbers"),
        ({"lengths": [[3, 4]]}, r"lengths must be \[n\]"),
        ({"lengths": 3}, r"lengths must be \[n\]"),
        ({"max_skips": -1}, r"max_skips \(-1\) must be >= 0"),
        ({"counts": "even"}, "counts must be"),
        ({"dp_size": 3}, "every rank gets a rollout"),
        ({"groups": [1, 1], "group_size": 3}, r"group_size \(3\) must be .* batch_size \(2\)"),
        ({"groups": [1, 1], "group_size": 1}, r"group 1 has 2 rollouts, more than group_size \(1\)"),
        ({"groups": [1, 1, 1], "lengths": [1, 1, 1]}, r"group 1 has 3 rollouts, more than batch_size \(2\)"),
        ({"group_size": 2}, "group_size is given without groups"),
    ],
)
def test_columns_that_do_not_fit(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        planning.choose(**{"lengths": [3, 4], "dp_size": 1, "batch_size": 2} | changes)


def test_agrees_with_numpy():
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(8, 1, 20_000).round() + 1
    delays = rng.integers(0, 3, 20_000) + (lengths > np.quantile(lengths, 0.9)) * 2
    bias = LengthBias()
    for start in range(0, 20_000, 50):
        bias.record(lengths[start : start + 50], delays[start : start + 50])
    summary = bias.summary()
    assert summary.num_dispatched == 20_000
    assert summary.mean_delay == pytest.approx(delays.mean())
    assert summary.length_delay_correlation == pytest.approx(np.corrcoef(lengths, delays)[0, 1])
    deciles = [delays[part].mean() for part in np.array_split(np.argsort(lengths), 10)]
    assert summary.delay_per_decile == pytest.approx(deciles, abs=0.3)


def test_nothing_yet_is_nan():
    bias = LengthBias()
    bias.record([], [])
    assert math.isnan(bias.summary().mean_delay)
    assert all(map(math.isnan, bias.summary().delay_per_decile))
    bias.record([5, 5], [0, 1])
    assert math.isnan(bias.summary().length_delay_correlation)
    with pytest.raises(ValueError, match="alike"):
        bias.record([5, 6], [0])


@pytest.mark.parametrize("seed", range(0, 400, 40))
def test_exchanges_with_those_that_wait_never_make_ranks_idle_more(seed: int) -> None:
    """Bringing several late ranks down may starve the others: then the batch stays as it was."""
    for number in range(seed, seed + 40):
        chance = np.random.default_rng(number)
        n, ranks = chance.integers(4, 12), chance.integers(2, 4)
        costs = np.floor(chance.lognormal(3, 1.2, n + chance.integers(1, 8))) + 1
        shares = [[np.sort(one)] for one in np.array_split(chance.permutation(costs.size)[:n], ranks)]
        after = swap_with_waiting(costs, shares, np.zeros(costs.size, dtype=np.bool_), CostOrder(costs))
        idle = [
            1 - np.mean(loads) / np.max(loads) for loads in ([costs[one].sum() for [one] in x] for x in (shares, after))
        ]
        assert idle[1] <= idle[0], number
