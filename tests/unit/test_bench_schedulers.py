"""The benchmark of schedulers: its own arithmetic, ours in it, and how others' files are had."""

from __future__ import annotations

import hashlib
import io
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import stream_balancer as sb
from stream_balancer.tools.length_models import LengthModel

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import peer_files
import scheduler_runs
import schedulers
from bars import bars
from scheduler_list import SCHEDULERS, Plan, Scheduler, Step

OWN = [one for one in SCHEDULERS if one.name.startswith("stream_balancer")]
FIFO, WINDOW, GROUPS, FIFO_SHARED, WINDOW_SHARED = OWN


@pytest.fixture(autouse=True)
def _short_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_runs, "WARM_UP", 4)


def stream(siblings: int = 1, longest: int = 8_000) -> scheduler_runs.Stream:
    model = LengthModel(mu=6.0, sigma_between=0.3, sigma_within=1.0, cap=longest, siblings=siblings)
    trace = sb.generate_trace(500, model, seed=1)
    return scheduler_runs.Stream("small", trace, schedulers.trace_flops, whole_groups=siblings > 1)


def test_ours_are_faster_with_a_window_and_every_figure_is_there() -> None:
    run = scheduler_runs.Run.of(stream(siblings=4), batch_size=16, ranks=4, steps=6)
    rows, left_out = schedulers.compare(run, {one: one.load() for one in OWN}, 10.0, {})
    assert not left_out
    assert [(row.scheduler, row.sync) for row in rows] == [
        (one.name, sync) for one in OWN for sync in scheduler_runs.SYNCS
    ]
    assert all(row.steps == 6 and row.over_cap == 0 for row in rows)
    fifo, window, groups, fifo_shared, window_shared = rows[::2]
    assert fifo.delay == fifo.longest_delay == 0
    assert window.idle < fifo.idle
    assert window.time < fifo.time
    assert window.longest_delay <= 16
    assert 0.5 < groups.delay < 1.5
    assert fifo_shared.delay == 0
    assert fifo_shared.idle <= fifo.idle
    assert window_shared.idle <= window.idle
    assert all(row.time >= 1.0 for row in rows[:2])
    assert fifo.token_variation < window.token_variation
    shown = schedulers.table(rows, left_out).splitlines()
    assert len(shown) == 2 + len(OWN)
    drawn = schedulers.chart(run, rows)
    assert all(one.name in "\n".join(shown) and one.name in drawn for one in OWN)


@pytest.mark.parametrize(("policy", "sync"), [("fifo", "step"), ("window", "step"), ("window", "micro_batch")])
def test_steps_are_those_of_a_simulated_run(policy: Any, sync: Any) -> None:
    source = stream(longest=1_000)  # several micro-batches a rank
    run = scheduler_runs.Run.of(source, batch_size=16, ranks=4, steps=8)
    scheduler = FIFO if policy == "fifo" else WINDOW
    record = scheduler_runs.planned(run, scheduler, scheduler.load(), sync, 10.0)
    times = [scheduler_runs.finish(layout, run.costs_of(run.lengths[at]), sync) for at, layout in record.layouts]
    config = sb.BalancerConfig(
        dp_size=4,
        batch_size=16,
        window=None if policy == "fifo" else 32,
        max_skips=16,
        policy=policy,
        sync=sync,
        cost=sb.QuadraticCost(),
        micro_batches=sb.MicroBatches(max_tokens=run.max_tokens),
    )
    trace = source.trace.resampled(run.lengths.size, scheduler_runs.FIRST_SEED, by_group=False)
    report = sb.simulate(trace, config, slots=64, seed=scheduler_runs.FIRST_SEED)
    unit = float(config.cost(run.lengths[:1])[0] / run.costs_of(run.lengths[:1])[0])
    first = scheduler_runs.WARM_UP
    assert np.allclose(np.array(times) * unit, report.steps.step_work[first : first + 8])


def test_time_of_a_layout() -> None:
    costs = np.array([6.0, 2.0, 3.0, 4.0])
    layout = [[[0], [1]], [[2], [3]]]
    assert scheduler_runs.finish(layout, costs, "step") == 8.0
    assert scheduler_runs.finish(layout, costs, "micro_batch") == 6.0 + 4.0
    assert scheduler_runs.finish([[[0, 1]], [[2], [3]]], costs, "micro_batch") == 8.0 + 4.0


