"""Lengths and tokens of the demo's rollouts."""

import pytest
import torch

from stream_balancer.demo.lengths import load_workload
from stream_balancer.demo.messages import RolloutSpec
from stream_balancer.demo.options import DemoOptions
from stream_balancer.demo.rollouts import checksum, make_rollout
from stream_balancer.errors import TraceError

SPEC = RolloutSpec("r1", "p1", 3, 9)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    rows = "\n".join(f"g{i // 2},{10 * i},{100 * (i + 1)}" for i in range(10))
    path.write_text(f"group_id,prompt_tokens,output_tokens\n{rows}\n")
    return path


def test_a_rollout_is_made_from_its_name_alone():
    rollout = make_rollout(SPEC, 64)
    assert rollout.num_tokens == 12
    assert rollout.num_loss_tokens == 9
    assert rollout.tokens["loss_mask"].tolist() == [False] * 3 + [True] * 9
    assert 0 <= int(rollout.tokens["input_ids"].min()) <= int(rollout.tokens["input_ids"].max()) < 64
    assert checksum(rollout) == checksum(make_rollout(SPEC, 64))


def test_the_checksum_sees_every_change():
    rollout = make_rollout(SPEC, 64)
    ids, mask = rollout.tokens["input_ids"], rollout.tokens["loss_mask"]
    other = ids.clone()
    other[5] ^= 1
    changed = [
        make_rollout(RolloutSpec("r2", "p1", 3, 9), 64),
        type(rollout)(tokens={"input_ids": other, "loss_mask": mask}, rollout_id="r1"),
        type(rollout)(tokens={"input_ids": ids, "loss_mask": ~mask}, rollout_id="r1"),
        type(rollout)(tokens={"input_ids": ids.to(torch.int32), "loss_mask": mask}, rollout_id="r1"),
        type(rollout)(tokens={"input_ids": ids}, rollout_id="r1"),
    ]
    sums = {checksum(rollout), *map(checksum, changed)}
    assert len(sums) == 1 + len(changed)


def test_a_trace_is_scaled_until_the_longest_fits(trace):
    work = load_workload(DemoOptions(trace=trace, rollouts=10, max_length=109))
    assert work.longest == 109
    assert work.scale == pytest.approx(0.1)
    assert work.num_tokens == sum(s.num_tokens for s in work.specs)
    assert len({s.rollout_id for s in work.specs}) == 10
    assert len({s.group_id for s in work.specs}) == 5


def test_scale_can_be_given_and_every_rollout_keeps_a_prompt_and_an_output(trace):
    work = load_workload(DemoOptions(trace=trace, rollouts=10, scale=1e-6))
    assert work.scale == 1e-6
    assert all((s.prompt_tokens, s.output_tokens) == (1, 1) for s in work.specs)


@pytest.mark.parametrize("rollouts", [4, 10, 25])
def test_as_many_rollouts_as_asked_for_even_beyond_the_file(trace, rollouts):
    options = DemoOptions(trace=trace, rollouts=rollouts)
    work = load_workload(options)
    assert len(work.specs) == rollouts
    assert work.specs == load_workload(options).specs
    assert len({s.rollout_id for s in work.specs}) == rollouts


def test_generated_lengths_are_the_default():
    work = load_workload(DemoOptions(rollouts=50))
    assert len(work.specs) == 50
    assert work.longest == DemoOptions().max_length


def test_an_unknown_generator_or_file_is_a_trace_error(tmp_path):
    with pytest.raises(TraceError, match="no length model is called 'nope'"):
        load_workload(DemoOptions(generator="nope"))
    with pytest.raises(TraceError, match="cannot be read"):
        load_workload(DemoOptions(trace=tmp_path / "missing.csv"))
