"""The sweep: which settings are tried, which are on the front, which is recommended, why; and its pictures."""

from __future__ import annotations

import math
import multiprocessing
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from forked import PROCESSES
from hypothesis import given
from hypothesis import strategies as st

import stream_balancer as sb
from stream_balancer.tools.length_models import LengthModel
from stream_balancer.tools.plot import check_plot, page
from stream_balancer.tools.tune import AGE_SLACK, _recommend
from stream_balancer.tools.tune_report import Outcome, pareto_front

SMALL = sb.BalancerConfig(dp_size=2, batch_size=4)
HEAVY = LengthModel(mu=5.0, sigma_between=0.0, sigma_within=1.4, cap=20_000)
FEW: dict[str, Any] = {"windows": [4, 8, 12], "max_skips": [12], "deadlines_s": [None], "slots": 16}


pytestmark = pytest.mark.usefixtures("short_sweeps")


def outcome(
    window: int = 8, idle: float = 0.1, age: float = 1.0, *, evicted: int = 0, short: float = 0.0, **knobs: Any
) -> Outcome:
    ran = SMALL.replace(**{"window": window, "capacity": 2 * window, "max_skips": 16} | knobs)
    return Outcome(
        report=replace(RUN, config=ran, evicted=evicted),
        compared_idle=idle,
        idle_error=0.0,
        added_age=age,
        short_batches=short,
    )


RUN = sb.simulate(sb.generate_trace(8), SMALL)
FIFO = outcome(4, idle=0.5, age=0.0)


def recommend(*outcomes: Outcome, max_added_age: float = 2.0) -> Outcome:
    return _recommend(outcomes, FIFO, max_added_age, 0.005)


class TestFront:
    @given(st.lists(st.tuples(st.floats(0, 4), st.floats(0, 1)), min_size=1, max_size=30))
    def test_nobody_on_it_is_beaten_and_everybody_else_is(self, points: list[tuple[float, float]]) -> None:
        outcomes = [outcome(age=age, idle=idle) for age, idle in points]
        front = pareto_front(outcomes)
        for one in front:
            assert not any(
                o.added_age <= one.added_age
                and o.compared_idle <= one.compared_idle
                and (o.added_age < one.added_age or o.compared_idle < one.compared_idle)
                for o in outcomes
            )
        for one in outcomes:
            assert any(o.added_age <= one.added_age and o.compared_idle <= one.compared_idle for o in front)
        assert [o.added_age for o in front] == sorted({o.added_age for o in front})


YOUNG, GOOD, LEAST = outcome(8, 0.2, 1.0), outcome(8, 0.2), outcome(4, 0.2, evicted=3)
TIGHT, LOOSE = outcome(8, 0.014, max_skips=8), outcome(8, 0.010, max_skips=16)
WITHOUT, WITHIN = outcome(8, 0.01), outcome(8, 0.01, deadline_s=30.0)
ENOUGH = outcome(8, 0.0149)
OLD = outcome(16, 0.0, 3.0)
BARELY = outcome(12, 0.0, 2.0 + AGE_SLACK)
# the smallest capacity that idles hardly more in all, then the smallest window
FEW_WAIT, MORE = outcome(6, 0.1, capacity=16), outcome(8, 0.104, capacity=16)
FULLER, SMALLER = outcome(4, 0.099, capacity=24), outcome(4, 0.2, capacity=8)


@pytest.mark.parametrize(
    ("outcomes", "how", "best"),
    [
        ([outcome(4, 0.3, 0.0), outcome(6, 0.0151, 0.5), ENOUGH, outcome(12, 0.01, 2.0)], {}, ENOUGH),
        ([YOUNG, OLD], {}, YOUNG),
        ([YOUNG, BARELY], {}, BARELY),
        ([YOUNG, OLD], {"max_added_age": 3.0}, OLD),
        ([GOOD, outcome(8, 0.0, short=0.02), outcome(8, 0.0, evicted=1)], {}, GOOD),
        ([LOOSE, TIGHT], {}, TIGHT),
        ([LOOSE, outcome(8, 0.1, max_skips=8)], {}, LOOSE),
        ([WITHOUT, WITHIN], {}, WITHIN),
        ([SMALLER, FULLER, MORE, FEW_WAIT], {}, FEW_WAIT),
        ([LEAST, outcome(8, 0.1, evicted=5)], {}, LEAST),  # nothing keeps the bounds: the smallest
    ],
)
def test_the_smallest_setting_within_the_bounds_that_idles_hardly_more_than_the_best(
    outcomes: list[Outcome], how: dict[str, Any], best: Outcome
) -> None:
    assert recommend(*outcomes, **how) is best