def test_ranks_that_share_a_rollout_wait_for_each_other_and_for_nobody_else() -> None:
    costs = np.array([6.0, 2.0, 4.0, 1.0, 7.0])
    layout = [[[1], [0], [3]], [[2], [0]], [[], [], []]]  # 3.0 each of the first rollout, once rank 1 is free
    assert scheduler_runs.finish(layout, costs, "step") == 4.0 + 3.0 + 1.0
    layout = [[[1], [0]], [[3], [0]], [[], [], [2]], [[4], []]]
    assert scheduler_runs.finish(layout, costs, "step") == 7.0
    assert scheduler_runs.finish(layout, costs, "micro_batch") == 7.0 + 3.0 + 4.0


def test_every_doubling_of_the_ranks_that_share_a_rollout_adds_its_overhead() -> None:
    costs = np.array([8.0, 1.0])
    layout = [[[0], [1]], [[0]], [[0]], [[0]]]
    assert scheduler_runs.finish(layout, costs, "step") == 2.0 + 1.0
    assert scheduler_runs.finish(layout, costs, "step", 0.25) == 2.0 * 1.5 + 1.0
    assert scheduler_runs.finish(layout, costs, "micro_batch", 0.25) == 2.0 * 1.5 + 1.0


def test_a_shared_rollout_in_different_places_of_its_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="not the same micro-batch"):
        scheduler_runs.finish([[[0], [1]], [[2], [0]]], np.ones(3), "step")


def test_a_part_of_a_shared_rollout_is_what_counts_towards_the_cap() -> None:
    run = replace(scheduler_runs.Run.of(stream(), 2, 2, steps=1), max_tokens=600)
    run.lengths[8:10] = [1_200, 100]

    def plan(step: Step) -> Any:
        return [[[0], [1]], [[0], []]]

    shared = Scheduler("shared", "", lambda: plan, splits=True)
    once, _ = scheduler_runs.measure(run, shared, plan, 10.0)
    assert once.over_cap == 0
    once, _ = scheduler_runs.measure(replace(run, max_tokens=599), shared, plan, 10.0)
    assert once.over_cap == 2


def test_figures_of_a_layout_made_by_hand() -> None:
    source = stream()
    run = replace(
        scheduler_runs.Run.of(source, 4, 2, steps=2), max_tokens=1_000, costs_of=lambda lengths: lengths * 2.0
    )
    run.lengths[16:24] = [400, 600, 500, 100, 800, 200, 300, 100]  # after the warm-up

    def plan(step: Step) -> Any:
        return [[[0, 1], [2]], [[3]]]  # 1,500 tokens beside 100; then 1,300 beside 100

    by_hand = Scheduler("by hand", "", lambda: plan)
    once, often = scheduler_runs.measure(run, by_hand, plan, 10.0)
    assert once.idle == pytest.approx(100 * (1 - 1500 / 2800), abs=0.01)
    assert often.idle == once.idle
    assert once.time == pytest.approx((1500 + 1300) / (900 + 800), abs=1e-4)  # 400 and 500; 800
    assert once.over_cap == 0
    assert once.token_variation == pytest.approx(100 / 1500, abs=1e-3)
    once, _ = scheduler_runs.measure(replace(run, max_tokens=999), by_hand, plan, 10.0)
    assert once.over_cap == 2


def test_planning_stops_when_its_time_is_over() -> None:
    run = scheduler_runs.Run.of(stream(), batch_size=8, ranks=2, steps=5)
    assert len(scheduler_runs.planned(run, FIFO, FIFO.load(), "step", 0.0).layouts) == 1


@pytest.mark.parametrize("by_sync", [False, True])
def test_it_plans_anew_only_where_it_matters_when_ranks_meet(by_sync: bool) -> None:
    run = scheduler_runs.Run.of(stream(), batch_size=4, ranks=1, steps=1)
    asked = []

    def plan(step: Step) -> Any:
        asked.append(step.sync)
        return [[[0, 1, 2, 3]]]

    list(scheduler_runs.measure(run, Scheduler("one rank", "", lambda: plan, by_sync=by_sync), plan, 1.0))
    assert asked == ["step", "micro_batch"][: 1 + by_sync]


