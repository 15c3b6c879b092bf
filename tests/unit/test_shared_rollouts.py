"""Rollouts that several ranks share: which tokens each holds, and that nothing is lost or counted twice."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from helpers import polled
from hypothesis import given
from invariants import verify
from scripted import same_rollout

import stream_balancer as sb
from stream_balancer.core import batching
from stream_balancer.core.machine import BalancerCore
from stream_balancer.host.checkpoint import read_state_dict, state_dict
from stream_balancer.integrations.areal import trajectories_from
from stream_balancer.rollouts import Batch, MicroBatch, Rollout, SharedRollout
from stream_balancer.rollouts.shared import join_column, part_of
from stream_balancer.testing import make_rollout
from stream_balancer.wire.encode import encode_rollouts

DEGREES = (2, 4, 8, 3)


def a_rollout(num_tokens: int, name: str = "r", *, mask: bool = True) -> Rollout:
    generator = torch.Generator().manual_seed(num_tokens)
    tokens = {
        "input_ids": torch.randint(1, 2**40, (num_tokens,), generator=generator),
        "hidden": torch.randn(num_tokens, 2, 3, generator=generator).to(torch.bfloat16),
        "nothing": torch.empty(num_tokens, 0),
    }
    if mask:
        tokens["loss_mask"] = torch.rand(num_tokens, generator=generator) < 0.5
    return Rollout(tokens=tokens, scalars={"advantage": 2.0}, rollout_id=name, group_id="g", execution_id="e")


def shared(wholes: list[Rollout], degree: int) -> list[MicroBatch]:
    return [MicroBatch.of(wholes, cp_group=tuple(range(degree)), cp_rank=place) for place in range(degree)]


def shifted(column: torch.Tensor) -> torch.Tensor:
    return torch.cat([column[1:], column.new_zeros((1, *column.shape[1:]))])


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=3), degree=st.sampled_from(DEGREES), mask=st.booleans()
)
def test_joined_they_are_the_whole(lengths: list[int], degree: int, mask: bool) -> None:
    wholes = [a_rollout(length, f"r{i}", mask=mask) for i, length in enumerate(lengths)]
    members = shared(wholes, degree)
    layouts = [member.packed() for member in members]
    offsets = layouts[0].cu_seqlens.tolist()
    assert [one.cu_seqlens.tolist() for one in layouts] == [offsets] * degree
    unsplit = MicroBatch.of(wholes).packed()
    assert {*layouts[0]} == {*unsplit}
    for number, whole in enumerate(wholes):
        rows = slice(offsets[number], offsets[number + 1])
        tokens = slice(*unsplit.cu_seqlens[number : number + 2].tolist())
        for name in unsplit.columns:
            joined = join_column([one[name][rows] for one in layouts], whole.num_tokens)
            assert torch.equal(joined, unsplit[name][tokens])
            following = join_column([one.next(name)[rows] for one in layouts], whole.num_tokens)
            assert torch.equal(following, shifted(unsplit[name][tokens]))
            assert torch.equal(following, unsplit.next(name)[tokens])
        positions = torch.cat([one.position_ids[rows] for one in layouts])
        assert sorted(positions.tolist()) == list(range(len(positions)))
        assert join_column([one.position_ids[rows] for one in layouts], whole.num_tokens).tolist() == list(
            range(whole.num_tokens)
        )
        parts = [member.rollouts[number] for member in members]
        assert sum(part.num_loss_tokens for part in parts) == whole.num_loss_tokens
        assert sum(int(one["loss_mask"][rows].count_nonzero()) for one in layouts) == whole.num_loss_tokens


def test_where_the_whole_rollouts_lie() -> None:
    packed = MicroBatch.of([a_rollout(9), a_rollout(8, "s")], cp_group=(4, 5), cp_rank=1).packed()
    assert packed.cu_seqlens.tolist() == [0, 6, 10]
    assert packed.whole_lengths == (9, 8)
    assert packed.whole_cu_seqlens.tolist() == [0, 9, 17]
    assert packed.whole_cu_seqlens_padded.tolist() == [0, 12, 20]
    assert packed.whole_cu_seqlens.dtype == packed.whole_cu_seqlens_padded.dtype == torch.int32
    unsplit = MicroBatch.of([a_rollout(9), a_rollout(8, "s")]).packed()
    assert unsplit.whole_cu_seqlens.tolist() == unsplit.whole_cu_seqlens_padded.tolist() == [0, 9, 17]


@pytest.mark.parametrize("layout", ["padded", "nested"])
def test_layouts_of_rows_are_refused(layout: str) -> None:
    with pytest.raises(ValueError, match=rf"{layout}\(\): 2 ranks share .* Take packed\(\)"):
        getattr(shared([a_rollout(9)], 2)[0], layout)()


def test_a_part_is_the_rollouts_in_all_else() -> None:
    whole = make_rollout(9, "r", group_id="g", version=(1, 2), cost=3.0)
    part = part_of(whole, 4, 3)
    assert isinstance(part, SharedRollout)
    assert (part.cp_degree, part.cp_rank, part.whole_tokens, part.whole) == (4, 3, 9, whole)
    same = ("rollout_id", "group_id", "execution_id", "version", "cost", "scalars", "metadata", "tensors", "prefix")
    assert all(getattr(part, name) == getattr(whole, name) for name in same)
    again = pickle.loads(pickle.dumps(part))  # noqa: S301 - our own bytes
    assert torch.equal(again.tokens["input_ids"], part.tokens["input_ids"])


def test_what_cannot_be_shared() -> None:
    whole = make_rollout(9, "r")
    for degree, place in ((2, 2), (1, 0), (2, -1)):
        with pytest.raises(ValueError, match="degree must be >= 2"):
            part_of(whole, degree, place)
    with pytest.raises(ValueError, match="cannot be shared"):
        part_of(whole.padding_copy("p"), 2, 0)
    part = part_of(whole, 2, 0)
    with pytest.raises(ValueError, match="cannot be shared"):
        part_of(part, 2, 0)
    for put in (
        lambda: BalancerCore(sb.BalancerConfig(dp_size=1, batch_size=1)).add(part, 0.0),
        lambda: encode_rollouts([part]),
    ):
        with pytest.raises(sb.errors.RolloutError, match="Put the whole rollout"):
            put()


def test_adapters_refuse_chunks() -> None:
    (part,) = shared([a_rollout(9)], 2)[0].rollouts
    with pytest.raises(ValueError, match="'r' is shared by 2 ranks"):
        trajectories_from([part])


def core_of(lengths: list[int], *, dp_size: int = 4, **knobs: Any) -> BalancerCore:
    """Rollouts r0, r1, ... of these lengths; every second one has no loss on its first half."""
    knobs = {"context_parallel": {"sizes": (1, 2, 4), "min_tokens": 1}, "sync": "step"} | knobs
    config = sb.BalancerConfig(dp_size=dp_size, batch_size=len(lengths), window=len(lengths), **knobs)
    core = BalancerCore(config)
    for number, length in enumerate(lengths):
        prompt = length // 2 if number % 2 else 0
        core.add(make_rollout(length, f"r{number}", prompt_tokens=prompt, seed=number), now=0.0)
    return core


LENGTHS = [401, 7, 130, 9, 31, 33, 40]
"""The first is longer than a rank's fair share: the planner has ranks share it."""


