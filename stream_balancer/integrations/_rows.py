"""Rows of a trainer's batch to rollouts and back: what the adapters share.

::

    where = spans(batch["attention_mask"])                                  # of each row's tokens
    rollouts = rollouts_of(batch, where, width, version=3)                  # in: entries of n rows, by their shape
    batch = entries_of(rollouts, "right")                                   # out: tensors of n rows

Torch functions that know no trainer and no name of a column. What comes out of a batch is copied: a rollout that waits
in the window must not keep the whole batch's memory.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import stream_balancer as sb

Side = Literal["left", "right"]
Version: TypeAlias = int | tuple[int, int]
"""A rollout's policy version, or the oldest and the newest."""
FIELDS = ("rollout_id", "group_id", "version", "cost", "is_padding")
"""Names of entries that are fields of a rollout."""


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


def rollouts_of(
    entries: Mapping[str, Any],
    where: Sequence[slice],
    width: int | None,
    *,
    scalars: Collection[str] | None = None,
    tensors: Collection[str] = (),
    group_size: int | None = None,
    version: Version | None = None,
) -> list[sb.Rollout]:
    """Rollouts of a batch's entries: tensors ``[n, ...]``, and lists of ``n`` values.

    Columns are tensors ``[n, width, ...]``, of which ``where`` are the tokens, and jagged ones that are as long as
    these; numbers are those in ``scalars`` (None: float32 ``[n]``). Other tensors, and those in ``tensors``, are a
    tensor a row; lists are metadata, or the field of a rollout of that name. ``group_size``: so many neighbours are
    siblings. Rollouts without an id are called ``name/0``, ``name/1``, ... by a fresh name.
    """
    # the balancer refuses an id twice, and two batches may come from two processes
    name = uuid.uuid4().hex
    rows: list[dict[str, Any]] = [
        {"tokens": {}, "scalars": {}, "tensors": {}, "metadata": {}, "rollout_id": f"{name}/{at}", "version": version}
        | ({} if group_size is None else {"group_id": f"{name}/{at // group_size}"})
        for at in range(len(where))
    ]
    lengths = [span.stop - span.start for span in where]
    for key, entry in entries.items():
        if not isinstance(entry, Tensor):
            values, field = entry, "tensors" if entry and isinstance(entry[0], Tensor) else "metadata"
        elif entry.is_nested:
            values = entry.unbind()
            field = "tokens" if key not in tensors and [len(row) for row in values] == lengths else "tensors"
        elif entry.ndim >= 2 and entry.shape[1] == width and key not in tensors:
            values, field = [row[span] for row, span in zip(entry, where, strict=True)], "tokens"
        elif key in scalars if scalars is not None else entry.ndim == 1 and entry.dtype is torch.float32:
            values, field = entry.tolist(), "scalars"
        else:
            values, field = entry, "tensors"
        for row, value in zip(rows, values, strict=True):
            if field == "metadata" and key in FIELDS:
                row[key] = value
            elif field == key == "metadata":
                row[key].update(value)
            else:
                # a view would keep the whole batch's memory while its rollout waits
                row[field][key] = value.clone() if isinstance(value, Tensor) else value
    return [sb.Rollout(**row) for row in rows]


# --- out --------------------------------------------------------------------------------------------------------------


class Together(NamedTuple):
    """Rollouts' fields side by side: name -> a value of each rollout, in their order."""

    tokens: dict[str, list[Tensor]]
    scalars: dict[str, list[Any]]
    tensors: dict[str, list[Any]]


def together(rollouts: Sequence[sb.Rollout]) -> Together:
    """Raises ValueError if there are no rollouts, or if not all have the same columns, scalars and tensors, columns of
    one dtype and trailing shape, tensors of one dtype."""
    if not rollouts:
        raise ValueError("there is no rollout to make rows of")
    first, *others = rollouts
    kinds = _kinds(first)
    for rollout in others:
        for field, theirs in _kinds(rollout).items():
            if theirs != kinds[field]:
                raise ValueError(
                    f"rollouts {first.rollout_id!r} and {rollout.rollout_id!r} differ in their {field}: "
                    f"{kinds[field]} and {theirs}. Give all of them the same, of the same dtype and trailing shape"
                )
    mappings = [[getattr(rollout, field) for rollout in rollouts] for field in Together._fields]
    return Together(*({name: [one[name] for one in each] for name in each[0]} for each in mappings))