def test_whole_groups_leave_together() -> None:
    run = scheduler_runs.Run.of(stream(siblings=4), batch_size=16, ranks=4, steps=3)
    record = scheduler_runs.planned(run, GROUPS, GROUPS.load(), "step", 10.0)
    for places, layout in record.layouts:
        gone = [place for rank in layout for one in rank for place in one]
        assert set(np.bincount(run.groups[places][gone])) == {0, 4}


def test_siblings_arrive_together() -> None:
    _, groups = stream(siblings=4).arrivals(400, slots=32, seed=0)
    assert (groups.reshape(-1, 4) == groups[::4, None]).all()
    assert (np.diff(groups[::4]) < 0).any()  # in the order in which they are finished


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ([[[0, 1]], [[2]]], "planned 3 of 4 rollouts"),
        ([[[0, 1]], [[1, 2, 3]]], "every rollout once"),
        ([[[0, 1, 2, 3]]], "no plan for 2 ranks"),
        ([[[0, 0, 1]], [[2, 3]]], "every rollout once"),
    ],
)
def test_a_plan_that_is_none_is_refused(layout: Any, says: str) -> None:
    run = scheduler_runs.Run.of(stream(), batch_size=4, ranks=2, steps=1)
    wrong = Scheduler("wrong", "", lambda: lambda step: layout)
    with pytest.raises(ValueError, match=says):
        scheduler_runs.planned(run, wrong, wrong.load(), "step", 1.0)


def test_one_that_cannot_be_imported_is_reported_and_a_slow_one_is_left_out_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent() -> Plan:
        raise ImportError("no module called there")

    def slow() -> Plan:
        def plan(step: Step) -> Any:
            monkeypatch.setattr(schedulers, "SLOW_MS", -1.0)
            return [[list(range(step.lengths.size))], [[]]]

        return plan

    monkeypatch.setattr(schedulers, "SCHEDULERS", [Scheduler("gone", "", absent), Scheduler("slow", "", slow)])
    plans, missing = schedulers.available("")
    assert list(missing.values()) == ["ImportError: no module called there"]
    too_slow: dict[Scheduler, str] = {}
    run = scheduler_runs.Run.of(stream(), batch_size=4, ranks=2, steps=1)
    rows, left_out = schedulers.compare(run, plans, 1.0, too_slow)
    assert len(rows) == 2
    assert not left_out
    rows, left_out = schedulers.compare(run, plans, 1.0, too_slow)
    assert not rows
    assert left_out["slow"].startswith("not run: a plan took")
    assert left_out["slow"].endswith("for 4 rollouts on 2 ranks")
    assert schedulers.table(rows, left_out).splitlines()[2:] == [f"{'slow':<40} {left_out['slow']}"]
    assert "4 rollouts on 2 ranks" in schedulers.chart(run, rows)


def test_one_that_fails_is_shown_and_the_others_go_on() -> None:
    def fails() -> Plan:
        def plan(step: Step) -> Any:
            if step.sync == "micro_batch":
                raise RuntimeError(f"{step.lengths.size} rollouts are too many")
            return [[list(range(step.lengths.size))], [[]]]

        return plan

    run = scheduler_runs.Run.of(stream(), batch_size=4, ranks=2, steps=1)
    plans = {one: one.load() for one in (Scheduler("fails", "", fails, by_sync=True), FIFO)}
    rows, left_out = schedulers.compare(run, plans, 1.0, {})
    assert {row.scheduler for row in rows} == {FIFO.name}
    assert left_out == {"fails": "failed: RuntimeError: 4 rollouts are too many"}
    assert "failed: RuntimeError" in schedulers.table(rows, left_out)


def test_short_plans_are_timed_though_long_ones_are_given_up() -> None:
    run = scheduler_runs.Run.of(stream(), batch_size=16, ranks=4, steps=16)
    record = scheduler_runs.planned(run, FIFO, FIFO.load(), "step", 10.0)
    assert all(record.ms)


def test_a_plan_that_takes_for_ever_is_given_up_and_not_tried_at_larger_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_runs, "MOST_PLAN_S", 0.01)

    def endless() -> Plan:
        def plan(step: Step) -> Any:
            while True:
                pass

        return plan

    one = Scheduler("endless", "", endless)
    run = scheduler_runs.Run.of(stream(), batch_size=4, ranks=2, steps=1)
    too_slow: dict[Scheduler, str] = {}
    rows, left_out = schedulers.compare(run, {one: one.load()}, 1.0, too_slow)
    assert not rows
    assert left_out == {"endless": "not run: a plan took more than 0.01 s for 4 rollouts on 2 ranks"}
    larger = scheduler_runs.Run.of(stream(), batch_size=8, ranks=2, steps=1)
    assert schedulers.compare(larger, {one: one.load()}, 1.0, too_slow) == ([], left_out)