def names(batch: Batch) -> list[list[list[str]]]:
    return [
        [[r.rollout_id for r in mb.rollouts if not r.is_padding] for mb in one.micro_batches] for one in batch.ranks
    ]


def check_whole(batch: Batch, rollouts: dict[str, Rollout]) -> None:
    """Each rollout is somewhere once, or in parts that join to it, at the ranks that they name."""
    parts: dict[str, dict[int, SharedRollout]] = {}
    alone: Counter[str] = Counter()
    for one in batch.ranks:
        assert one.global_num_rollouts == len(rollouts)
        assert one.global_num_tokens == sum(r.num_tokens for r in rollouts.values())
        assert one.global_num_loss_tokens == sum(r.num_loss_tokens for r in rollouts.values())
        assert one.global_num_executions == len(rollouts)
        for mb in one.micro_batches:
            assert not mb.cp_group or mb.cp_group[mb.cp_rank] == one.rank
            for rollout in mb.rollouts:
                if isinstance(rollout, SharedRollout):
                    assert len(mb.cp_group) == rollout.cp_degree
                    parts.setdefault(rollout.rollout_id, {})[one.rank] = rollout
                elif not rollout.is_padding:
                    assert not mb.cp_group
                    alone[rollout.rollout_id] += 1
    assert alone.keys().isdisjoint(parts)
    assert alone.keys() | parts.keys() == rollouts.keys()
    assert set(alone.values()) <= {1}
    for name, its in parts.items():
        members = sorted(its)
        assert members == list(range(members[0], members[0] + len(members)))
        assert members[0] % len(members) == 0, "not an aligned block"
        for column, values in rollouts[name].tokens.items():
            assert torch.equal(join_column([its[rank].tokens[column] for rank in members], len(values)), values)
        assert sum(one.num_loss_tokens for one in its.values()) == rollouts[name].num_loss_tokens
    assert sorted(r.rollout_id for r in batch.rollouts if not r.is_padding) == sorted(rollouts)
    assert all(same_rollout(r, rollouts[r.rollout_id]) for r in batch.rollouts if not r.is_padding), "not whole"
    assert batch.num_rollouts == len(rollouts)


