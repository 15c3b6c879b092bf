"""Rollouts that several ranks share: which tokens each holds, and that nothing is lost or counted twice."""

from __future__ import annotations

import pickle

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from stream_balancer.integrations.areal import trajectories_from
from stream_balancer.testing import make_rollout
from stream_balancer.types import MicroBatch, Rollout, SharedRollout
from stream_balancer.types.shared import chunk_tokens, join_column, part_of, rows_behind, rows_of

DEGREES = (2, 4, 8, 3)
LENGTHS = (1, 2, 3, 7, 8, 9, 64, 129)


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
    return [MicroBatch.shared(wholes, tuple(range(degree)), place) for place in range(degree)]


def naive_part(column: torch.Tensor, degree: int, place: int) -> torch.Tensor:
    """By the definition, token by token."""
    chunk = -(-len(column) // (2 * degree))
    long = torch.cat([column, column.new_zeros((2 * degree * chunk - len(column), *column.shape[1:]))])
    chunks = long.split(chunk)
    return torch.cat([chunks[place], chunks[2 * degree - 1 - place]])


def shifted(column: torch.Tensor) -> torch.Tensor:
    return torch.cat([column[1:], column.new_zeros((1, *column.shape[1:]))])


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_each_member_holds_its_two_chunks(num_tokens: int, degree: int) -> None:
    rollout = a_rollout(num_tokens)
    for place in range(degree):
        part = part_of(rollout, degree, place)
        assert part.num_tokens == 2 * chunk_tokens(num_tokens, degree)
        for name, column in rollout.tokens.items():
            assert torch.equal(part.tokens[name], naive_part(column, degree, place))
            assert torch.equal(torch.cat(rows_of(part, name)), part.tokens[name])
            assert torch.equal(torch.cat(rows_behind(part, name)), part.behind[name])


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
    packed = MicroBatch.shared([a_rollout(9), a_rollout(8, "s")], (4, 5), 1).packed()
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
    with pytest.raises(ValueError, match="cannot be shared"):
        part_of(part_of(whole, 2, 0), 2, 0)


def test_adapters_refuse_chunks() -> None:
    (part,) = shared([a_rollout(9)], 2)[0].rollouts
    with pytest.raises(ValueError, match="'r' is shared by 2 ranks"):
        trajectories_from([part])
