"""The simulator: the real core under a virtual clock; nothing lost, times exact, figures that add up; and how it
generates."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import trace_of

from stream_balancer.config import BalancerConfig
from stream_balancer.cost import QuadraticCost
from stream_balancer.tools.generation import issue_order, seconds_per_rollout
from stream_balancer.tools.length_models import generate_trace
from stream_balancer.tools.simulate import as_policy, simulate
from stream_balancer.tools.simulation_report import SimulationReport
from stream_balancer.tools.trace import Trace

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from peers import finish_times


def knobs(**changes: Any) -> BalancerConfig:
    return BalancerConfig(**({"dp_size": 2, "batch_size": 4, "cost": "tokens"} | changes))


def check_report(report: SimulationReport, trace: Trace) -> None:
    """What holds for every run."""
    config, steps = report.config, report.steps
    went = report.step_of >= 0
    assert int(np.count_nonzero(went)) + report.evicted == len(trace) == report.num_rollouts
    assert report.num_tokens == trace.num_tokens
    assert np.bincount(report.step_of[went], minlength=report.overall.batches).tolist() == steps.rollouts.tolist()
    tokens = np.bincount(report.step_of[went], weights=trace.lengths[went], minlength=report.overall.batches)
    assert tokens.tolist() == steps.tokens.tolist()
    assert (steps.rollouts >= 1).all()
    assert (steps.rollouts <= config.batch_size).all()
    assert (np.diff(steps.at_s) >= 0).all()
    assert sum(report.reasons.values()) == report.overall.batches
    tolerance = 1e-9 * (1 + steps.step_work)
    assert (steps.mean_load <= steps.lower_bound + tolerance).all()
    assert (steps.lower_bound <= steps.step_work + tolerance).all()
    work = np.asarray(config.cost(trace.lengths))[went].sum()
    assert steps.mean_load.sum() * config.dp_size == pytest.approx(work)
    for part, chosen in ((report.figures, report.shown_steps), (report.overall, slice(None))):
        assert part.batches == steps.rollouts[chosen].size
        assert (part.rollouts, part.tokens) == (steps.rollouts[chosen].sum(), steps.tokens[chosen].sum())
        assert part.work_s == pytest.approx(steps.step_work[chosen].sum())
        assert 0 <= part.avoidable_idle <= part.idle_fraction <= 1
        assert part.avoidable_idle + part.unavoidable_idle == pytest.approx(part.idle_fraction)
        assert part.idle_fraction < 1 - 1 / config.dp_size + 1e-9 or config.cost.padded
    assert 0 <= report.max_skips_seen <= config.max_skips
    assert 0 <= report.delay_s.p50 <= report.delay_s.p99 <= report.delay_s.max
    if config.groups.size is None:
        assert report.delay_steps.max <= report.max_skips_seen
    assert report.blocked_s >= 0
    assert trace.arrival_s is not None or 0 <= report.generation_idle < 1
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False)) == report.to_dict()


@st.composite
def runs(draw: st.DrawFn) -> tuple[Trace, BalancerConfig, dict[str, Any]]:
    size = draw(st.integers(1, 40))
    output = draw(st.lists(st.integers(1, 60), min_size=size, max_size=size))
    siblings = draw(st.sampled_from([1, 2, 4]))
    arrival = None
    if draw(st.booleans()):
        arrival = np.cumsum(draw(st.lists(st.sampled_from([0.0, 0.5, 3.0]), min_size=size, max_size=size))).tolist()
    trace = trace_of(output, arrival, [i // siblings for i in range(size)])
    dp_size = draw(st.integers(1, 3))
    batch_size = 4 * draw(st.integers(1, 2))
    policy = draw(st.sampled_from(["window", "fifo", "round_robin"]))
    changes: dict[str, Any] = {
        "dp_size": dp_size,
        "batch_size": batch_size,
        "policy": policy,
        "deadline_s": draw(st.sampled_from([None, 0.25, 5.0])),
        "cost": draw(st.sampled_from([QuadraticCost(linear=10.0), QuadraticCost(linear=1.0, quadratic=0.0)])),
        "equal_rollouts": draw(st.booleans()),
    }
    if policy == "window":
        changes["window"] = batch_size * draw(st.integers(1, 2))
        changes["capacity"] = changes["window"] * draw(st.integers(1, 2))
    if draw(st.booleans()):
        on_stale = draw(st.sampled_from(["evict", "send"]))
        changes["staleness"] = {"max_versions": draw(st.integers(0, 3)), "on_stale": on_stale}
    if draw(st.booleans()):
        changes["micro_batches"] = {"max_tokens": draw(st.integers(60, 130))}
        changes["sync"] = draw(st.sampled_from(["step", "micro_batch"]))
    if siblings > 1 and changes["deadline_s"] is not None and draw(st.booleans()):
        changes["groups"] = {"size": siblings}
    how = {
        "slots": draw(st.integers(1, 12)),
        "tokens_per_second": draw(st.sampled_from([1.0, 20.0])),
        "trainer": draw(st.sampled_from(["instant", "matched", 3.0, 1000.0])),
        "seed": draw(st.integers(0, 3)),
    }
    return trace, BalancerConfig(**changes), how


@given(runs())
def test_nothing_is_lost_and_figures_add_up(run: tuple[Trace, BalancerConfig, dict[str, Any]]) -> None:
    trace, config, how = run
    seen: list[int] = []
    report = simulate(trace, config, progress=seen.append, **how)
    check_report(report, trace)
    assert seen == sorted(seen)
    assert not seen or seen[-1] <= len(trace)
    if how["seed"] == 0:  # a part of them once more
        again = simulate(trace, config, **how)
        assert again.to_dict() == report.to_dict()
        assert again.step_of.tolist() == report.step_of.tolist()


class TestTimes:
    LATER = (0.0, 0.0, 1.0, 1.0, 1.0, 1.0)

    @pytest.mark.parametrize(
        ("output", "arrival", "changes", "trainer", "at_s", "said"),
        [
            # a full window leaves the moment it fills
            ([1] * 8, range(8), {"window": 4, "capacity": 8}, "instant", [3.0, 7.0],
             {"elapsed_s": 7.0, "reasons": {"window": 2}}),
            # a deadline leaves exactly when it is due, and waits for the smallest batch
            ([1] * 4, (0.0, 0.25, 40.0, 40.1), {"deadline_s": 30.0}, "instant", [30.0, 40.1],
             {"reasons": {"deadline": 1, "drain": 1}}),
            ([1] * 3, (0.0, 50.0, 90.0), {"deadline_s": 30.0}, "instant", [50.0, 90.0], {}),
            # eight at once: a step of 2 tokens a rank takes 4 s at half a token per second, and holds the next one back
            ([1] * 8, [0.0] * 8, {"window": 4}, 0.5, [0.0, 4.0], {"elapsed_s": 8.0, "whole_idle_fraction": 0.0}),
            # four more every 4 s, of which a step takes 2: idle is the wait for rollouts, too
            ([1] * 8, range(8), {"window": 4, "capacity": 8}, 1.0, [3.0, 7.0],
             {"idle_fraction": 0.0, "whole_idle_fraction": pytest.approx(1 - 4 / 6)}),
            # while the first step runs four come, twice the window: the long two go together, the first and the last
            ([50, 50, 100, 1, 1, 100], LATER, {"batch_size": 2, "window": 2, "capacity": 8}, 1.0, [0.0, 50.0, 51.0],
             {"idle_fraction": 0.0, "whole_idle_fraction": 0.0}),
        ],
    )  # fmt: skip
    def test_what_leaves_when(
        self, output: Any, arrival: Any, changes: Any, trainer: Any, at_s: list[float], said: dict[str, Any]
    ) -> None:
        report = simulate(trace_of(output, [*arrival]), knobs(**changes), trainer=trainer, warm_up=0)
        assert report.steps.at_s.tolist() == at_s
        assert {name: getattr(report, name) for name in said} == said

    def test_a_full_buffer_blocks_puts_and_slots(self) -> None:
        """One slot, a token each at 1 token/s, room for four: the slot starts anew only when its put returned."""
        trace = trace_of([1] * 12)
        report = simulate(trace, knobs(window=4, capacity=4), slots=1, tokens_per_second=1.0, trainer=0.1, warm_up=0)
        assert report.steps.at_s.tolist() == [4.0, 24.0, 44.0]
        assert report.blocked_s == pytest.approx((24 - 9) / 12)
        assert report.generation_idle == pytest.approx((24 - 9) / 64), "of one slot"
        assert report.elapsed_s == 64.0


class TestSegments:
    def test_warm_up_and_tail_are_shown_and_left_out(self) -> None:
        trace = generate_trace(3_000, "lrm", seed=0)
        report = simulate(trace, knobs(batch_size=16, cost=QuadraticCost(), max_skips=8), slots=64)
        check_report(report, trace)
        assert report.is_steady
        tokens = report.steps.tokens[report.shown_steps]
        assert report.figures.token_variation == pytest.approx(tokens.std() / tokens.mean())
        assert report.shown_steps.start == 3 * 8
        assert 2 <= report.overall.batches - report.shown_steps.stop <= 4
        short = simulate(generate_trace(800, "lrm", seed=0), report.config, slots=64)
        assert short.shown_steps.start == short.shown_steps.stop // 4
        assert simulate(trace_of([5] * 1_200), knobs(max_skips=None)).shown_steps.start == 50

    def test_the_first_dispatches_are_as_stale_as_all(self) -> None:
        """Every rollout takes 10 steps to generate, also those that are in flight at the beginning."""
        config = knobs(policy="fifo")
        report = simulate(trace_of([10] * 800), config, slots=40, tokens_per_second=1.0, warm_up=0)
        assert report.staleness.p50 == 10.0
        assert report.staleness.mean == pytest.approx(10.0, abs=0.05)
        bounded = config.replace(staleness={"max_versions": 4})
        evicting = simulate(trace_of([10] * 800), bounded, slots=40, tokens_per_second=1.0, warm_up=0)
        assert evicting.evicted > 100
        assert evicting.staleness.max <= 4

    def test_a_run_too_short_for_a_steady_state_says_so(self) -> None:
        trace = trace_of([5, 6, 7])
        report = simulate(trace, knobs())
        assert not report.is_steady
        assert not simulate(generate_trace(40), knobs(policy="fifo"), slots=1, warm_up=3).is_steady
        assert simulate(generate_trace(52), knobs(policy="fifo"), slots=1, warm_up=3).is_steady
        assert report.idle_fraction == report.overall.idle_fraction == pytest.approx(1 - 9 / 11)
        assert report.delay_steps.mean == 0.0
        assert report.arrived_lengths.mean == 6.0

    def test_idle_by_hand(self) -> None:
        """Two batches of 8+1+1+1 and 2+2+2+2 on two ranks: the slowest have 8 and 4, the means are 5.5 and 4."""
        trace = trace_of([8, 1, 1, 1, 2, 2, 2, 2], arrival=[0.0] * 8)
        report = simulate(trace, knobs(policy="fifo"), warm_up=0)
        assert report.idle_fraction == pytest.approx(1 - 9.5 / 12)
        assert report.figures.avoidable_idle == 0.0
        assert (report.steps.mean_load.tolist(), report.steps.step_work.tolist()) == ([5.5, 4.0], [8.0, 4.0])
        assert report.figures.token_variation == pytest.approx(1.5 / 9.5), "11 and 8 tokens: 9.5 give or take 1.5"
        dealt = simulate(trace_of([4, 1, 4, 1], arrival=[0.0] * 4), knobs(policy="round_robin"), warm_up=0)
        assert dealt.idle_fraction == pytest.approx(1 - 5 / 8)
        assert dealt.figures.avoidable_idle == pytest.approx(1 - 5 / 8)

    @pytest.mark.parametrize(("sync", "work"), [("step", 7.0), ("micro_batch", 12.0)])
    def test_where_ranks_meet(self, sync: str, work: float) -> None:
        """Rank 0 runs 6 then 1, rank 1 runs 1 then 6."""
        trace = trace_of([6, 1, 1, 6], arrival=[0.0] * 4)
        config = knobs(policy="round_robin", sync=sync, micro_batches={"max_tokens": 6})
        report = simulate(trace, config, warm_up=0)
        assert report.steps.step_work.tolist() == [work]
        assert report.steps.mean_load.tolist() == [7.0]


@pytest.mark.parametrize("policy", ["round_robin", "fifo", "window"])
@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_the_last_few_are_fewer_than_the_ranks(policy: Any, sync: Any) -> None:
    trace = trace_of([3] * 9)
    report = simulate(trace, as_policy(BalancerConfig(dp_size=4, batch_size=8, window=8, sync=sync), policy), slots=2)
    check_report(report, trace)
    assert report.steps.rollouts.tolist() == [8, 1]
    assert report.padding_copies == 3


def test_what_groups_leave_without_shows_in_the_bias_and_not_in_what_was_passed_over() -> None:
    """A group of 3, the last of which comes after the next two steps; nothing else is waited for."""
    trace = trace_of([9, 9, 8, 8, 8, 7, 7, 7, 90], arrival=[0.0, 1.0, 2.5, 2.5, 2.5, 9.0, 9.0, 9.0, 60.0])
    trace = replace(trace, group_ids=np.array([0, 0, 1, 1, 1, 2, 2, 2, 0]))
    config = knobs(dp_size=1, batch_size=3, window=5, groups={"size": 3, "min_size": 2, "patience": 3.0})
    report = simulate(trace, config, warm_up=0)
    assert (report.evicted, report.length_bias.num_cut) == (1, 1)
    assert report.length_bias.length_shift == pytest.approx((63 / 8) / (153 / 9))
    assert report.step_of[[0, 1, 8]].tolist() == [2, 2, -1]
    assert report.max_skips_seen == 2


# -- generation --------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(0, 99))
def test_groups_are_issued_whole_in_some_order(groups: list[int], seed: int) -> None:
    trace = trace_of([1] * len(groups), groups=groups)
    order = issue_order(trace, seed)
    assert sorted(order.tolist()) == list(range(len(groups)))
    issued = [groups[row] for row in order.tolist()]
    assert sum(a != b for a, b in pairwise(issued)) == len(set(groups)) - 1
    rows = {g: [r for r in order.tolist() if groups[r] == g] for g in groups}
    assert all(found == sorted(found) for found in rows.values())


class TestByHand:
    def test_one_slot(self) -> None:
        """The last one of the round before has just begun; it is not generated again at the end of this one."""
        trace = trace_of([4, 1, 2, 5], groups=[0, 0, 0, 0])
        assert finish_times(trace, slots=1, tokens_per_second=2.0).tolist() == [4.5, 5.0, 6.0, 2.5]

    def test_recorded_arrivals_are_used_from_the_first(self) -> None:
        trace = trace_of([9, 1, 1], arrival=[100.0, 101.5, 103.0])
        assert finish_times(trace, slots=1).tolist() == [0.0, 1.5, 3.0]
        assert seconds_per_rollout(trace, 1, 1.0) == 1.0


class TestEveryStream:
    @given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 50), st.integers(0, 9))
    def test_every_row_once_and_slots_never_overbooked(self, output: list[int], slots: int, seed: int) -> None:
        trace = trace_of(output, prompt=1)
        finish = finish_times(trace, slots, tokens_per_second=1.0, seed=seed)
        assert (finish >= 0).all()
        begin = finish - trace.output_tokens
        for moment in np.unique(begin):
            assert np.count_nonzero((begin <= moment) & (finish > moment + 1e-9)) <= slots
        assert finish.max() <= sum(output) / min(slots, len(output)) + 2 * max(output)
        assert finish.tolist() == finish_times(trace, slots, tokens_per_second=1.0, seed=seed).tolist()
