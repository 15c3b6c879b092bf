"""AReaL's packed trees (``enable_tree_training``) of a micro-batch whose siblings share their prefix.

::

    mb = packed_tree(micro_batch, pad_to=max_tokens_per_mb)      # an entry of MicroBatchList.mbs
    kwargs = build_tree_attn_kwargs(mb["trie_node"], max_tokens_per_mb, device)

AReaL finds common tokens by itself, in each rank's batch, after rollouts were given to ranks. Here what is common was
declared, and the balancer has brought it together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.functional import pad

import stream_balancer as sb

if TYPE_CHECKING:
    from areal.models.tree_attn.tree import TrieNode

__all__ = ["packed_tree", "trie_of"]


def packed_tree(micro_batch: sb.rollouts.MicroBatch, *, pad_to: int) -> dict[str, Any]:
    """A micro-batch as AReaL's ``build_packed_tree_batch`` makes one: ``input_ids`` and ``position_ids``
    ``[1, pad_to]`` of the unique tokens, ``trie_node``, and every other column ``[T, ...]``, rollout by rollout.

    Sequences are the rollouts, by their place. Raises ValueError for more unique tokens than ``pad_to`` (a multiple of
    AReaL's block size, 128), and as :meth:`MicroBatch.tree` does. O(T).
    """
    tree, packed = micro_batch.tree(), micro_batch.packed()
    missing = pad_to - tree.num_tokens
    if missing < 0:
        raise ValueError(
            f"packed_tree(): {tree.num_tokens} unique tokens do not fit into pad_to={pad_to}. Give the balancer "
            f"micro_batches.max_tokens <= {pad_to}, or raise pad_to"
        )
    rows = {"input_ids": tree["input_ids"], "position_ids": tree.position_ids}
    others = {name: column for name, column in packed.columns.items() if name not in rows}
    found: dict[str, Tensor] = {name: pad(column, (0, missing))[None] for name, column in rows.items()}
    return {**others, **found, "trie_node": trie_of(tree)}


def trie_of(tree: Any) -> TrieNode:
    """The root of AReaL's trie over the unique tokens of ``micro_batch.tree()``. ``children`` are by their first row,
    since siblings may go on with the same token: AReaL's own joins these, too. O(N n)."""
    from areal.models.tree_attn.tree import TrieNode

    root = TrieNode(tree_id=0)
    ids = tree["input_ids"].tolist()
    for node in tree.nodes[: max(tree.leaves) + 1]:  # without what fills up
        parent = root.nodes[node.parent] if node.parent >= 0 else root
        made = TrieNode(
            tree_id=0,
            start_idx=node.start,
            # the last token, not the one behind it
            end_idx=node.stop - 1,
            tokens=ids[node.start : node.stop],
            ancestors=[*parent.ancestors, parent] if node.parent >= 0 else [],
        )
        parent.children[node.start] = made
        root.nodes.append(made)
    for sequence, leaf in enumerate(tree.leaves):
        last = root.nodes[leaf]
        for node in (*last.ancestors, last):
            node.sequence_ids.append(sequence)
    return root
