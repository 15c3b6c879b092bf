"""What the demo shows, as text."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from stream_balancer.demo.messages import Dispatched, Put, StepDone, Trained
from stream_balancer.demo.report import RunReport
from stream_balancer.demo.view import RunProgress, comparison

USUAL = RunReport(
    policy="round_robin",
    num_steps=4,
    num_rollouts=128,
    num_tokens=5000,
    wall_s=12.5,
    compute_s=(3.0, 5.25),
    slowest_s=6.0,
    idle_fraction=0.4,
    predicted_idle_fraction=0.35,
    tokens_per_second=5000 / 6,
    step_variance_s2=0.02,
    delay_p50_s=1.5,
    delay_p99_s=4.0,
    reasons={"window": 3, "drain": 1},
    problems=(),
    final_loss=2.5,
)
BALANCED = replace(USUAL, policy="window", idle_fraction=0.04, slowest_s=3.0, step_variance_s2=float("nan"))


def shown(renderable):
    console = Console(file=io.StringIO(), width=140)
    console.print(renderable)
    return console.file.getvalue()


def test_both_runs_stand_side_by_side():
    text = shown(comparison(USUAL, BALANCED))
    for part in ("round-robin", "balanced", "40.0 %", "4.0 %", "× 0.10", "× 0.50", "window 3, drain 1", "5.25", "8.25"):
        assert part in text
    assert "Exactly once: in both runs all 128 rollouts" in text


def test_a_failed_check_is_shown_with_its_run():
    text = shown(comparison(USUAL, replace(BALANCED, problems=("2 rollouts put but never trained on: a, b",))))
    assert "EXACTLY ONCE FAILED" in text
    assert "balanced: 2 rollouts put but never trained on: a, b" in text


@pytest.mark.parametrize("width", [40, 140])
def test_progress_follows_the_messages(width):
    console = Console(file=io.StringIO(), width=width)
    with RunProgress(console) as progress:
        progress.begin("window", 2)
        progress.show(Put("a", 1, 10))
        progress.show(Put("b", 1, 10))
        progress.show(Dispatched(0, "drain", (0.1, 0.1), (1.0, 1.0)))
        progress.show(StepDone(0, 0, 0.1, 20, 1, 0.5, (("a", 1), ("b", 1))))
        progress.show(Trained(0, 1))
    if width == 140:
        text = console.file.getvalue()
        assert "balanced  generated" in text
        assert text.count("2/2") == 2
        assert "step 0 (drain)" in text
