"""The demo's figures, from runs made by hand, and how they look."""

import io

import pytest
from rich.console import Console
from stream_balancer_demo.rank import RankRun, StepDone
from stream_balancer_demo.report import comparison, summarize
from stream_balancer_demo.rollouts import checksum, make_rollout

import stream_balancer as sb

ROLLOUTS = [make_rollout(name, 10, 1, "g", 32) for name in "abcd"]
SUMS = {rollout.rollout_id: checksum(rollout) for rollout in ROLLOUTS}


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
    assert (run["num_steps"], run["num_rollouts"], run["num_tokens"], run["wall_s"]) == (2, 4, 40, 9.0)
    assert (run["compute_s"], run["slowest_s"], run["final_loss"]) == ([3.0, 5.0], 5.0, 1.0)
    assert run["idle_fraction"] == pytest.approx(1 - (2.0 + 2.0) / 5.0)
    assert run["predicted_idle_fraction"] == said.idle_fraction == 0.0
    assert run["tokens_per_second"] == pytest.approx(40 / 5.0)
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
    assert "EXACTLY ONCE FAILED\nbalanced: " in shown(run, run)


def shown(usual, balanced):
    console = Console(file=io.StringIO(), width=140)
    console.print(comparison(usual, balanced))
    return console.file.getvalue()


def test_both_runs_stand_side_by_side(said):
    text = shown(
        *(summarize(policy, said, [1.0, 3.0, 2.0], 9.0, RANKS, ROLLOUTS) for policy in ("round_robin", "window"))
    )
    for part in ("round-robin", "balanced", "20.0%", "× 1.00", "drain 2", "3.00, 5.00", "8"):
        assert part in text
    assert "Exactly once: in both runs all 4 rollouts" in text