class TestSweep:
    @pytest.mark.slow
    def test_a_window_pays_for_heavy_tails(self) -> None:
        trace = sb.generate_trace(400, HEAVY, seed=1)
        told: list[tuple[int, int]] = []
        report = sb.tune(trace, SMALL, progress=lambda done, total: told.append((done, total)), **FEW)
        assert report.pays
        assert report.times == 1
        assert told == [(done, 5) for done in range(1, 6)]
        chosen = report.recommended
        assert chosen.window > 4
        assert chosen.compared_idle < report.fifo.compared_idle < report.round_robin.compared_idle
        assert chosen.added_age == pytest.approx(chosen.window / 4 - 1, abs=0.1)
        assert f"window={chosen.window}" in report.reason
        config = report.recommended_config
        assert (config.window, config.max_skips, config.deadline_s) == (chosen.window, 12, None)
        again = sb.simulate(trace, config, slots=16, tolerance=3e-3)
        assert again.idle_fraction == chosen.compared_idle, "a figure of the sweep is the simulation's"

    def test_no_window_where_every_batch_balances(self) -> None:
        trace = sb.generate_trace(1600, LengthModel(mu=5.0, sigma_between=0.0, sigma_within=0.1))
        config = SMALL.replace(batch_size=16, cost=sb.cost.QuadraticCost())
        report = sb.tune(trace, config, windows=[16, 32], max_skips=[8], deadlines_s=[None])
        assert not report.pays
        assert report.recommended.window == 16
        assert report.reason.startswith("A window does not pay: ")
        assert "first in, first out is already at its bound" in report.reason
        assert report.reason.endswith("use window=batch_size.")

    @pytest.mark.slow
    def test_the_number_of_processes_changes_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(multiprocessing, "get_context", lambda method: PROCESSES)  # they have loaded torch
        trace = sb.generate_trace(200, HEAVY, seed=1)
        one, two = (sb.tune(trace, SMALL, processes=processes, **{**FEW, "windows": [4, 8]}) for processes in (1, 2))
        assert one.to_dict() == two.to_dict()

    @pytest.mark.parametrize("recorded", [False, True])
    def test_deadlines_are_tried_where_arrivals_were_recorded(self, recorded: bool) -> None:
        trace = sb.generate_trace(64, HEAVY)
        trace = replace(trace, arrival_s=np.arange(64.0)) if recorded else trace
        report = sb.tune(trace, SMALL, windows=[4, 8])
        tried = [tuple(o.knobs.values()) for o in report.outcomes]
        middle = [(8, 16, 16, 16.0), (8, 16, 16, 32.0)] if recorded else []
        assert tried == [(4, 8, 16, None), *((8, 16, skips, None) for skips in (8, 16, 32)), *middle]

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            ({"max_added_age": -1.0}, "max_added_age must be a finite number of steps >= 0"),
            ({"max_added_age": math.inf}, "max_added_age must be a finite number of steps >= 0"),
            ({"tolerance": 1.0}, "tolerance must be an idle fraction in 0..1"),
            ({"processes": 0}, "processes must be an int >= 1"),
            ({"windows": [64], "max_skips": [1]}, r"works with the other knobs: max_skips \(1\) is too small"),
            (
                {"windows": [2, 64], "max_skips": [1]},
                r"works .*: window \(2\) must be >= .*; max_skips \(1\) is too small",
            ),
            ({"capacities": [8]}, "capacities need a trainer that takes time"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, wrong: dict[str, Any], said: str) -> None:
        with pytest.raises(sb.errors.ConfigError, match=said):
            sb.tune(sb.generate_trace(10, "rg"), SMALL, **wrong)


class TestRepeated:
    def test_groups_and_arrivals_go_on(self) -> None:
        trace = sb.generate_trace(6, LengthModel(mu=3.0, sigma_between=0.1, sigma_within=0.1, siblings=2))
        trace = replace(trace, arrival_s=np.array([1.0, 2.0, 3.0, 3.0, 5.0, 6.0]))
        twice = trace.repeated(2)
        assert twice.lengths.tolist() == trace.lengths.tolist() * 2
        assert twice.num_groups == 2 * trace.num_groups
        assert twice.arrival_s is not None
        assert twice.arrival_s.tolist() == [1.0, 2.0, 3.0, 3.0, 5.0, 6.0, 7.0, 8.0, 9.0, 9.0, 11.0, 12.0]
        with pytest.raises(sb.errors.TraceError, match="at least once"):
            trace.repeated(0)


@pytest.fixture(scope="module")
def report(short_sweeps: None) -> sb.TuneReport:
    trace = sb.generate_trace(120, LengthModel(mu=5.0, sigma_between=0.0, sigma_within=1.4))
    config = sb.BalancerConfig(dp_size=2, batch_size=4)
    return sb.tune(trace, config, windows=[4, 8], max_skips=[8], deadlines_s=[None, 90.0])


def test_a_page_is_well_formed_and_fetches_nothing(report: sb.TuneReport) -> None:
    text = page(report)
    body = ElementTree.fromstring(text.removeprefix("<!doctype html>\n").replace('<meta charset="utf-8">', ""))
    assert len(body.findall(".//{http://www.w3.org/2000/svg}svg")) == 2
    assert not re.search(r"<script|src=|href=|@import|url\(", text)
    assert report.reason in text


def test_every_setting_is_a_dot_and_the_chosen_one_is_red(report: sb.TuneReport) -> None:
    dots = re.findall(r'<circle [^>]*fill="([^"]+)"><title>window=(\d+), max_skips (\d+)', page(report))
    assert len(dots) == len(report.outcomes)
    red = [(int(window), int(skips)) for colour, window, skips in dots if colour == "#dc2626"]
    assert red == [(report.recommended.window, report.recommended_config.max_skips)]


def test_a_name_is_text(report: sb.TuneReport) -> None:
    assert "<script>" not in page(replace(report, trace_name="<script>alert(1)</script>"))


def test_another_suffix_or_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sb.errors.ConfigError, match=r"something\.html, not 'front\.png'"):
        check_plot(tmp_path / "front.png")
    with pytest.raises(sb.errors.ConfigError, match="there is no folder"):
        check_plot(tmp_path / "nowhere" / "front.html")