def same_batch(one: Batch, other: Batch) -> None:
    assert names(one) == names(other)
    assert one.loads == other.loads
    assert one.num_padding == other.num_padding
    for mine, theirs in zip(one.ranks, other.ranks, strict=True):
        assert [(mb.cp_group, mb.cp_rank, mb.lengths) for mb in mine.micro_batches] == [
            (mb.cp_group, mb.cp_rank, mb.lengths) for mb in theirs.micro_batches
        ]
        assert all(same_rollout(a, b) for a, b in zip(mine.rollouts, theirs.rollouts, strict=True))


def test_a_checkpoint_has_a_step_in_flight_as_it_was() -> None:
    core = core_of(LENGTHS)
    rollouts = {r.rollout_id: r for r in core.buffer.rollouts()}
    batch = polled(core, 1.0)
    assert any(mb.cp_group for one in batch.ranks for mb in one.micro_batches)
    written = state_dict(core.snapshot(2.0))
    size = sum(row.nbytes for row in written["rollouts"])
    whole = sum(r.nbytes for r in rollouts.values())
    assert size < 1.2 * whole + 4096 * len(batch.ranks), "a shared rollout is written once"
    other = BalancerCore(core.config)
    other.restore(read_state_dict(written), now=3.0)
    verify(other)
    again = polled(other)
    same_batch(batch, again)
    check_whole(again, rollouts)
    assert other.acknowledge(0).num_rollouts == len(LENGTHS)
    verify(other)


@given(
    lengths=st.lists(st.integers(1, 300), min_size=8, max_size=14),
    long=st.lists(st.integers(400, 4000), min_size=0, max_size=2),
    sync=st.sampled_from(["step", "micro_batch"]),
    dp_size=st.sampled_from([2, 4, 8]),
)
def test_whatever_the_planner_shares(lengths: list[int], long: list[int], sync: Any, dp_size: int) -> None:
    core = core_of(
        long + lengths,
        dp_size=dp_size,
        sync=sync,
        context_parallel=sb.ContextParallel(sizes=(1, 2, 4, 8), min_tokens=1),
        micro_batches=sb.MicroBatches(max_tokens=5000),
    )
    rollouts = {r.rollout_id: r for r in core.buffer.rollouts()}
    batch = polled(core, 1.0)
    check_whole(batch, rollouts)
    verify(core)
    if sync == "step":
        for one in batch.ranks:
            degrees = [max(len(mb.cp_group), 1) for mb in one.micro_batches]
            assert degrees == sorted(degrees, reverse=True)
    core.acknowledge(0)
    verify(core)


def test_what_others_take_over_is_not_shared_anew() -> None:
    """Of a step that is not shared, after ``context_parallel.sizes`` came: who is left is no aligned block."""
    core = core_of([4000, *[100] * 12], context_parallel=sb.ContextParallel(sizes=(1,), min_tokens=1))
    batch = polled(core, 1.0)
    core.reconfigure(core.config.replace(context_parallel={"sizes": (1, 2, 4)}))
    parts = batching.lay_out(core, list(batch.rollouts), batch.rollouts, step=batch.step, dp_size=2)
    assert all(parts)
    assert not any(mb.cp_group for part in parts for mb in part)
