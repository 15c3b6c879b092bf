"""Checkpoints: everything comes back, through torch.save and DCP, on other ranks, and damage is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from cores import saved
from helpers import config
from invariants import verify
from scripted import awkward_micro_batches, same_rollout

import stream_balancer as sb
from stream_balancer.core.machine import BalancerCore
from stream_balancer.host.checkpoint import read_state_dict, state_dict
from stream_balancer.host.plan_rows import plan_of


def rich_rollout(n: int) -> sb.Rollout:
    """Something in every field, and bytes of every dtype."""
    first = awkward_micro_batches()[0][0]
    tokens = {name: column.repeat(n + 1, *[1] * (column.ndim - 1)) for name, column in first.tokens.items()}
    return replace(first, tokens=tokens, rollout_id=f"r{n}", version=(n, n + 1), cost=None if n % 3 else float(n))


def busy_core() -> BalancerCore:
    """Five rollouts wait, four are in flight, four are done."""
    core = BalancerCore(config(deadline_s=100.0))
    for n in range(13):
        core.add(rich_rollout(n), float(n))
        batch = core.poll(float(n))
        if batch is not None and batch.step == 0:
            core.acknowledge(0)
    assert (core.statistics(20.0).waiting, core.statistics(20.0).in_flight) == (5, 4)
    return core


def test_everything_comes_back_through_torch_save() -> None:
    core = busy_core()
    before = core.snapshot(20.0)
    after = saved(core, 20.0)
    assert all(same_rollout(a, b) for a, b in zip(before.waiting, after.waiting, strict=True))
    assert after.waited_s.tolist() == before.waited_s.tolist()
    assert after.skips.tolist() == before.skips.tolist()
    assert after.past_ids == before.past_ids
    assert (after.version, after.next_step) == (before.version, before.next_step)
    assert [plan_of(batch) for batch in after.in_flight] == [plan_of(batch) for batch in before.in_flight]
    for x, y in zip(before.in_flight, after.in_flight, strict=True):
        assert all(same_rollout(a, b) for a, b in zip(x.rollouts, y.rollouts, strict=True))
        assert (x.num_tokens, x.ranks[1].denominators) == (y.num_tokens, y.ranks[1].denominators)


def test_knobs_that_refuse_a_rollout_say_which_and_change_nothing() -> None:
    fresh = BalancerCore(config(micro_batches=sb.MicroBatches(max_tokens=8)))
    with pytest.raises(sb.errors.RolloutError, match=r"has \d+ tokens, above micro_batches.max_tokens \(8\)"):
        fresh.restore(busy_core().snapshot(20.0), 0.0)
    assert fresh.statistics(0.0).accepted == 0
    verify(fresh)


@pytest.mark.filterwarnings("ignore")  # DCP's own, without a process group
def test_dcp_saves_and_loads_it(tmp_path: Path) -> None:
    with sb.blocking(config()) as balancer:
        for n in range(5):
            balancer.put(rich_rollout(n))
        dcp.save({"balancer": balancer.state_dict()}, checkpoint_id=tmp_path)
        like = balancer.state_dict()
    dcp.load({"balancer": like}, checkpoint_id=tmp_path)
    with sb.blocking(config()) as balancer:
        balancer.load_state_dict(like)
        assert balancer.statistics().waiting == 5
        balancer.end()
        (first, *_) = balancer.batches()
        assert first.num_rollouts == 4


@pytest.mark.parametrize("at", [0, 8, 40, 120])
def test_a_damaged_row_is_set_aside_and_the_rest_comes_back(
    at: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan of a batch in flight is void without its rollouts, and the others of it wait again, as the oldest."""
    monkeypatch.setattr("stream_balancer.host.checkpoint._ROLLOUTS_TOGETHER", 3)
    core = busy_core()
    (batch,) = core.in_flight()
    state = state_dict(core.snapshot(20.0))
    state["rollouts"][0][at] ^= 255
    with sb.blocking(config()) as balancer:
        lost, void = balancer.load_state_dict(state)
        assert "rollouts 0 to 2: its bytes were damaged" in lost
        assert void == f"step {batch.step}: its plan names rollouts that are lost"
        assert lost in caplog.text
        assert void in caplog.text
        statistics = balancer.statistics()
        assert (statistics.waiting, statistics.in_flight, statistics.accepted) == (6, 0, 10)
        balancer.end()
        again = [r.rollout_id for b in balancer.batches() for r in b.rollouts if not r.is_padding]
    assert len(set(again) & {r.rollout_id for r in batch.rollouts}) == 1


@pytest.mark.parametrize("at", [0, 20, -1])
def test_damaged_facts_are_named_and_rollouts_come_back(at: int) -> None:
    state = state_dict(busy_core().snapshot(20.0))
    state["facts"][at] ^= 255
    snapshot = read_state_dict(state)
    assert snapshot.set_aside
    held = [*snapshot.waiting, *(r for batch in snapshot.in_flight for r in batch.rollouts)]
    assert len(held) == 9
    restored = BalancerCore(config())
    restored.restore(snapshot, 20.0)
    verify(restored)


def test_other_dicts_are_refused() -> None:
    with pytest.raises(ValueError, match="format is None, expected 7"):
        read_state_dict({})
    with pytest.raises(ValueError, match=r"format is 2, expected 7\. Load it with the stream_balancer that wrote it"):
        read_state_dict({"format": 2})
    for name in ("rollouts", "facts"):
        state = state_dict(busy_core().snapshot(20.0))
        del state[name]
        with pytest.raises(ValueError, match=f"has no '{name}'"):
            read_state_dict(state)
