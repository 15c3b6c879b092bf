"""Lengths and tokens of the demo's rollouts."""

import pytest
import torch
from stream_balancer_demo.options import DemoOptions
from stream_balancer_demo.rollouts import checksum, load_workload, make_rollout

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
    other = torch.where(torch.arange(12) == 5, ids ^ 1, ids)
    columns = [(other, mask), (ids, ~mask), (ids.to(torch.int32), mask)]
    changed = [type(rollout)(tokens={"input_ids": i, "loss_mask": m}, rollout_id="r1") for i, m in columns]
    changed.append(type(rollout)(tokens={"input_ids": ids}, rollout_id="r1"))
    assert len({checksum(rollout), *map(checksum, changed)}) == 5


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
