"""Lengths and tokens of the demo's rollouts."""

import pytest
import torch
from stream_balancer_demo.options import DemoOptions
from stream_balancer_demo.rollouts import checksum, load_workload, make_rollout

from stream_balancer.errors import ConfigError, TraceError

MADE = ("r1", 12, 3, "p1", 64)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    rows = "\n".join(f"g{i // 2},{10 * i},{100 * (i + 1)}" for i in range(10))
    path.write_text(f"group_id,prompt_tokens,output_tokens\n{rows}\n")
    return path


def test_a_rollout_is_made_from_its_name_alone():
    rollout = make_rollout(*MADE)
    assert rollout.num_tokens == 12
    assert rollout.tokens["loss_mask"].tolist() == [False] * 3 + [True] * 9
    assert 0 <= int(rollout.tokens["input_ids"].min()) <= int(rollout.tokens["input_ids"].max()) < 64
    assert checksum(rollout) == checksum(make_rollout(*MADE))


def test_the_checksum_sees_every_change():
    rollout = make_rollout(*MADE)
    ids, mask = rollout.tokens["input_ids"], rollout.tokens["loss_mask"]
    other = ids.clone()
    other[5] ^= 1
    changed = [
        type(rollout)(tokens={"input_ids": other, "loss_mask": mask}, rollout_id="r1"),
        type(rollout)(tokens={"input_ids": ids, "loss_mask": ~mask}, rollout_id="r1"),
        type(rollout)(tokens={"input_ids": ids.to(torch.int32), "loss_mask": mask}, rollout_id="r1"),
        type(rollout)(tokens={"input_ids": ids}, rollout_id="r1"),
    ]
    sums = {checksum(rollout), *map(checksum, changed)}
    assert len(sums) == 1 + len(changed)


def test_a_trace_is_scaled_until_the_longest_fits(trace):
    work = load_workload(DemoOptions(trace=trace, rollouts=10, max_length=109))
    assert work.lengths["longest"] == 109
    assert work.lengths["scale"] == pytest.approx(0.1)
    assert work.lengths["tokens"] == sum(r.num_tokens for r in work.rollouts)
    assert len({r.rollout_id for r in work.rollouts}) == 10
    assert len({r.group_id for r in work.rollouts}) == 5


def test_scale_can_be_given_and_every_rollout_keeps_a_prompt_and_an_output(trace):
    work = load_workload(DemoOptions(trace=trace, rollouts=10, scale=1e-6))
    assert work.lengths["scale"] == 1e-6
    assert all((r.num_tokens, r.num_loss_tokens) == (2, 1) for r in work.rollouts)


@pytest.mark.parametrize("rollouts", [4, 10, 25])
def test_as_many_rollouts_as_asked_for_even_beyond_the_file(trace, rollouts):
    options = DemoOptions(trace=trace, rollouts=rollouts)
    work = load_workload(options)
    assert len({r.rollout_id for r in work.rollouts}) == len(work.rollouts) == rollouts
    assert [*map(checksum, work.rollouts)] == [*map(checksum, load_workload(options).rollouts)]


def test_generated_lengths_are_the_default():
    work = load_workload(DemoOptions(rollouts=50))
    assert len(work.rollouts) == 50
    assert work.lengths["longest"] == DemoOptions().max_length


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(TraceError, match="no length model is called 'nope'"):
        load_workload(DemoOptions(generator="nope"))
    with pytest.raises(TraceError, match="cannot be read"):
        load_workload(DemoOptions(trace=tmp_path / "missing.csv"))
    with pytest.raises(ConfigError, match="workers must be >= 1, not 0"):
        DemoOptions(workers=0)