def _kinds(rollout: sb.Rollout) -> dict[str, list[str]]:
    return {
        "tokens": sorted(f"{name} {column.dtype} {[*column.shape[1:]]}" for name, column in rollout.tokens.items()),
        "scalars": sorted(rollout.scalars),
        "tensors": sorted(f"{name} {tensor.dtype}" for name, tensor in rollout.tensors.items()),
    }


def entries_of(
    rollouts: Sequence[sb.Rollout],
    side: Side | None,
    *,
    pad_values: Mapping[str, float | int | bool] | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> dict[str, Tensor]:
    """Tensors ``[n, ...]`` of all that the rollouts hold.

    Columns are jagged, or padded with ``pad_values`` (0 where they say nothing) up to the longest, beside a bool
    ``attention_mask``. ``dtypes`` of scalars; otherwise bool, int64 or float64. Tensors of different shapes are jagged.
    Raises ValueError as :func:`together` does. O(all tokens).
    """
    taken, lengths = together(rollouts), [rollout.num_tokens for rollout in rollouts]
    entries: dict[str, Tensor] = {}
    offsets = torch.tensor([*accumulate(lengths, initial=0)])  # one for all: torch adds columns only if shared
    for name, columns in taken.tokens.items():
        if side is None:
            entries[name] = torch.nested.nested_tensor_from_jagged(torch.cat(columns), offsets)
        else:
            entries[name] = padded(columns, side, (pad_values or {}).get(name, 0))
    if side is not None:
        tokens = [torch.ones(length, dtype=torch.bool) for length in lengths]
        entries["attention_mask"] = padded(tokens, side)
    for name, numbers in taken.scalars.items():
        entries[name] = torch.tensor(numbers, dtype=(dtypes or {}).get(name, _dtype_of(numbers)))
    for name, tensors in taken.tensors.items():
        if len({tensor.shape for tensor in tensors}) == 1 or len({tensor.shape[1:] for tensor in tensors}) > 1:
            entries[name] = stacked(tensors)  # which says what is wrong
        else:
            entries[name] = torch.nested.as_nested_tensor(tensors, layout=torch.jagged)
    return entries


def _dtype_of(numbers: Sequence[float | int | bool]) -> torch.dtype:
    kinds = {type(number) for number in numbers}
    return torch.bool if kinds == {bool} else torch.float64 if float in kinds else torch.int64


def padded(columns: Sequence[Tensor], side: Side, value: float | bool = 0) -> Tensor:
    """Columns ``[L, ...]`` -> ``[n, longest, ...]``, filled with ``value``."""
    return pad_sequence([*columns], batch_first=True, padding_value=value, padding_side=side)


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """[n, ...] of tensors of one dtype. Raises ValueError for different shapes."""
    if len(shapes := {tuple(tensor.shape) for tensor in tensors}) > 1:
        raise ValueError(f"rollouts differ in the shape of a tensor: {sorted(shapes)}. Give all of them the same")
    return torch.stack(list(tensors))


# --- what a rank was given --------------------------------------------------------------------------------------------


def with_prompt(rollouts: Iterable[sb.Rollout]) -> list[sb.Rollout]:
    """The rollouts; a padding copy of one token has two, a prompt and a response. A trainer that scores each token of
    the response by the one before it has nothing to score otherwise, and some fail then."""
    return [
        replace(rollout, tokens={name: torch.cat([column, column]) for name, column in rollout.tokens.items()})
        if rollout.is_padding and rollout.num_tokens == 1
        else rollout
        for rollout in rollouts
    ]


def within(rollout: sb.Rollout, noted: int) -> int:
    """Tokens of its prompt, or of its response, that metadata says: of a padding copy's two tokens, one."""
    return min(noted, rollout.num_tokens - 1) if rollout.is_padding else noted
