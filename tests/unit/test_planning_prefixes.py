"""Plans where siblings of a micro-batch pay their prefix once: what they cost, and that none is worse than without."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_planning_context_parallel import check_degrees

from stream_balancer.planning import PlanKnobs, Waiting, plan_batch
from stream_balancer.planning.baselines import plan_fifo, plan_round_robin
from stream_balancer.planning.plan import part_cost, work_in
from stream_balancer.planning.prefixes import prefix_bound


def cost(tokens):
    return tokens * (tokens + 50.0)


def columns(prompts, answers, groups, *, share=True):
    """Rollouts by the tokens of their prompt and of their answer; group -1 shares nothing."""
    prompts, answers, groups = (np.asarray(one, dtype=np.int64) for one in (prompts, answers, groups))
    shared = np.where(groups >= 0, prompts, 0)
    waiting = replace(Waiting.of(cost(prompts + answers)), lengths=prompts + answers, groups=groups)
    return replace(waiting, prefix_costs=cost(shared), prefix_lengths=shared) if share else waiting


def micro_batch_cost(waiting, rows):
    """In the plainest words."""
    paid = {int(waiting.groups[i]): waiting.prefix_costs[i] for i in rows if waiting.prefix_lengths[i]}
    return sum(waiting.costs[i] - waiting.prefix_costs[i] for i in rows) + sum(paid.values())


def unique_tokens(waiting, rows):
    own = sum(int(waiting.lengths[i] - waiting.prefix_lengths[i]) for i in rows)
    return own + sum({int(waiting.groups[i]): int(waiting.prefix_lengths[i]) for i in rows}.values())


answers = st.sampled_from([1, 1, 3, 10, 30, 100, 300, 1000])


@st.composite
def steps(draw, most_groups=10, most_siblings=6):
    """Groups of siblings, and some rollouts without."""
    sizes = draw(st.lists(st.integers(1, most_siblings), min_size=1, max_size=most_groups))
    prompt = [draw(st.sampled_from([1, 5, 50, 500])) for _ in sizes]
    groups = [draw(st.just(g) | st.just(-1)) if size == 1 else g for g, size in enumerate(sizes) for _ in range(size)]
    prompts = [p for p, size in zip(prompt, sizes, strict=True) for _ in range(size)]
    waiting = columns(prompts, [draw(answers) for _ in prompts], groups)
    order = np.array(draw(st.permutations(range(len(prompts)))), dtype=np.int64)
    return replace(
        waiting,
        **{
            name: getattr(waiting, name)[order]
            for name in ("costs", "lengths", "groups", "prefix_costs", "prefix_lengths")
        },
    )


def without_sharing(waiting):
    return replace(waiting, prefix_costs=None, prefix_lengths=None)


def knobs_of(waiting, ranks, **more):
    return PlanKnobs(**{"dp_size": ranks, "batch_size": waiting.costs.size, "max_skips": 8, **more})


def plan(waiting, knobs, step=0):
    return plan_batch(waiting, knobs, num_rollouts=waiting.costs.size, step=step)


def check(found, waiting, knobs):
    rows = [one for share in found.ranks for one in share]
    assert np.sort(np.concatenate(rows)).tolist() == list(range(waiting.costs.size))  # everybody, once
    loads = [sum(micro_batch_cost(waiting, one) for one in share) for share in found.ranks]
    overheads = np.zeros(knobs.dp_size)
    if knobs.max_tokens_per_micro_batch is not None or knobs.micro_batch_multiple > 1:
        numbers = np.array([max(len(share), 1) for share in found.ranks])
        most = numbers.max() if knobs.micro_batch_counts == "equal" else numbers
        run = -(-most // knobs.micro_batch_multiple) * knobs.micro_batch_multiple
        overheads = overheads + knobs.overhead_cost * run
    if knobs.max_tokens_per_micro_batch is not None:
        for one in rows:
            fits = unique_tokens(waiting, one) <= knobs.max_tokens_per_micro_batch
            assert fits or (len(one) == 1 and knobs.oversize == "alone")
    np.testing.assert_allclose(found.loads, loads + overheads)
    assert found.finish == pytest.approx((loads + overheads).max())
    assert found.lower_bound <= found.finish * (1 + 1e-9)
    for one in rows:  # siblings lie side by side
        labels = [g for g in waiting.groups[one].tolist() if g >= 0]
        assert sum(a != b for a, b in pairwise(labels)) == max(len(set(labels)) - 1, 0)


@given(steps(), st.integers(1, 6), st.integers(0, 7))
def test_a_step_is_never_longer_than_without_sharing(waiting, ranks, step):
    knobs = knobs_of(waiting, ranks)
    found = plan(waiting, knobs, step)
    check(found, waiting, knobs)
    dense = plan(without_sharing(waiting), knobs, step)
    # the dense plan counted with sharing is no worse than itself, and one of those compared
    counted = max(work_in(waiting, share).sum() for share in dense.ranks)
    assert found.finish <= counted * (1 + 1e-9) <= dense.finish * (1 + 2e-9)


@given(
    steps(),
    st.integers(1, 4),
    st.integers(0, 7),
    st.sampled_from([1100, 1600, 3000]),
    st.sampled_from(["equal", "free"]),
    st.sampled_from([0.0, 1e4, 1e6]),
    st.booleans(),
    st.sampled_from([1, 2, 3]),
)
def test_a_cap_holds_in_unique_tokens_and_no_step_is_longer(
    waiting, ranks, step, cap, counts, overhead, groups, multiple
):
    knobs = knobs_of(
        waiting,
        ranks,
        max_tokens_per_micro_batch=cap,
        micro_batch_counts=counts,
        overhead_cost=overhead,
        whole_groups=groups,
        oversize="alone",
        micro_batch_multiple=multiple,
    )
    found = plan(waiting, knobs, step)
    check(found, waiting, knobs)
    assert found.finish <= plan(without_sharing(waiting), knobs, step).finish * (1 + 1e-9)


def optimum(waiting, ranks):
    number = waiting.costs.size
    return min(
        max(micro_batch_cost(waiting, [i for i in range(number) if place[i] == rank]) for rank in range(ranks))
        for place in product(range(ranks), repeat=number)
    )


@given(steps(most_groups=3, most_siblings=3).filter(lambda waiting: waiting.costs.size <= 7), st.integers(1, 3))
def test_no_layout_at_all_is_done_before_the_bound(waiting, ranks):
    best = optimum(waiting, ranks)
    assert prefix_bound(waiting.sets(), ranks) <= best * (1 + 1e-9)
    assert best <= plan(waiting, knobs_of(waiting, ranks)).finish * (1 + 1e-9) <= 1.5 * best


@given(
    steps(), st.integers(2, 6), st.integers(0, 7), st.sampled_from([None, 200, 700]), st.sampled_from(["equal", "free"])
)
def test_rollouts_that_ranks_share_pay_their_whole_prefix_and_the_others_share_theirs(
    waiting, ranks, step, cap, counts
):
    shares = {"cp_sizes": (1, 2, 4), "cp_min_tokens": 40, "cp_overhead": 0.1}
    capped = {"max_tokens_per_micro_batch": cap, "micro_batch_counts": counts, "oversize": "alone"}
    knobs = knobs_of(waiting, ranks, **shares, **capped, overhead_cost=100.0)
    found = plan(waiting, knobs, step)
    check_degrees(found)
    degrees = found.degrees or [[1] * len(share) for share in found.ranks]
    loads, seen = np.zeros(ranks), []
    for rank, (share, of_rank) in enumerate(zip(found.ranks, degrees, strict=True)):
        for one, degree in zip(share, of_rank, strict=True):
            loads[rank] += part_cost(micro_batch_cost(waiting, one), degree, 0.1)
            seen += one.tolist()
            assert degree == 1 or len(one) == 1
            if cap is not None and waiting.lengths[one].max() <= cap:
                assert unique_tokens(waiting, one) <= cap
    assert set(seen) == {*range(waiting.costs.size)}
    numbers = np.array([max(len(share), 1) for share in found.ranks])
    loads += 100.0 * (numbers.max() if counts == "equal" else numbers)
    np.testing.assert_allclose(found.loads, loads)
    assert found.lower_bound <= found.finish * (1 + 1e-9)
    assert found.finish == pytest.approx(loads.max())
    assert found.finish <= plan(without_sharing(waiting), knobs, step).finish * (1 + 1e-9)
    if cap is not None and waiting.lengths.max() <= cap:  # else it counts no overhead
        assert found.finish <= plan(waiting, replace(knobs, cp_sizes=(1,)), step).finish * (1 + 1e-9)


def test_a_group_is_split_only_where_that_makes_the_last_rank_earlier():
    # two groups of long prompts: whole, one on each rank
    waiting = columns([500] * 4, [10, 20, 30, 40], [0, 0, 1, 1])
    ranks = plan(waiting, knobs_of(waiting, 2)).ranks
    assert sorted(one[0].tolist() for one in ranks) == [[0, 1], [2, 3]]
    # a group of long answers beside three rollouts of next to nothing: its prompt is paid twice
    waiting = columns([50] * 5, [1000, 900, 10, 10, 10], [0, 0, -1, -1, -1])
    ranks = plan(waiting, knobs_of(waiting, 2)).ranks
    assert {tuple(np.intersect1d(np.concatenate(share), [0, 1])) for share in ranks} == {(0,), (1,)}


def test_the_usual_policies_are_counted_with_sharing_too():
    waiting = columns([500] * 6, [10, 20, 30, 40, 50, 60], [0, 0, 0, 1, 1, 1])
    knobs = knobs_of(waiting, 2)
    fifo = plan_fifo(waiting, knobs, num_rollouts=6, step=0)
    check(fifo, waiting, knobs)
    in_turn = plan_round_robin(waiting, knobs, num_rollouts=6, step=0)
    assert [one[0].tolist() for one in in_turn.ranks] == [[0, 2, 4], [1, 3, 5]]
    np.testing.assert_allclose(in_turn.loads, [micro_batch_cost(waiting, one[0]) for one in in_turn.ranks])
    assert fifo.finish < in_turn.finish
    assert fifo.lower_bound == in_turn.lower_bound
