"""The demo's parts: its model and cost, its rollouts' lengths and tokens, its figures from runs made by hand."""

import io
import time

import pytest
from rich.console import Console
from stream_balancer_demo.options import DemoOptions
from stream_balancer_demo.rank import RankRun, StepDone
from stream_balancer_demo.report import comparison, summarize
from stream_balancer_demo.rollouts import checksum, load_workload, make_rollout

import stream_balancer as sb
from stream_balancer.tools.shown import Bars

ROLLOUTS = [make_rollout(name, 7 + number, 1, "g", 32) for number, name in enumerate("abcd")]
SUMS = {rollout.rollout_id: checksum(rollout) for rollout in ROLLOUTS}


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    rows = "\n".join(f"g{i // 2},{10 * i},{100 * (i + 1)}" for i in range(10))
    path.write_text(f"group_id,prompt_tokens,output_tokens\n{rows}\n")
    return path


@pytest.mark.parametrize("rollouts", [4, 10, 25])
def test_as_many_rollouts_as_asked_for_scaled_until_the_longest_fits(trace, rollouts):
    options = DemoOptions(trace=trace, rollouts=rollouts, max_length=109)
    work = load_workload(options)
    assert work.lengths["longest"] == 109
    assert work.lengths["tokens"] == sum(r.num_tokens for r in work.rollouts)
    assert len({r.rollout_id for r in work.rollouts}) == len(work.rollouts) == rollouts
    assert [*map(checksum, work.rollouts)] == [*map(checksum, load_workload(options).rollouts)]
    small = load_workload(DemoOptions(trace=trace, rollouts=rollouts, scale=1e-6))
    assert all((r.num_tokens, r.num_loss_tokens) == (2, 1) for r in small.rollouts), "a prompt and an output"
    assert load_workload(DemoOptions(rollouts=rollouts)).lengths["longest"] == DemoOptions().max_length


@pytest.fixture(scope="module")
def said():
    """Statistics of two steps over the four."""
    with sb.blocking(sb.BalancerConfig(dp_size=2, batch_size=2, window=4)) as balancer:
        for rollout in ROLLOUTS:
            balancer.put(rollout)
        balancer.end()
        assert len(list(balancer.batches())) == 2
        return balancer.statistics()


def step(number, seconds, *ids, micro_batches=1):
    return StepDone(number, seconds, micro_batches, 0.5, [(i, SUMS.get(i, 0)) for i in ids])


RANKS = (RankRun([step(0, 1.0, "a"), step(1, 2.0, "d")], 7), RankRun([step(0, 3.0, "b"), step(1, 2.0, "c")], 7))


def test_figures(said):
    run = summarize("window", said, [1.0, 3.0, 2.0], 9.0, RANKS, ROLLOUTS)
    assert (run["num_steps"], run["num_rollouts"], run["num_tokens"], run["wall_s"]) == (2, 4, 34, 9.0)
    assert (run["compute_s"], run["slowest_s"], run["final_loss"]) == ([3.0, 5.0], 5.0, 1.0)
    assert run["idle_fraction"] == pytest.approx(1 - (2.0 + 2.0) / 5.0)
    assert run["predicted_idle_fraction"] == said.idle_fraction < 0.1
    assert run["tokens_per_second"] == pytest.approx(34 / 5.0)
    assert run["step_variance_s2"] == pytest.approx((1.0 + 0.0) / 2)
    assert (run["delay_p50_s"], run["delay_p99_s"]) == (2.0, pytest.approx(2.98))
    assert run["reasons"] == {"drain": 2}
    assert run["exactly_once"]


@pytest.mark.parametrize(
    ("rank_1", "problem"),
    [
        (RankRun([step(0, 1.0, "b"), step(1, 1.0)], 7), "1 rollouts not trained on, or with other tokens: c"),
        (RankRun([step(0, 1.0, "b"), step(1, 1.0, "c", "a")], 7), "trained on more than once, or never put: a"),
        (RankRun([step(0, 1.0, "b"), step(1, 1.0, "c", "x")], 7), "trained on more than once, or never put: x"),
        (RankRun([step(0, 1.0, "b"), StepDone(1, 1.0, 1, 0.5, [("c", 1)])], 7), "with other tokens: c"),
        (RankRun([step(0, 1.0, "b", "c")], 7), "different steps"),
        (RankRun([step(0, 1.0, "b"), step(1, 1.0, "c", micro_batches=2)], 7), "different numbers of micro-batches"),
        (RankRun(RANKS[1].steps, 8), "different parameters"),
    ],
)
def test_everything_that_is_not_exactly_once_is_named(said, rank_1, problem):
    run = summarize("window", said, [1.0, 3.0, 2.0], 9.0, [RANKS[0], rank_1], ROLLOUTS)
    assert not run["exactly_once"]
    assert any(problem in text for text in run["problems"]), run["problems"]
    console = Console(file=io.StringIO(), width=140)
    console.print(comparison(run, run))
    assert "EXACTLY ONCE FAILED\nbalanced: " in console.file.getvalue()


def test_progress_that_is_piped_is_a_line_now_and_then(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    out = io.StringIO()
    with Bars(Console(file=out, force_terminal=False)) as bars:
        bar = bars.add_task("settings")
        for done in range(16):
            now[0] += 2.5
            bars.show(bar, done, 15)
    assert out.getvalue() == "".join(f"settings: {done} of 15\n" for done in (3, 7, 11, 15))
