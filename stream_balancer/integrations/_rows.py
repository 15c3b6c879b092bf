"""Padded rows to per-rollout columns and back: what several adapters do with their trainer's ``[n, S, ...]`` tensors.

Torch functions that know no trainer and no name of a column. What comes out of a batch is copied: a rollout that waits
in the window must not keep the whole batch's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from stream_balancer.types import Rollout, SharedRollout

__all__ = [
    "Side",
    "cut",
    "lengths_mask",
    "mask_of",
    "numbers",
    "padded",
    "same_columns",
    "spans",
    "stacked",
    "unshared",
    "with_prompt",
    "within",
]

Side = Literal["left", "right"]


def spans(mask: Tensor) -> list[slice]:
    """[n, S] non-zero where there is a token -> where each row's tokens are. Raises ValueError for a row without tokens
    or with a hole in it. O(n S)."""
    is_token = mask != 0
    if is_token.ndim != 2:
        raise ValueError(f"an attention mask is [n, S], not {list(mask.shape)}")
    counts = is_token.sum(1).tolist()
    # uint8, since argmax is not defined for bool; it finds the first of equal values
    starts = is_token.to(torch.uint8).argmax(1).tolist() if is_token.shape[1] else [0] * len(counts)
    found = [slice(start, start + count) for start, count in zip(starts, counts, strict=True)]
    for row, span in enumerate(found):
        if span.start == span.stop:
            raise ValueError(f"row {row} has no tokens: its attention mask is zero. Leave it out")
        if not is_token[row, span].all():
            raise ValueError(f"row {row} has a hole in its attention mask; its tokens must be consecutive")
    return found


def cut(rows: Tensor, where: Iterable[slice]) -> list[Tensor]:
    """[n, S, ...] -> each row's tokens ``[L, ...]``, copied."""
    return [row[span].clone() for row, span in zip(rows, where, strict=True)]


def padded(columns: Sequence[Tensor], width: int, side: Side, value: float | bool = 0) -> Tensor:
    """Columns ``[L, ...]`` -> ``[n, width, ...]``, filled with ``value``. Raises ValueError where ``width`` is too
    small or the columns differ in dtype or trailing shape."""
    first = columns[0]
    rows = first.new_full((len(columns), width, *first.shape[1:]), value)
    for row, column in zip(rows, columns, strict=True):
        if column.shape[0] > width:
            raise ValueError(f"a rollout of {column.shape[0]} tokens does not fit into a width of {width}")
        if column.dtype != first.dtype or column.shape[1:] != first.shape[1:]:
            raise ValueError(_differ(first, column))
        start = 0 if side == "right" else width - column.shape[0]
        row[start : start + column.shape[0]] = column
    return rows


def mask_of(lengths: Sequence[int], width: int, side: Side) -> Tensor:
    """[n, width] bool: True where there is a token."""
    mask = lengths_mask(torch.tensor(lengths), width)
    return mask if side == "right" else mask.flip(1)


def lengths_mask(lengths: Tensor, width: int) -> Tensor:
    """[n] lengths -> [n, width] bool, right-padded."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """[n, ...] of tensors of one shape and dtype."""
    first = tensors[0]
    for tensor in tensors:
        if tensor.dtype != first.dtype or tensor.shape != first.shape:
            raise ValueError(_differ(first, tensor))
    return torch.stack(list(tensors))


def numbers(values: Sequence[float | int], dtype: torch.dtype | None = None) -> Tensor:
    """[n] of scalars: float64, int64 if all are ints, bool if all are bools, or the given dtype."""
    if dtype is None:
        kinds = {type(value) for value in values}
        dtype = torch.bool if kinds == {bool} else torch.int64 if float not in kinds else torch.float64
    return torch.tensor(values, dtype=dtype)


def same_columns(rollouts: Sequence[Rollout]) -> Rollout:
    """The first of them. Raises ValueError if there is none, or if not all have the same columns, scalars and
    tensors."""
    if not rollouts:
        raise ValueError("there is no rollout to make rows of")
    first = rollouts[0]
    for rollout in rollouts:
        for what in ("tokens", "scalars", "tensors"):
            ours: dict[str, Any] = getattr(first, what)
            theirs: dict[str, Any] = getattr(rollout, what)
            if ours.keys() != theirs.keys():
                raise ValueError(
                    f"rollouts {first.rollout_id!r} and {rollout.rollout_id!r} differ in their {what}: {sorted(ours)} "
                    f"and {sorted(theirs)}"
                )
    return first


def unshared(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """The rollouts. Raises ValueError for a part of one that several ranks share: no trainer here takes chunks."""
    found = list(rollouts)
    for rollout in found:
        if isinstance(rollout, SharedRollout):
            raise ValueError(
                f"rollout {rollout.rollout_id!r} is shared by {rollout.cp_degree} ranks, and this one holds chunks of "
                "it, which are no row of a trainer's batch. Leave cp_sizes out of BalancerConfig, or read "
                "micro_batch.packed() yourself"
            )
    return found


def with_prompt(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """The rollouts; a padding copy of one token has two, a prompt and a response. A trainer that scores each token of
    the response by the one before it has nothing to score otherwise, and some fail then."""
    return [
        replace(rollout, tokens={name: torch.cat([column, column]) for name, column in rollout.tokens.items()})
        if rollout.is_padding and rollout.num_tokens == 1
        else rollout
        for rollout in unshared(rollouts)
    ]


def within(rollout: Rollout, noted: int) -> int:
    """Tokens of its prompt, or of its response, that metadata says: of a padding copy's two tokens, one."""
    return min(noted, rollout.num_tokens - 1) if rollout.is_padding else noted


def _differ(one: Tensor, other: Tensor) -> str:
    return (
        f"rollouts differ in a column: {one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}. Give all "
        "of them the same dtype and trailing shape"
    )