# --- others' files ----------------------------------------------------------------------------------------------------

SOURCE = """
import json
from proj_xyz import missing
from proj_xyz.missing.deeper import Base, refused

class Planner(Base.Inner):
    json = json

    def plan(self) -> list[missing.Type]:
        return [1]

    def fails(self):
        return refused(1)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with one pinned file, which is there already."""
    monkeypatch.setattr(peer_files, "PINS", tmp_path / "pins")
    monkeypatch.setattr(peer_files, "CACHE", tmp_path)
    file = tmp_path / "some+proj" / "src" / "proj_xyz" / "planner.py"
    file.parent.mkdir(parents=True)
    file.write_text(SOURCE)
    sha256 = hashlib.sha256(SOURCE.encode()).hexdigest()
    peer_files.PINS.write_text(f"# a comment\n\nsome/proj 0123456789abcdef src/proj_xyz/planner.py {sha256}\n")
    return file


def test_a_pinned_file_runs_without_its_package_and_what_is_absent_refuses(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "proj_xyz.real", ModuleType("proj_xyz.real"))  # of the installed package
    module = peer_files.load("some/proj", "proj_xyz.planner", root="src")
    planner = module.Planner()
    assert planner.plan() == [1]
    assert isinstance(planner.json, ModuleType)
    with pytest.raises(NotImplementedError, match="peers-files"):
        planner.fails()
    assert [name for name in sys.modules if name.startswith("proj_xyz")] == ["proj_xyz.real"]
    assert str(project.parents[1]) not in sys.path
    assert peer_files.commit_of("some/proj") == "01234567"


def test_a_file_that_is_not_the_pinned_one_is_refused(project: Path) -> None:
    project.write_text(SOURCE + "\n")
    with pytest.raises(ValueError, match="not the pinned"):
        peer_files.load("some/proj", "proj_xyz.planner", root="src")


def test_a_file_is_fetched_once_and_kept_only_if_it_is_the_pinned_one(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def urlopen(url: str, timeout: float) -> io.BytesIO:
        asked.append(url)
        return io.BytesIO(SOURCE.encode() if len(asked) > 1 else b"something else")

    monkeypatch.setattr(peer_files.urllib.request, "urlopen", urlopen)
    project.unlink()
    with pytest.raises(ValueError, match="not the pinned"):
        peer_files.load("some/proj", "proj_xyz.planner", root="src")
    assert not project.exists()
    for _ in range(2):
        peer_files.load("some/proj", "proj_xyz.planner", root="src")
    assert asked == ["https://raw.githubusercontent.com/some/proj/0123456789abcdef/src/proj_xyz/planner.py"] * 2


def test_bars_are_as_long_as_their_values_and_a_picture_of_its_own() -> None:
    drawn = ElementTree.fromstring(bars({"<ours>": (0.1, 0.2), "theirs": (0.4, 0.0)}, ["once", "often"]))
    name = "{http://www.w3.org/2000/svg}"
    widths = [float(one.get("width", "")) for one in drawn.findall(f"{name}rect[@x='250.0']")]
    assert widths == pytest.approx([0.25 * widths[2], 0.5 * widths[2], widths[2], 0.0], abs=0.1)
    words = [one.text for one in drawn.findall(f"{name}text")]
    assert words == ["once", "often", "<ours>", "10.0 %", "20.0 %", "theirs", "40.0 %", "0.0 %"]
    assert bars({}, [])


def test_the_names_of_three_series_are_within_the_picture() -> None:
    drawn = ElementTree.fromstring(bars({"rg": (0.4, 0.1, 0.01)}, ["fifo", "window", "window, and rollouts shared"]))
    places = [float(one.get("x", "")) for one in drawn.findall("{http://www.w3.org/2000/svg}text")]
    assert max(places[:3]) + 6 * len("window, and rollouts shared") <= float(drawn.get("viewBox", "").split()[2])
