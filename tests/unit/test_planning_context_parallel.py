"""Rollouts that several ranks share: nobody waits within a step, no plan is worse than without, the bound is one."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_balancer.planning import OversizeError, Plan, PlanKnobs, Waiting, plan_batch
from stream_balancer.planning.arrays import Floats, Ints
from stream_balancer.planning.plan import part_cost, work_in
from stream_balancer.planning.shareable import Shareable, part_tokens

SIZES = (1, 2, 4, 8)


def heavy_tail(number: int, seed: int, sigma: float = 1.5) -> tuple[Floats, Ints]:
    """(costs, lengths) [n]: some are far above a rank's fair share."""
    lengths = np.random.default_rng(seed).lognormal(8.0, sigma, number).clip(16, 300_000).astype(np.int64)
    return lengths * (lengths + 24_576.0), lengths


def window(costs: Floats, lengths: Ints) -> Waiting:
    return replace(Waiting.of(costs), lengths=lengths)


def knobs_of(dp_size: int, batch_size: int, **others: Any) -> PlanKnobs:
    own = {"cp_sizes": SIZES, "cp_min_tokens": 256, "max_skips": 8}
    return PlanKnobs(dp_size=dp_size, batch_size=batch_size, **own | others)


def planned(costs: Floats, lengths: Ints, knobs: PlanKnobs, step: int = 0) -> Plan:
    return plan_batch(window(costs, lengths), knobs, num_rollouts=min(knobs.batch_size, costs.size), step=step)


def degrees_of(plan: Plan) -> list[list[int]]:
    return plan.degrees or [[1] * len(of_rank) for of_rank in plan.ranks]


# --- what a plan has to be like --------------------------------------------------------------------------------------


