"""The demo's figures, from runs made by hand, and how they look."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from stream_balancer import BalancerConfig, StreamBalancer
from stream_balancer.demo.rank import RankRun, StepDone
from stream_balancer.demo.report import ControllerRun, percentile, summarize
from stream_balancer.demo.rollouts import checksum
from stream_balancer.demo.view import RunProgress, comparison
from stream_balancer.testing import make_rollout


def controller(*ids):
    run = ControllerRun()
    run.puts = [(i, hash_of(i)) for i in ids]
    run.num_tokens = 10 * len(ids)
    run.delays_s = [1.0, 3.0, 2.0, 4.0]
    run.loads = [(1.0, 1.0), (1.0, 3.0)]
    run.reasons.update({"window": 1, "drain": 1})
    return run


def hash_of(rollout_id):
    return ord(rollout_id[0])


def step(number, seconds, *ids, micro_batches=1):
    return StepDone(number, seconds, micro_batches, 0.5, [(i, hash_of(i)) for i in ids])


RANKS = (RankRun([step(0, 1.0, "a"), step(1, 2.0, "d")], 7), RankRun([step(0, 3.0, "b"), step(1, 2.0, "c")], 7))


def figures(puts="abcd", rank_1=RANKS[1], policy="window"):
    return summarize(policy, controller(*puts), [RANKS[0], rank_1], "abcd")


def test_figures():
    run = figures()
    assert run["num_steps"] == 2
    assert run["compute_s"] == [3.0, 5.0]
    assert run["slowest_s"] == 5.0
    assert run["idle_fraction"] == pytest.approx(1 - (2.0 + 2.0) / 5.0)
    assert run["predicted_idle_fraction"] == pytest.approx(1 - 3.0 / 4.0)
    assert run["tokens_per_second"] == pytest.approx(40 / 5.0)
    assert run["step_variance_s2"] == pytest.approx((1.0 + 0.0) / 2)
    assert (run["delay_p50_s"], run["delay_p99_s"]) == (2.0, 4.0)
    assert run["reasons"] == {"window": 1, "drain": 1}
    assert run["final_loss"] == 1.0
    assert run["exactly_once"]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"puts": "bcd"}, "1 rollouts never put: a"),
        ({"puts": "aabcd"}, "put more than once: a"),
        ({"rank_1": RankRun([step(0, 1.0, "b"), step(1, 1.0)], 7)}, "put but never trained on: c"),
        ({"rank_1": RankRun([step(0, 1.0, "b"), step(1, 1.0, "c", "a")], 7)}, "trained on more than once: a"),
        ({"rank_1": RankRun([step(0, 1.0, "b"), step(1, 1.0, "c", "x")], 7)}, "trained on but never put: x"),
        ({"rank_1": RankRun([step(0, 1.0, "b"), StepDone(1, 1.0, 1, 0.5, [("c", 1)])], 7)}, "other tokens"),
        ({"rank_1": RankRun([step(0, 1.0, "b", "c")], 7)}, "1 steps were not trained by all 2 ranks: 1"),
        ({"rank_1": RankRun(RANKS[1].steps, 8)}, "different parameters"),
        (
            {"rank_1": RankRun([step(0, 1.0, "b"), step(1, 1.0, "c", micro_batches=2)], 7)},
            "different numbers of micro-batches",
        ),
    ],
)
def test_everything_that_is_not_exactly_once_is_named(given, problem):
    run = figures(**given)
    assert not run["exactly_once"]
    assert any(problem in text for text in run["problems"]), run["problems"]


def test_of_nothing_nothing_is_measured_and_many_ids_are_cut_short():
    run = summarize("window", ControllerRun(), [RankRun([], 7)], [f"r{i}" for i in range(9)])
    assert run["problems"] == ["9 rollouts never put: r0, r1, r2, r3, r4, ..."]
    assert run["idle_fraction"] is None
    assert "?" in shown(comparison(run, run))


@pytest.mark.parametrize(("fraction", "value"), [(0.0, 1), (0.5, 2), (0.75, 3), (0.99, 4), (1.0, 4)])
def test_percentile_is_a_value_that_occurred(fraction, value):
    assert percentile([4, 2, 1, 3], fraction) == value


def shown(renderable):
    console = Console(file=io.StringIO(), width=140)
    console.print(renderable)
    return console.file.getvalue()


def test_both_runs_stand_side_by_side():
    text = shown(comparison(figures(policy="round_robin"), figures()))
    for part in ("round-robin", "balanced", "20.0%", "25.0%", "× 1.00", "window 1, drain 1", "5.00", "8.00"):
        assert part in text
    assert "Exactly once: in both runs all 4 rollouts" in text


def test_a_failed_check_is_shown_with_its_run():
    text = shown(comparison(figures(policy="round_robin"), figures("bcd")))
    assert "EXACTLY ONCE FAILED" in text
    assert "balanced: 1 rollouts never put: a" in text


@pytest.mark.parametrize("width", [40, 140])
async def test_both_observe_the_balancer(width):
    console, run = Console(file=io.StringIO(), width=width), ControllerRun()
    rollouts = [replace(make_rollout(n), rollout_id=f"r{n}") for n in (1, 5, 9)]
    with RunProgress(console) as progress:
        progress.begin("window", len(rollouts))
        async with StreamBalancer(BalancerConfig(dp_size=2, batch_size=2)) as balancer:
            balancer.observers += [run, progress]
            for rollout in rollouts:
                await balancer.put(rollout)
            balancer.end()
            async for _ in balancer.batches():  # the last with a padding copy, which counts for nothing
                pass
    assert run.puts == [(r.rollout_id, checksum(r)) for r in rollouts]
    assert (run.num_tokens, len(run.delays_s), len(run.loads)) == (15, 3, 2)
    assert run.reasons == {"drain": 2}
    if width == 140:
        text = console.file.getvalue()
        assert "balanced  generated" in text
        assert text.count("3/3") == 2
        assert "step 1 (drain)" in text
