"""The demo's figures, from messages made by hand."""

import math

import pytest

from stream_balancer.demo.messages import Dispatched, Put, StepDone, Trained, decode, encode
from stream_balancer.demo.report import RunRecord, percentile, summarize


def record(*messages):
    out = RunRecord()
    for message in messages:
        out.add(decode(encode(message)))  # through JSON, as in life
    return out


def step(rank, number, seconds, *ids, loss=0.5):
    return StepDone(rank, number, seconds, 10, 1, loss, tuple((i, hash_of(i)) for i in ids))


def hash_of(rollout_id):
    return ord(rollout_id[0])


def puts(ids):
    return [Put(i, hash_of(i), 10) for i in ids]


GOOD = (
    *puts("abcd"),
    Dispatched(0, "window", (1.0, 3.0), (1.0, 1.0)),
    Dispatched(1, "drain", (2.0, 4.0), (1.0, 3.0)),
    step(0, 0, 1.0, "a"),
    step(1, 0, 3.0, "b"),
    step(1, 1, 2.0, "c"),
    step(0, 1, 2.0, "d"),
    Trained(0, 7),
    Trained(1, 7),
)


def report(*messages):
    return summarize(record(*messages), policy="window", ranks=2, expected=list("abcd"), wall_s=5.0)


def test_figures():
    run = report(*GOOD)
    assert run.num_steps == 2
    assert run.compute_s == (3.0, 5.0)
    assert run.slowest_s == 5.0
    assert run.idle_fraction == pytest.approx(1 - (2.0 + 2.0) / 5.0)
    assert run.predicted_idle_fraction == pytest.approx(1 - 3.0 / 4.0)
    assert run.tokens_per_second == pytest.approx(40 / 5.0)
    assert run.step_variance_s2 == pytest.approx((1.0 + 0.0) / 2)
    assert (run.delay_p50_s, run.delay_p99_s) == (2.0, 4.0)
    assert run.reasons == {"window": 1, "drain": 1}
    assert run.final_loss == 1.0
    assert run.exactly_once


@pytest.mark.parametrize(
    ("without", "extra", "problem"),
    [
        (GOOD[0], (), "1 rollouts never put: a"),
        (None, puts("a"), "put more than once: a"),
        (GOOD[9], (step(0, 1, 2.0),), "put but never trained on: d"),
        (GOOD[9], (step(0, 1, 2.0, "d", "a"),), "trained on more than once: a"),
        (GOOD[9], (step(0, 1, 2.0, "d", "x"),), "trained on but never put: x"),
        (GOOD[9], (StepDone(0, 1, 2.0, 10, 1, 0.5, (("d", 1),)),), "other tokens"),
        (GOOD[9], (), "1 steps were not trained by all 2 ranks: 1"),
        (GOOD[10], (Trained(0, 8),), "different parameters"),
        (GOOD[9], (StepDone(0, 1, 2.0, 10, 2, 0.5, (("d", hash_of("d")),)),), "different numbers of micro-batches"),
    ],
)
def test_everything_that_is_not_exactly_once_is_named(without, extra, problem):
    run = report(*[m for m in GOOD if m is not without], *extra)
    assert not run.exactly_once
    assert any(problem in text for text in run.problems), run.problems


def test_many_ids_are_cut_short():
    run = summarize(record(), policy="window", ranks=1, expected=[f"r{i}" for i in range(9)], wall_s=0.0)
    assert run.problems == ("9 rollouts never put: r0, r1, r2, r3, r4, ...",)
    assert math.isnan(run.idle_fraction)
    assert run.to_json()["idle_fraction"] is None
    assert run.to_json()["exactly_once"] is False


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 2), (0.75, 3), (0.99, 4), (1.0, 4)])
def test_percentile_is_a_value_that_occurred(share, value):
    assert percentile([4, 2, 1, 3], share) == value


def test_percentile_of_nothing():
    assert math.isnan(percentile([], 0.5))