def check_degrees(plan: Plan, *, locksteps: bool = False) -> None:
    """Raises ValueError unless a shared micro-batch is on all ranks of an aligned block and nowhere else, at one index
    (locksteps) or by descending degree and in one order."""
    degrees = degrees_of(plan)
    found: dict[tuple[int, int, tuple[int, ...]], list[tuple[int, int]]] = {}
    for rank, (its, of_rank) in enumerate(zip(plan.ranks, degrees, strict=True)):
        for index, (one, degree) in enumerate(zip(its, of_rank, strict=True)):
            found.setdefault((degree, rank // degree, tuple(one.tolist())), []).append((rank, index))
    for (degree, block, rollouts), places in found.items():
        if [rank for rank, _ in places] != list(range(block * degree, (block + 1) * degree)):
            raise ValueError(f"{rollouts} of degree {degree} is on {places}")
        if len({index for _, index in places}) > 1:  # the same number of others is before it, everywhere
            raise ValueError(f"{rollouts} of degree {degree} is at unlike places: {places}")
        if degree > 1 and len(rollouts) > 1:
            raise ValueError(f"{rollouts} are shared together")
    everybody = [one for _, _, rollouts in found for one in rollouts]
    if len(set(everybody)) < len(everybody):
        raise ValueError("some rollout is in two micro-batches")
    for of_rank in degrees:
        if not locksteps and of_rank != sorted(of_rank, reverse=True):
            raise ValueError(f"a rank does not run by descending degree: {of_rank}")


def gang(plan: Plan, parts: list[list[float]]) -> list[float]:
    """[rank] when it is done. Every rank runs its micro-batches in order, and begins a shared one when all others of
    the block have come to it."""
    degrees, at, now = degrees_of(plan), [0] * len(plan.ranks), [0.0] * len(plan.ranks)
    while any(at[rank] < len(its) for rank, its in enumerate(plan.ranks)):
        begun = False
        for rank, its in enumerate(plan.ranks):
            if at[rank] == len(its):
                continue
            degree, rollouts = degrees[rank][at[rank]], its[at[rank]].tolist()
            block = range(rank // degree * degree, (rank // degree + 1) * degree)
            if not all(
                at[other] < len(plan.ranks[other])
                and degrees[other][at[other]] == degree
                and plan.ranks[other][at[other]].tolist() == rollouts
                for other in block
            ):
                continue  # some rank is not there yet
            begins = max(now[other] for other in block)
            for other in block:
                now[other] = begins + parts[other][at[other]]
                at[other] += 1
            begun = True
        assert begun, "every rank waits for another"
    return now


def parts_of(plan: Plan, costs: Floats, overhead: float) -> list[list[float]]:
    """[rank][micro_batch] what it takes."""
    works = [work_in(Waiting.of(costs), its) for its in plan.ranks]
    return [
        part_cost(work, np.array(of_rank, dtype=np.int64), overhead).tolist()
        for work, of_rank in zip(works, degrees_of(plan), strict=True)
    ]


@st.composite
def steps(draw: st.DrawFn, *, most_ranks: int = 12) -> tuple[Floats, Ints, PlanKnobs]:
    dp_size = draw(st.integers(1, most_ranks))
    number = draw(st.integers(1, 5 * dp_size))
    lengths = np.array(draw(st.lists(st.integers(1, 40_000), min_size=number, max_size=number)))
    own = draw(st.booleans())
    costs = np.array(draw(st.lists(st.floats(0, 1e6), min_size=number, max_size=number))) if own else lengths**1.7
    knobs = knobs_of(
        dp_size,
        max(number, dp_size),
        cp_sizes=draw(st.sampled_from([(1, 2), (1, 4), (1, 2, 4), (1, 2, 4, 8), (1, 8, 16)])),
        cp_overhead=draw(st.sampled_from([0.0, 0.05, 0.15, 1.0, 3.0])),
        cp_min_tokens=draw(st.sampled_from([1, 64, 2048])),
    )
    return costs, lengths, knobs


@given(steps(), st.integers(0, 30))
def test_nobody_waits_within_a_step_to_the_last_digit(step: tuple[Floats, Ints, PlanKnobs], number: int) -> None:
    costs, lengths, knobs = step
    plan = planned(costs, lengths, knobs, number)
    check_degrees(plan)
    if plan.degrees:
        assert gang(plan, parts_of(plan, costs, knobs.cp_overhead)) == plan.loads.tolist()
    assert plan.finish == plan.loads.max()
    assert plan.loads.sum() - plan.sharing_cost == pytest.approx(costs.sum())


# --- never worse, and near the bound ---------------------------------------------------------------------------------


@given(
    steps(), st.integers(0, 3), st.sampled_from(["step", "micro_batch"]), st.booleans(), st.sampled_from([0, 1e4, 1e6])
)
def test_never_later_than_without_sharing(
    step: tuple[Floats, Ints, PlanKnobs], number: int, sync: Any, capped: bool, overhead: float
) -> None:
    costs, lengths, knobs = step
    capped_knobs = {"max_tokens_per_micro_batch": 40_000, "overhead_cost": overhead} if capped else {}
    knobs = replace(knobs, sync=sync, **capped_knobs)
    whole = planned(costs, lengths, replace(knobs, cp_sizes=(1,)), number)
    plan = planned(costs, lengths, knobs, number)
    check_degrees(plan, locksteps=sync == "micro_batch")
    assert plan.finish <= whole.finish * (1 + 1e-12)
    assert plan.lower_bound <= plan.finish * (1 + 1e-12)
    assert sorted({i for its in plan.ranks for one in its for i in one.tolist()}) == list(range(costs.size))
    if not plan.degrees:
        assert [[one.tolist() for one in its] for its in plan.ranks] == [
            [one.tolist() for one in its] for its in whole.ranks
        ]


@pytest.mark.parametrize("overhead", [0.0, 0.15, 1.2])
@pytest.mark.parametrize("seed", range(8))
def test_no_plan_beats_the_bound(seed: int, overhead: float) -> None:
    """All plans of five rollouts on four ranks, by brute force."""
    rng = np.random.default_rng(seed)
    costs = rng.lognormal(3.0, 1.3, 5)
    knobs = knobs_of(4, 5, cp_sizes=(1, 2, 4), cp_overhead=overhead, cp_min_tokens=1)
    step = Shareable.of(costs, np.full(5, 10_000), knobs)
    nodes = [(row, block) for row in range(3) for block in range(4 >> row)]
    best = np.inf
    for chosen in itertools.product(nodes, repeat=5):
        loads = np.zeros(4)
        for one, (row, block) in enumerate(chosen):
            loads[block << row : (block + 1) << row] += step.parts[row, one]
        best = min(best, loads.max())
    assert step.bound() <= best * (1 + 1e-9)
    found = planned(costs, np.full(5, 10_000), knobs)
    assert best * (1 - 1e-9) <= found.finish <= 1.1 * best
    assert found.lower_bound == step.bound()


def test_an_outlier_is_shared_by_no_more_ranks_than_its_pieces_are_worth() -> None:
    costs, lengths = np.full(20, 100.0), np.full(20, 100)
    costs[7], lengths[7] = 4000.0, 4000
    for least, most in ((4000, 1), (2001, 1), (2000, 2), (1000, 4), (500, 8)):
        plan = planned(costs, lengths, knobs_of(8, 20, cp_min_tokens=least))
        assert max(max(its) for its in degrees_of(plan)) == most


# --- under a token cap -----------------------------------------------------------------------------------------------


@given(steps(), st.integers(200, 60_000), st.sampled_from(["step", "micro_batch"]), st.sampled_from(["equal", "free"]))
def test_no_part_is_above_the_token_cap_if_any_degree_keeps_it_below(
    step: tuple[Floats, Ints, PlanKnobs], cap: int, sync: Any, counts: Any
) -> None:
    costs, lengths, knobs = step
    knobs = replace(
        knobs,
        max_tokens_per_micro_batch=cap,
        sync=sync,
        oversize="alone",
        micro_batch_counts="equal" if sync == "micro_batch" else counts,
    )
    plan = planned(costs, lengths, knobs)
    check_degrees(plan, locksteps=sync == "micro_batch")
    fits = [[int(part_tokens(np.int64(n), np.int64(g))) <= cap for g in knobs.degrees] for n in lengths.tolist()]
    for its, of_rank in zip(plan.ranks, degrees_of(plan), strict=True):
        for one, degree in zip(its, of_rank, strict=True):
            tokens = int(part_tokens(lengths[one], np.int64(degree)).sum())
            if tokens > cap:  # nothing could hold it
                assert one.size == 1
                assert not any(fits[int(one[0])])


def test_what_no_degree_can_hold_is_refused() -> None:
    costs, lengths = np.full(8, 100.0), np.full(8, 100)
    knobs = knobs_of(4, 8, cp_sizes=(1, 2, 4), max_tokens_per_micro_batch=500, cp_min_tokens=2048)
    lengths[3], costs[3] = 2000, 1e6
    plan = planned(costs, lengths, knobs)
    assert max(max(its) for its in plan.degrees) == 4, "it must be shared, however short its parts"
    lengths[3] = 2001
    with pytest.raises(OversizeError, match=r"of 2001 tokens is above max_tokens \(500\) even if 4 ranks share"):
        planned(costs, lengths, knobs)
    lengths[3] = 501
    costs[3] = 1.0
    assert sorted(max(its) for its in planned(costs, lengths, knobs).degrees)[-1] == 2


# --- ranks that meet at every micro-batch ----------------------------------------------------------------------------


def test_what_must_be_shared_is_shared_also_where_the_others_need_many_more_locksteps_than_their_tokens() -> None:
    lengths = np.array([150] + [60] * 24)  # no two of 60 fit into 100
    plan = planned(
        lengths * 1.0, lengths, knobs_of(2, 25, sync="micro_batch", max_tokens_per_micro_batch=100, cp_sizes=(1, 2))
    )
    check_degrees(plan, locksteps=True)
    assert sorted(its.count(2) for its in plan.degrees) == [1, 1]
    assert [len(its) for its in plan.ranks] == [13, 13]


def test_ranks_change_places_without_leaving_their_blocks() -> None:
    costs, lengths = heavy_tail(32, 3, 2.0)
    seen = set()
    for number in range(16):
        plan = planned(costs, lengths, knobs_of(8, 32), number)
        check_degrees(plan)
        seen.add(tuple(plan.loads.argsort(kind="stable").tolist()))
    assert len(seen) >= 8
