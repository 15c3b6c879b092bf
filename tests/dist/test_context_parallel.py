"""Ranks that share a rollout compute what one rank would: processes, gloo, and the example's ring attention."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forked import run_world


def test_attention_around_a_ring_is_that_of_the_whole_and_torch_cuts_alike():
    """Output and gradients, on 2 and on 4 of 4 ranks; torch's own ring attention takes the same slices."""
    apart = json.loads(run_world(4, Path(__file__).with_name("ring_rank.py")))
    assert len(apart) == 8
    for what, how_far in apart.items():
        bar = 1e-12 if "float64" in what else 1e-5  # torch's merges in float32
        assert how_far <= bar, what


EXAMPLE = Path(__file__).parents[2] / "examples" / "context_parallel" / "train_shared.py"


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_loss_and_gradients_of_a_shared_step_are_those_of_one_process(sync):
    """The example: planned and delivered through the balancer, trained with rings of 2 and of 4, in float32."""
    figures = json.loads(run_world(4, EXAMPLE, sync))
    assert figures["loss_apart"] <= 1e-5
    assert figures["gradient_apart"] <= 1e-5
    by_degree = figures["rollouts_by_degree"]
    assert by_degree.keys() == {"1", "2", "4"}
    assert sum(by_degree.values()) == 48
