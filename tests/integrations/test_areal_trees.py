"""Micro-batches with shared prefixes as AReaL's packed trees, against its own functions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stream_balancer as sb

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from areal_trees import packed_tree, trie_of

pytest.importorskip("areal")

from areal.api.cli_args import MicroBatchSpec
from areal.models.tree_attn.functional import gather_packed_tree_logprobs
from areal.models.tree_attn.tree import (
    build_attention_mask_from_trie,
    build_packed_tree_batch,
    get_packed_tree_position_ids,
    trie_to_parent_array,
)

SIZE = 128


@st.composite
def micro_batches(draw: st.DrawFn, *, distinct: bool = False) -> sb.rollouts.MicroBatch:
    """Groups and single rollouts. ``distinct``: no two siblings go on alike, and no two prompts begin alike."""
    rollouts = []
    for group in range(draw(st.integers(1, 3))):
        prompt = [100 * group + 1 + n for n in range(draw(st.integers(1, 6)))]
        for number in range(draw(st.integers(1, 3))):
            first = 50 + number if distinct else draw(st.integers(50, 51))
            ids = [*prompt, first, *draw(st.lists(st.integers(60, 62), max_size=4))]
            rollouts.append(
                sb.Rollout(
                    tokens={"input_ids": ids, "loss_mask": [0] * len(prompt) + [1] * (len(ids) - len(prompt))},
                    group_id=f"g{group}",
                    prefix=len(prompt),
                )
            )
    order = draw(st.permutations(rollouts))
    return sb.rollouts.MicroBatch.of(order)


@given(micro_batches())
@settings(deadline=None)
def test_areal_reads_our_trees(micro_batch: sb.rollouts.MicroBatch) -> None:
    tree, made = micro_batch.tree(), packed_tree(micro_batch, pad_to=SIZE)
    size, trie = tree.num_tokens, made["trie_node"]
    mask = build_attention_mask_from_trie(trie, SIZE, torch.device("cpu"))
    assert mask[:size, :size].equal(tree.attention_mask())
    assert not mask[size:].any()
    assert made["position_ids"].equal(get_packed_tree_position_ids(made["input_ids"], mask))
    assert trie.num_tokens == size
    assert trie.all_sequence_ids == list(range(len(micro_batch.lengths)))
    for sequence, rollout in enumerate(micro_batch.rollouts):
        spans = trie.get_sequence_tree_indices(sequence)
        ids = torch.cat([made["input_ids"][0, start : end + 1] for start, end in spans])
        assert ids.equal(rollout.tokens["input_ids"])
        assert [token for node in trie.nodes if sequence in node.sequence_ids for token in node.tokens] == ids.tolist()
    parents = trie_to_parent_array(trie, SIZE)[0, :size]
    assert [int(parents[node.start]) for node in tree.nodes] == [
        tree.nodes[node.parent].stop - 1 if node.parent >= 0 else -1 for node in tree.nodes
    ]


@given(micro_batches())
@settings(deadline=None)
def test_log_probabilities_are_areals(micro_batch: sb.rollouts.MicroBatch) -> None:
    tree, made = micro_batch.tree(), packed_tree(micro_batch, pad_to=SIZE)
    logits = torch.randn(SIZE, 512)
    theirs = gather_packed_tree_logprobs(logits, made["trie_node"], made["input_ids"])
    targets = micro_batch.packed()["input_ids"].roll(-1)
    ours = logits.log_softmax(-1)[tree.index, targets]
    last = torch.tensor(micro_batch.lengths).cumsum(0) - 1  # of each rollout: predicts nothing
    theirs[last] = ours[last] = 0
    torch.testing.assert_close(theirs, ours)


@given(micro_batches(distinct=True))
@settings(deadline=None)
def test_trees_are_those_that_areal_finds_itself(micro_batch: sb.rollouts.MicroBatch) -> None:
    padded = micro_batch.padded()
    data = {
        "input_ids": padded["input_ids"],
        "attention_mask": padded.attention_mask,
        "loss_mask": padded["loss_mask"],
    }
    (theirs,) = build_packed_tree_batch(data, MicroBatchSpec(max_tokens_per_mb=SIZE)).mbs
    ours = packed_tree(micro_batch, pad_to=SIZE)
    assert ours.keys() == theirs.keys()
    assert ours["loss_mask"].equal(theirs["loss_mask"])
    for name in ("input_ids", "position_ids"):
        assert (ours[name].shape, ours[name].dtype) == (theirs[name].shape, theirs[name].dtype)
        assert sorted(ours[name][0].tolist()) == sorted(theirs[name][0].tolist())

    def of_each(made: dict[str, object]) -> list[list[tuple[int, ...]]]:
        """The tokens of the nodes that each sequence passes; whose order is free. A lone sibling has one node."""
        nodes = made["trie_node"].nodes  # type: ignore[attr-defined]
        return [
            [tuple(node.tokens) for node in nodes if sequence in node.sequence_ids]
            for sequence in range(len(micro_batch.lengths))
        ]

    assert of_each(ours) == of_each(theirs)


def test_too_many_unique_tokens_are_refused() -> None:
    rollout = sb.Rollout(tokens={"input_ids": list(range(9))})
    with pytest.raises(ValueError, match=r"9 unique tokens do not fit into pad_to=8"):
        packed_tree(sb.rollouts.MicroBatch.of([rollout]), pad_to=8)
    filled = sb.rollouts.MicroBatch.of([rollout]).tree(multiple_of=16)
    assert trie_of(filled).num_tokens == 9
