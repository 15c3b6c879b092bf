"""Packed, padded, nested hold the same tokens, and only those; a tree of shared prefixes, each of them once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from codec_help import carried
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import stream_balancer as sb
from stream_balancer.rollouts import MicroBatch, Rollout
from stream_balancer.rollouts.trees import Tree

lengths_lists = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def numbered(lengths: list[int], **extra: torch.Tensor) -> sb.rollouts.MicroBatch:
    start, rollouts = 1, []
    for n in lengths:
        ids = torch.arange(start, start + n)
        rollouts.append(
            sb.Rollout(tokens={"input_ids": ids, "h": ids[:, None] * torch.ones(1, 2)}, scalars={"advantage": float(n)})
        )
        start += n
    return sb.rollouts.MicroBatch.of(rollouts)


@given(lengths_lists)
def test_packed(lengths: list[int]) -> None:
    packed = numbered(lengths).packed()
    total = sum(lengths)
    assert packed["input_ids"].tolist() == list(range(1, total + 1))
    assert packed["h"].shape == (total, 2)
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.cu_seqlens.diff().tolist() == lengths
    assert packed.max_seqlen == max(lengths)
    assert packed.position_ids.tolist() == [i for n in lengths for i in range(n)]
    assert packed["advantage"].tolist() == [float(n) for n in lengths]
    assert packed["loss_mask"].tolist() == [i > 0 for n in lengths for i in range(n)]


@pytest.mark.parametrize("mask", [None, [1, 1, 1], [0, 1, 1], [0, 0, 1]])
@pytest.mark.parametrize("degree", [1, 2], ids=["whole", "shared"])
def test_a_shifted_loss_is_that_of_each_sequence_by_itself(mask: list[int] | None, degree: int) -> None:
    """A rollout's first token is predicted from nothing: neither summed, nor counted."""
    logits = torch.randn(50, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rollouts = []
    for number, length in enumerate((7, 2, 1, 12)):
        tokens = {"input_ids": torch.randint(50, (length,), generator=torch.Generator().manual_seed(number))}
        tokens["logprobs"] = torch.arange(length, dtype=torch.float64) + number
        if mask is not None:
            tokens["loss_mask"] = torch.tensor((mask * length)[:length])
        rollouts.append(sb.Rollout(tokens=tokens, scalars={"advantage": 0.5 + number}))
    expected, count = torch.zeros((), dtype=torch.float64), 0
    for rollout in rollouts:
        ids, trained = rollout.tokens["input_ids"], rollout.tokens.get("loss_mask", torch.ones(rollout.num_tokens))[1:]
        logprobs = logits.log_softmax(-1)[ids[:-1], ids[1:]] - rollout.tokens["logprobs"][1:]
        expected += (logprobs * trained).sum() * rollout.scalars["advantage"]
        count += int(trained.count_nonzero())
    found, trained_on = torch.zeros((), dtype=torch.float64), 0
    for place in range(degree):
        whole = sb.rollouts.MicroBatch.of(rollouts)
        block = tuple(range(degree))
        part = whole if degree == 1 else sb.rollouts.MicroBatch.of(rollouts, cp_group=block, cp_rank=place)
        packed = part.packed(shift=True)
        logprobs = logits.log_softmax(-1)[packed["input_ids"], packed["targets"]] - packed["logprobs"]
        weights = packed.per_token("advantage") * packed["loss_mask"]
        found += (logprobs * weights).sum()
        trained_on += int(packed["loss_mask"].count_nonzero())
    torch.testing.assert_close(found, expected)
    assert sum(rollout.num_loss_tokens for rollout in rollouts) == trained_on == count


@given(lengths_lists, st.sampled_from(["left", "right"]), st.integers(1, 4))
def test_padded(lengths: list[int], side: str, multiple_of: int) -> None:
    mb = numbered(lengths)
    padded = mb.padded(padding_side=side, pad_values={"input_ids": -7}, multiple_of=multiple_of)  # type: ignore[arg-type]
    width = padded["input_ids"].shape[1]
    assert width % multiple_of == 0
    assert 0 <= width - max(lengths) < multiple_of
    start = 1
    for row, n in enumerate(lengths):
        real = slice(0, n) if side == "right" else slice(width - n, width)
        assert padded["input_ids"][row, real].tolist() == list(range(start, start + n))
        assert padded.position_ids[row, real].tolist() == list(range(n))
        assert int(padded.attention_mask[row].sum()) == n
        assert (padded["input_ids"][row][~padded.attention_mask[row]] == -7).all()
        assert (padded["h"][row][~padded.attention_mask[row]] == 0).all()
        start += n


@given(lengths_lists)
def test_nested(lengths: list[int]) -> None:
    mb = numbered(lengths)
    nested = mb.nested()
    parts = nested["input_ids"].unbind()
    assert [p.tolist() for p in parts] == [r.tokens["input_ids"].tolist() for r in mb.rollouts]
    assert nested.offsets.diff().tolist() == lengths


def test_tensordict_says_what_to_install_or_works() -> None:
    try:
        import tensordict  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match=r"stream-balancer\[tensordict\]"):
            numbered([1, 2]).tensordict()
    else:
        assert numbered([1, 2]).tensordict().batch_size == torch.Size([2])


