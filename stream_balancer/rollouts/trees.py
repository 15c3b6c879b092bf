"""Rollouts of a micro-batch with each shared prefix once: a tree of tokens, and the way back to the dense layout.

::

    dense (packed)   p p p p a a a | p p p p b b | c c c c c    T = 18: two siblings of one prompt, and another rollout
    unique           p p p p a a a   b b   c c c c c            U = 14
    nodes            `--0--' `-1-'   `2'   `---3---'            parents -1, 0, 0, -1

A node's tokens attend to those before them in the node, and to all of its parents'. Nodes are in depth-first order, so
a token is attended to by one run of rows that begins with itself: :attr:`Tree.reach` says where that ends, and every
mask follows from it.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from stream_balancer.errors import RolloutError
from stream_balancer.rollouts.tensors import FlatColumns, count_up

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class Node(NamedTuple):
    """A run of unique tokens."""

    start: int
    stop: int
    """Rows ``start:stop`` of the unique tokens."""
    parent: int
    """The node that comes before it in its rollouts; -1: none."""
    position: int
    """Position of its first token in its rollouts."""


class VarlenKeys(NamedTuple):
    """Arguments of a variable-length kernel beside queries that are the unique tokens; see :meth:`Tree.varlen_keys`."""

    rows: Tensor
    """``[S]`` int64: the unique row of each key. ``k[keys.rows]``, ``v[keys.rows]``."""
    cu_seqlens_q: Tensor
    """``[N+1]`` int32: node ``i``'s queries are unique rows ``cu_seqlens_q[i]:cu_seqlens_q[i+1]``."""
    cu_seqlens_k: Tensor
    """``[N+1]`` int32: its keys are ``rows[cu_seqlens_k[i]:cu_seqlens_k[i+1]]``, its parents' first."""
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass(frozen=True, eq=False)
class Tree:
    """Unique tokens of a micro-batch: what a model computes, where siblings share their prefix.

    ``U`` unique tokens in ``N`` nodes, of ``T`` tokens in the dense layout (:meth:`MicroBatch.packed`), which has the
    columns that a loss reads: masks and advantages differ from sibling to sibling.
    """

    columns: dict[str, Tensor]
    """``[U, ...]`` what the model reads, by name."""
    position_ids: Tensor
    """``[U]`` int64 position in the rollout (or ``[U, ...]`` of the rollouts' own column of that name)."""
    index: Tensor
    """``[T]`` int64: the unique row of every token of the dense layout. ``hidden[tree.index]`` is ``[T, ...]``, and on
    the way back the gradients of a prefix are summed."""
    nodes: tuple[Node, ...]
    """In the order of their rows: depth first, a rollout without siblings here is one node. What fills up to
    ``multiple_of`` is a node of its own at the end, and no rollout's."""
    leaves: tuple[int, ...]
    """The node of each rollout's last token."""

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    @property
    def num_tokens(self) -> int:
        """U: unique tokens, and those that fill up to ``multiple_of``."""
        return self.nodes[-1].stop

    @cached_property
    def reach(self) -> Tensor:
        """``[U]`` int32: row ``u`` is attended to by rows ``u`` to ``reach[u] - 1``, and by no other. O(N + U)."""
        ends = [node.stop for node in self.nodes]
        # children come behind their parent, the last of them last
        for node in self.nodes:
            if node.parent >= 0:
                ends[node.parent] = node.stop
        sizes = torch.tensor([node.stop - node.start for node in self.nodes], device=self.index.device)
        of_node = torch.tensor(ends, dtype=torch.int32, device=self.index.device)
        return torch.repeat_interleave(of_node, sizes, output_size=self.num_tokens)

    def attention_mask(self) -> Tensor:
        """``[U, U]`` bool, True where the row's token attends to the column's: for small batches, and tests. O(U^2)."""
        row = torch.arange(self.num_tokens, device=self.index.device)
        return self.mask_mod(row, row, row[:, None], row)

    @cached_property
    def mask_mod(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Mask as a function, for torch's FlexAttention."""
        reach = self.reach

        def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < reach[key])

        return attends

    def block_mask(self, block_size: int = 128) -> BlockMask:
        """Mask for ``flex_attention(q, k, v, block_mask=...)``, with q, k and v ``[1, heads, U, head_dim]``.

        Equal to ``create_block_mask(tree.mask_mod, None, None, U, U)``, which evaluates all U^2 pairs; here the blocks
        follow from the nodes. O(U + (U / block_size)^2).
        """
        # slow to import, and only trainers with FlexAttention need it
        from torch.nn.attention.flex_attention import BlockMask

        size, device = self.num_tokens, self.index.device
        number = -(-size // block_size)
        reach = self.reach.new_zeros(number * block_size)  # [blocks x block_size]; 0 beyond the tokens: never whole
        reach[:size] = self.reach
        most, least = (bound(reach.view(number, block_size), 1) for bound in (torch.amax, torch.amin))  # [blocks]
        block = torch.arange(number, device=device)
        first = block[:, None] * block_size
        before = block < block[:, None]  # [query block, key block]
        # all of the block's keys are attended to by all of its queries: no mask is evaluated there
        whole = before & (least >= first + block_size)
        partly = ((before & (most > first)) | (block == block[:, None])) & ~whole
        return BlockMask.from_kv_blocks(
            *_ordered(partly), *_ordered(whole), BLOCK_SIZE=block_size, mask_mod=self.mask_mod, seq_lengths=(size, size)
        )

    def varlen_keys(self) -> VarlenKeys:
        """For kernels that know no mask, but queries and keys of different lengths, the last query aligned with the
        last key (FlashAttention's ``flash_attn_varlen_func(..., causal=True)``): queries by node, keys gathered.

        Copies the rows of the keys, ``S <= T + U`` of them, and computes each pair of tokens once. O(N depth + S).
        """
        counts = [node.position + node.stop - node.start for node in self.nodes]
        device = self.index.device
        return VarlenKeys(
            rows=count_up(_ways(self.nodes, range(len(self.nodes))), device),
            cu_seqlens_q=torch.tensor([0, *(node.stop for node in self.nodes)], dtype=torch.int32, device=device),
            cu_seqlens_k=torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device),
            max_seqlen_q=max(node.stop - node.start for node in self.nodes),
            max_seqlen_k=max(counts),
        )

    def __repr__(self) -> str:
        return f"Tree(num_tokens={self.num_tokens}, nodes={len(self.nodes)}, dense_tokens={self.index.shape[0]})"


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[query blocks, key blocks] bool -> how many key blocks each query block has, and these first: ``[1, 1, ...]``."""
    counts = blocks.sum(1, dtype=torch.int32)
    return counts[None, None], blocks.to(torch.int8).argsort(dim=1, descending=True, stable=True).int()[None, None]


def tree(
    flat: FlatColumns, columns: Collection[str], *, check: bool, multiple_of: int, name_of: Callable[[int], str]
) -> Tree:
    """The unique tokens of flat columns, by ``flat.prefixes``. See :meth:`MicroBatch.tree`.

    Examples:
        >>> ids = torch.tensor([7, 8, 1, 7, 8, 2, 3, 9])  # [T]: two siblings of the prompt 7 8, and another rollout
        >>> siblings = [("g", 2), ("g", 2), (None, 0)]
        >>> flat = FlatColumns({"input_ids": ids}, (3, 4, 1), {}, torch.ones(3), [(1, 1)] * 3, prefixes=siblings)
        >>> unique = tree(flat, ["input_ids"], check=True, multiple_of=1, name_of=str)
        >>> unique["input_ids"], unique.position_ids  # [U]
        (tensor([7, 8, 1, 2, 3, 9]), tensor([0, 1, 2, 2, 3, 0]))
        >>> unique.index  # [T]
        tensor([0, 1, 2, 0, 1, 3, 4, 5])
        >>> [node[:3] for node in unique.nodes]  # start, stop, parent
        [(0, 2, -1), (2, 3, 0), (3, 5, 0), (5, 6, -1)]
        >>> unique.attention_mask().int()  # [U, U]
        tensor([[1, 0, 0, 0, 0, 0],
                [1, 1, 0, 0, 0, 0],
                [1, 1, 1, 0, 0, 0],
                [1, 1, 0, 1, 0, 0],
                [1, 1, 0, 1, 1, 0],
                [0, 0, 0, 0, 0, 1]], dtype=torch.int32)
    """
    names = dict.fromkeys([*columns, *({"position_ids"} & flat.tokens.keys())])
    if multiple_of < 1:
        raise ValueError(f"tree(): multiple_of must be >= 1, not {multiple_of}")
    if unknown := names.keys() - flat.tokens.keys():
        raise KeyError(f"tree(): no column {sorted(unknown)}; there are {sorted(flat.tokens)}")
    nodes, dense, leaves = _laid_out(flat.lengths, flat.prefixes or [(None, 0)] * len(flat.lengths))
    device = flat.tokens["input_ids"].device
    found = {name: flat.tokens[name] for name in names}
    index = count_up(_ways(nodes, leaves), device)
    # where nobody shares, the tree's columns are the dense ones: nothing is copied
    if nodes[-1].stop < index.shape[0]:
        rows = count_up(dense, device)  # [U] the dense row of each unique token
        if check and not rows.is_meta:
            _check_same(found, rows[index], flat.lengths, name_of)
        found = {name: column[rows] for name, column in found.items()}
    size = nodes[-1].stop
    if missing := -size % multiple_of:
        # a node without a parent: what fills up attends to itself only, and no rollout to it
        nodes.append(Node(size, size + missing, -1, 0))
        found = {
            name: torch.cat([column, column.new_zeros((missing, *column.shape[1:]))]) for name, column in found.items()
        }
    positions = found.get("position_ids")
    if positions is None:
        # a prefix begins at 0, what follows it at the prefix's length
        positions = count_up([(node.position, node.stop - node.start) for node in nodes], device)
    return Tree({name: found[name] for name in columns}, positions, index, tuple(nodes), tuple(leaves))


def _laid_out(
    lengths: Sequence[int], prefixes: Sequence[tuple[str | None, int]]
) -> tuple[list[Node], list[tuple[int, int]], list[int]]:
    """The nodes; (first dense row, tokens) of each; and the leaf of each rollout. O(n)."""
    families: dict[object, list[int]] = {}  # by group; a rollout that shares nothing is one by itself
    for place, (group, prefix) in enumerate(prefixes):
        families.setdefault(group if prefix else place, []).append(place)
    starts = list(accumulate(lengths, initial=0))
    nodes, dense, leaves = list[Node](), list[tuple[int, int]](), [0] * len(lengths)

    def add(place: int, first: int, stop: int, parent: int) -> int:
        """Tokens ``first:stop`` of a rollout as a node of their own. -> its number."""
        row = nodes[-1].stop if nodes else 0
        nodes.append(Node(row, row + stop - first, parent, first))
        dense.append((starts[place] + first, stop - first))
        return len(nodes) - 1

    # whole families one after the other: nodes must be in depth-first order
    for family in families.values():
        shared, root = 0, -1
        if len(family) > 1:
            # siblings may declare more or less of the same prompt; what all declare is there once
            shared = min(prefixes[place][1] for place in family)
            root = add(family[0], 0, shared, -1)
        for place in family:
            leaves[place] = add(place, shared, lengths[place], root)
    return nodes, dense, leaves


def _ways(nodes: Sequence[Node], numbers: Iterable[int]) -> list[tuple[int, int]]:
    """(first unique row, tokens) of each of these nodes, its parent before it."""
    ways = [nodes[one] for number in numbers for one in (nodes[number].parent, number) if one >= 0]
    return [(node.start, node.stop - node.start) for node in ways]


def _check_same(
    columns: dict[str, Tensor], first: Tensor, lengths: Sequence[int], name_of: Callable[[int], str]
) -> None:
    """Raise RolloutError unless every token [T] is that of the dense row ``first`` [T]. One wait for the device for
    each column."""
    for name, column in columns.items():
        differs = (column != column[first]).reshape(len(column), -1).any(1)
        if differs.any():
            row = int(differs.nonzero()[0])
            starts = list(accumulate(lengths, initial=0))
            mine, other = (bisect(starts, at) - 1 for at in (row, int(first[row])))
            raise RolloutError(
                f"{name_of(mine)} and its sibling {name_of(other)} say that they share a prefix, but differ in "
                f"{name!r} at token {row - starts[mine]}. Declare no more leading tokens than are the same "
                "(Rollout.prefix)"
            )
