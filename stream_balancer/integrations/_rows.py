"""Rows of a trainer's batch to rollouts and back: what the adapters share.

::

    rows = Rows(spans(batch["attention_mask"]), width)          # in: a rollout in the making for each row
    for name, entry in batch.items():
        rows.tensor(name, entry)                                # columns, scalars and other tensors by their shape
    rollouts = rows.rollouts(version=3)

    taken = together(rollouts)                                  # out: every field's values side by side, by name
    {name: padded(columns, width, "right") for name, columns in taken.tokens.items()}

Torch functions that know no trainer and no name of a column. What comes out of a batch is copied: a rollout that waits
in the window must not keep the whole batch's memory.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

import stream_balancer as sb

Side = Literal["left", "right"]
Version: TypeAlias = int | tuple[int, int]
"""A rollout's policy version, or the oldest and the newest."""


# --- in ---------------------------------------------------------------------------------------------------------------


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


class Rows:
    """Rollouts in the making: the arguments of each row's ``sb.Rollout``."""

    def __init__(self, where: Sequence[slice], width: int | None = None) -> None:
        """``where``: of each row's tokens, in ``[n, width, ...]``."""
        self.where, self.width = where, width
        self.fields: list[dict[str, Any]] = [
            {"tokens": {}, "scalars": {}, "tensors": {}, "metadata": {}} for _ in where
        ]

    def add(self, field: str, name: str, values: Iterable[Any]) -> None:
        """Values, one a row, as ``name`` in a field of the rollouts."""
        for row, value in zip(self.fields, values, strict=True):
            row[field][name] = value

    def tensor(self, name: str, entry: Tensor) -> None:
        """An entry ``[n, ...]`` of the batch: columns where it is as wide as the batch, scalars where it is float32
        ``[n]``, else a tensor a row."""
        # copies: a view would keep the whole batch's memory while its rollout waits
        if entry.ndim >= 2 and entry.shape[1] == self.width:
            self.add("tokens", name, (row[span].clone() for row, span in zip(entry, self.where, strict=True)))
        elif entry.ndim == 1 and entry.dtype is torch.float32:
            self.add("scalars", name, entry.tolist())
        else:
            self.add("tensors", name, (row.clone() for row in entry))

    def rollouts(self, *, group_size: int | None = None, version: Version | None = None) -> list[sb.Rollout]:
        """The rollouts, called ``name/0``, ``name/1``, ... by a fresh name. ``group_size``: so many neighbours are
        siblings."""
        # the balancer refuses an id twice, and two batches may come from two processes
        name = uuid.uuid4().hex
        return [
            sb.Rollout(
                **fields,
                rollout_id=f"{name}/{at}",
                group_id=None if group_size is None else f"{name}/{at // group_size}",
                version=version,
            )
            for at, fields in enumerate(self.fields)
        ]


# --- out --------------------------------------------------------------------------------------------------------------


class Together(NamedTuple):
    """Rollouts' fields side by side: name -> a value of each rollout, in their order."""

    tokens: dict[str, list[Tensor]]
    scalars: dict[str, list[Any]]
    tensors: dict[str, list[Any]]
    lengths: list[int]


def together(rollouts: Sequence[sb.Rollout]) -> Together:
    """Raises ValueError if there are no rollouts, or if not all have the same columns, scalars and tensors."""
    if not rollouts:
        raise ValueError("there is no rollout to make rows of")
    first = rollouts[0]
    for rollout in rollouts:
        for field in ("tokens", "scalars", "tensors"):
            ours, theirs = sorted(getattr(first, field)), sorted(getattr(rollout, field))
            if ours != theirs:
                raise ValueError(
                    f"rollouts {first.rollout_id!r} and {rollout.rollout_id!r} differ in their {field}: {ours} "
                    f"and {theirs}"
                )
    return Together(
        tokens={name: [rollout.tokens[name] for rollout in rollouts] for name in first.tokens},
        scalars={name: [rollout.scalars[name] for rollout in rollouts] for name in first.scalars},
        tensors={name: [rollout.tensors[name] for rollout in rollouts] for name in first.tensors},
        lengths=[rollout.num_tokens for rollout in rollouts],
    )


def padded(columns: Sequence[Tensor], width: int, side: Side, value: float | bool = 0) -> Tensor:
    """Columns ``[L, ...]`` of at most ``width`` -> ``[n, width, ...]``, filled with ``value``. Raises ValueError where
    the columns differ in dtype or trailing shape."""
    first = columns[0]
    rows = first.new_full((len(columns), width, *first.shape[1:]), value)
    for row, column in zip(rows, columns, strict=True):
        if column.dtype != first.dtype or column.shape[1:] != first.shape[1:]:
            raise ValueError(_differ(first, column))
        start = 0 if side == "right" else width - column.shape[0]
        row[start : start + column.shape[0]] = column
    return rows


def mask_of(lengths: Sequence[int], width: int, side: Side) -> Tensor:
    """[n, width] bool: True where there is a token."""
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    return mask if side == "right" else mask.flip(1)


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """[n, ...] of tensors of one shape and dtype."""
    first = tensors[0]
    for tensor in tensors:
        if tensor.dtype != first.dtype or tensor.shape != first.shape:
            raise ValueError(_differ(first, tensor))
    return torch.stack(list(tensors))


def float32(scalars: dict[str, list[Any]]) -> dict[str, Tensor]:
    """[n] of each, as trainers keep them."""
    return {name: torch.tensor(values, dtype=torch.float32) for name, values in scalars.items()}


def _differ(one: Tensor, other: Tensor) -> str:
    return (
        f"rollouts differ in a column: {one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}. Give all "
        "of them the same dtype and trailing shape"
    )


# --- what a rank was given --------------------------------------------------------------------------------------------


def unshared(rollouts: Iterable[sb.Rollout]) -> list[sb.Rollout]:
    """The rollouts. Raises ValueError for a part of one that several ranks share: no trainer here takes chunks."""
    found = list(rollouts)
    for rollout in found:
        if (ranks := getattr(rollout, "cp_degree", 1)) > 1:
            raise ValueError(
                f"rollout {rollout.rollout_id!r} is shared by {ranks} ranks, and this one holds chunks of it, which "
                "are no row of a trainer's batch. Leave context_parallel out of BalancerConfig, or read "
                "micro_batch.packed() yourself"
            )
    return found


def with_prompt(rollouts: Iterable[sb.Rollout]) -> list[sb.Rollout]:
    """The rollouts; a padding copy of one token has two, a prompt and a response. A trainer that scores each token of
    the response by the one before it has nothing to score otherwise, and some fail then."""
    return [
        replace(rollout, tokens={name: torch.cat([column, column]) for name, column in rollout.tokens.items()})
        if rollout.is_padding and rollout.num_tokens == 1
        else rollout
        for rollout in unshared(rollouts)
    ]


def within(rollout: sb.Rollout, noted: int) -> int:
    """Tokens of its prompt, or of its response, that metadata says: of a padding copy's two tokens, one."""
    return min(noted, rollout.num_tokens - 1) if rollout.is_padding else noted