LAYOUTS = ["packed", "padded", "nested"]


def numbers(layout: str, **options: torch.dtype) -> dict[str, torch.Tensor]:
    """Scalars of two rollouts in a layout."""
    rollouts = [
        sb.Rollout(tokens={"input_ids": [1, 2]}, scalars={"reward": 0.1 * n, "seed": 2**53 + n, "won": n == 1})
        for n in (1, 2)
    ]
    found: dict[str, torch.Tensor] = getattr(sb.rollouts.MicroBatch.of(rollouts), layout)(**options).scalars
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_scalar_does_not_turn_a_float32_loss_into_float64(layout: str) -> None:
    scalars = numbers(layout)
    assert {scalar.dtype for scalar in scalars.values()} == {torch.float32}
    assert (torch.ones(2, requires_grad=True) * scalars["reward"]).sum().dtype is torch.float32
    assert scalars["reward"].tolist() == torch.tensor([0.1, 0.2]).tolist()
    assert scalars["won"].tolist() == [1.0, 0.0]


def spread_out(layout: str, name_or_values: str | torch.Tensor, rollouts: list[sb.Rollout]) -> list[list[float]]:
    """Rollout by rollout, [n][L], whatever the layout; what lies on padding must be zero."""
    laid_out = getattr(sb.rollouts.MicroBatch.of(rollouts), layout)()
    found = laid_out.per_token(name_or_values)
    assert found.shape == laid_out["input_ids"].shape or layout == "nested"
    if layout == "packed":
        return [part.tolist() for part in found.split([r.num_tokens for r in rollouts])]
    if layout == "padded":
        assert not found[~laid_out.attention_mask].any()
        return [row[mask].tolist() for row, mask in zip(found, laid_out.attention_mask, strict=True)]
    assert torch.equal((found + laid_out["input_ids"]).offsets(), laid_out.offsets)  # torch takes their shapes for one
    return [part.tolist() for part in found.unbind()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_number_of_each_rollout_is_spread_over_its_tokens(layout: str) -> None:
    rollouts = [sb.Rollout(tokens={"input_ids": range(n)}, scalars={"advantage": n / 2}) for n in (2, 3, 1)]
    assert spread_out(layout, "advantage", rollouts) == [[1.0, 1.0], [1.5, 1.5, 1.5], [0.5]]
    normalised = torch.tensor([7, 8, 9])
    assert spread_out(layout, normalised, rollouts) == [[7, 7], [8, 8, 8], [9]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [2.0, float("inf")])
def test_what_is_spread_is_zero_on_padding_copies(layout: str, value: float) -> None:
    real = sb.Rollout(tokens={"input_ids": [1, 2]}, scalars={"advantage": 1.0})
    copied = sb.Rollout(tokens={"input_ids": [1, 2]}, scalars={"advantage": value})
    assert spread_out(layout, "advantage", [real, copied.padding_copy("p")]) == [[1.0, 1.0], [0.0]]


def test_a_column_of_ones_own_called_targets_is_not_lost_in_the_shift() -> None:
    ids = torch.arange(3)
    held = sb.rollouts.MicroBatch.of([sb.Rollout(tokens={"input_ids": ids, "targets": ids + 7})])
    assert held.packed()["targets"].tolist() == [7, 8, 9]
    with pytest.raises(ValueError, match=r"shift=True.*'targets'"):
        held.packed(shift=True)


def sibling(group: str | None, prompt: int, own: int, *, declared: int | None = None, number: int = 0) -> Rollout:
    """Its prompt's tokens follow from the group, its own from the number."""
    seed = sum(map(ord, group or "")) * 1000
    ids = torch.cat([torch.arange(prompt) + seed, torch.arange(own) + 10**6 * (number + 1)])
    return Rollout(
        tokens={"input_ids": ids, "pairs": torch.stack([ids, -ids], 1), "logprobs": torch.randn(prompt + own)},
        group_id=group,
        rollout_id=f"r{number}",
        prefix=(prompt if declared is None else declared) if group else 0,
    )


@st.composite
def micro_batches(draw: st.DrawFn) -> MicroBatch:
    """Groups of any sizes, siblings apart, some that share less than the others or nothing, some in no group."""
    prompts = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    rollouts = []
    for number in range(draw(st.integers(1, 7))):
        group = draw(st.integers(-1, len(prompts) - 1))
        prompt = prompts[group] if group >= 0 else 0
        declared = draw(st.sampled_from([prompt, prompt, max(prompt - 1, 0), 0]))
        own = draw(st.integers(1, 5))
        rollouts.append(sibling(f"g{group}" if group >= 0 else None, prompt, own, declared=declared, number=number))
    if draw(st.booleans()):
        rollouts.append(rollouts[0].padding_copy("padding-0"))
    return MicroBatch.of(rollouts)


def on_a_rank(micro_batch: MicroBatch) -> MicroBatch:
    """As it arrives there."""
    return carried(micro_batch).micro_batches[0]


def expected_mask(micro_batch: MicroBatch, unique: Tree) -> Tensor:
    """Of the definition: in some rollout, the one is at or before the other."""
    mask = torch.zeros(unique.num_tokens, unique.num_tokens, dtype=torch.bool)
    for rows in torch.split(unique.index, list(micro_batch.lengths)):
        for place, row in enumerate(rows):
            mask[row, rows[: place + 1]] = True
    return mask


@given(micro_batches())
def test_the_dense_layout_comes_back_and_nothing_is_there_twice(micro_batch: MicroBatch) -> None:
    packed, unique = micro_batch.packed(), micro_batch.tree(["input_ids", "pairs"])
    for name in ("input_ids", "pairs"):
        assert unique[name][unique.index].equal(packed[name])
        assert unique[name].dtype == packed[name].dtype
    assert unique.position_ids[unique.index].equal(packed.position_ids)
    assert unique.columns.keys() == {"input_ids", "pairs"}
    sharing: dict[str, list[Rollout]] = {}
    for rollout in micro_batch.rollouts:
        if rollout.prefix and rollout.group_id is not None:
            sharing.setdefault(rollout.group_id, []).append(rollout)
    saved = sum((len(its) - 1) * min(one.prefix for one in its) for its in sharing.values())
    assert unique.num_tokens == len(unique["input_ids"]) == micro_batch.num_tokens - saved
    assert unique.index.unique().tolist() == list(range(unique.num_tokens))
    # every rollout of the micro-batch is a chain of nodes from a root
    starts = {node.start: node for node in unique.nodes}
    for rows, leaf in zip(torch.split(unique.index, list(micro_batch.lengths)), unique.leaves, strict=True):
        chain = [starts[int(row)] for row in rows if int(row) in starts]
        assert [node.parent for node in chain] == [-1, *(unique.nodes.index(node) for node in chain[:-1])]
        assert sum(node.stop - node.start for node in chain) == len(rows)
        assert chain[-1] == unique.nodes[leaf]


@given(micro_batches())
def test_a_rank_has_the_same_tree(micro_batch: MicroBatch) -> None:
    here, there = micro_batch.tree(["pairs"]), on_a_rank(micro_batch).tree(["pairs"])
    assert here.nodes == there.nodes
    for mine, theirs in ((here["pairs"], there["pairs"]), (here.index, there.index)):
        assert mine.equal(theirs)


@given(micro_batches(), st.sampled_from([1, 2, 4, 128]))
def test_every_mask_says_the_same(micro_batch: MicroBatch, block_size: int) -> None:
    unique = micro_batch.tree()
    mask = expected_mask(micro_batch, unique)
    assert unique.attention_mask().equal(mask)
    row = torch.arange(unique.num_tokens)
    zero = torch.tensor(0)
    assert unique.mask_mod(zero, zero, row[:, None], row).equal(mask)
    ours = unique.block_mask(block_size)
    theirs = create_block_mask(
        unique.mask_mod, None, None, unique.num_tokens, unique.num_tokens, device="cpu", BLOCK_SIZE=block_size
    )
    assert ours.shape == theirs.shape
    assert ours.to_dense().equal(theirs.to_dense())
    for mine, other in (
        (ours.kv_num_blocks, theirs.kv_num_blocks),
        (ours.full_kv_num_blocks, theirs.full_kv_num_blocks),
    ):
        assert mine is not None
        assert other is not None
        if block_size > 1:  # one token a block: torch calls the diagonal whole, which changes nothing
            assert mine.equal(other)


@given(micro_batches())
def test_keys_of_each_node_are_all_that_its_tokens_attend_to(micro_batch: MicroBatch) -> None:
    unique = micro_batch.tree()
    keys = unique.varlen_keys()
    mask = torch.zeros(unique.num_tokens, unique.num_tokens, dtype=torch.bool)
    queries = torch.split(torch.arange(unique.num_tokens), keys.cu_seqlens_q.diff().tolist())
    for its_queries, its_keys in zip(queries, torch.split(keys.rows, keys.cu_seqlens_k.diff().tolist()), strict=True):
        ahead = len(its_keys) - len(its_queries)  # the last query is aligned with the last key
        for place, query in enumerate(its_queries):
            mask[query, its_keys[: ahead + place + 1]] = True
    assert mask.equal(unique.attention_mask())
    assert keys.max_seqlen_q == int(keys.cu_seqlens_q.diff().max())
    assert keys.max_seqlen_k == int(keys.cu_seqlens_k.diff().max())


@given(micro_batches(), st.integers(1, 9))
def test_what_fills_up_to_a_multiple_is_nobodys(micro_batch: MicroBatch, multiple: int) -> None:
    plain, filled = (micro_batch.tree(["input_ids", "pairs"], multiple_of=number) for number in (1, multiple))
    size = plain.num_tokens
    assert filled.num_tokens == -(-size // multiple) * multiple
    assert filled.index.equal(plain.index)
    assert filled.leaves == plain.leaves
    for name in plain.columns:
        assert filled[name][:size].equal(plain[name])
        assert not filled[name][size:].any()
    mask = filled.attention_mask()
    assert mask[:size, :size].equal(plain.attention_mask())
    assert not mask[:size, size:].any()
    assert not mask[size:, :size].any()
    assert mask.any(1).all(), "a row that attends to nothing has no softmax"
    with pytest.raises(ValueError, match="multiple_of must be >= 1"):
        micro_batch.tree(multiple_of=0)


def test_siblings_share_the_least_and_who_declares_nothing_shares_nothing() -> None:
    made = [sibling("g", 6, 2, declared=declared, number=declared) for declared in (6, 0, 4)]
    unique = MicroBatch.of(made).tree()
    assert [node[:3] for node in unique.nodes] == [(0, 4, -1), (4, 8, 0), (8, 12, 0), (12, 20, -1)]
    assert unique.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7]


def test_own_positions_are_those_of_the_unique_tokens() -> None:
    positions = torch.arange(5)[:, None] * torch.tensor([1, 10])
    made = [
        Rollout(tokens={"input_ids": [1, 2, 3, n, n], "position_ids": positions}, group_id="g", prefix=3)
        for n in (7, 8)
    ]
    unique = MicroBatch.of(made).tree()
    assert unique.position_ids.equal(positions[[0, 1, 2, 3, 4, 3, 4]])
    assert MicroBatch.of(made).tree(["position_ids"]).columns.keys() == {"position_ids"}
    other = replace(made[1], tokens={**made[1].tokens, "position_ids": positions + 1})
    with pytest.raises(sb.errors.RolloutError, match="differ in 'position_ids' at token 0"):
        MicroBatch.of([made[0], other]).tree()


@pytest.mark.parametrize("place", [0, 2, 4])
@pytest.mark.parametrize("carry", [lambda one: one, on_a_rank], ids=["controller", "rank"])
def test_prefixes_that_differ_are_refused_by_name(place: int, carry: Any) -> None:
    good, lone, bad = sibling("g", 5, 2, number=1), sibling(None, 0, 3, number=2), sibling("g", 5, 4, number=3)
    bad.tokens["input_ids"][place] += 1
    micro_batch = carry(MicroBatch.of([good, lone, bad]))
    with pytest.raises(
        sb.errors.RolloutError,
        match=f"rollout 'r3' and its sibling rollout 'r1' .* differ in 'input_ids' at token {place}",
    ):
        micro_batch.tree()
    assert micro_batch.tree(check=False).num_tokens == 14
    assert MicroBatch.of([good, bad]).tree(["pairs"]).num_tokens == 11, "what the model does not read may differ"
    with pytest.raises(KeyError, match="no column"):
        micro_batch.tree(["mask"])
