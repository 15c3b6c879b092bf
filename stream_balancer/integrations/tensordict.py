"""TensorDicts of rollouts in and out: jagged, or padded on either side. Every field and dtype comes back as it was.

::

    for rollout in rollouts_from(td, scalars=["advantage"]):       # td: batch size [n], jagged or with attention_mask
        await balancer.put(rollout)
    ...
    td = tensordict_from(rank_batch.rollouts)                      # on a rank; jagged
    td = tensordict_from(mb.rollouts, padding_side="left", pad_values={"input_ids": tokenizer.pad_token_id})

``MicroBatch.tensordict()`` is the fast way out where columns and scalars are all that is wanted: it copies no token.

| in the TensorDict | in a Rollout |
|---|---|
| jagged, as long as ``input_ids``; or ``[n, S, ...]`` with an attention mask ``[n, S]`` | ``tokens`` |
| named in ``scalars=`` | ``scalars`` |
| any other tensor | ``tensors``, without the batch dimension |
| ``rollout_id``, ``group_id``, ``version``, ``cost``, ``prefix`` | these |
| ``rollout_weights`` | 0.0 where ``is_padding`` |
| any other non-tensor | ``metadata``, under its name |
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import stream_balancer as sb
from stream_balancer.integrations import _rows

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["rollouts_from", "tensordict_from"]

_FIELDS = ("rollout_id", "group_id", "version", "cost", "prefix")
_WEIGHTS = "rollout_weights"
_MASK = "attention_mask"


def rollouts_from(
    td: TensorDict,
    *,
    scalars: Collection[str] = (),
    tensors: Collection[str] = (),
) -> list[sb.Rollout]:
    """Rollouts, one per row of ``td``, whose batch size is ``[n]`` and which holds ``input_ids``.

    ``scalars``: entries ``[n]`` that become numbers (what ``accept=`` and the layouts see). ``tensors``: entries that
    look per-token and are not. The ``attention_mask`` of padded columns is not kept.

    Raises ValueError for a batch size that is not ``[n]``, a TensorDict inside ``td``, columns that are padded but have
    no mask, or a mask with holes; RolloutError for what a Rollout refuses. O(all tokens): every one is copied.
    """
    if len(td.batch_size) != 1:
        raise ValueError(
            f"one row per rollout: the batch size must be [n], not {list(td.batch_size)}. Call td.reshape(-1)"
        )
    fields, plain = _split_off_non_tensors(td)
    mask = plain.pop(_MASK, None)
    ids = plain.get("input_ids")
    if ids is None:
        raise ValueError(f"no 'input_ids' in the TensorDict; it has {sorted(td.keys())}")
    if not ids.is_nested and mask is None:
        raise ValueError(f"input_ids is padded, {list(ids.shape)}, and there is no {_MASK!r} that says what is padding")
    where = None if ids.is_nested or mask is None else _rows.spans(mask)
    lengths = _lengths(ids) if where is None else [span.stop - span.start for span in where]
    rows = _rows.Rows(where or [slice(None)] * len(lengths), None if where is None else ids.shape[1])
    for row, of_row in zip(rows.fields, fields, strict=True):
        # a row's ids and metadata go over the empty fields of a rollout in the making
        row |= of_row
    # what tensordict_from wrote of padding copies, not a column
    weights = plain.pop(_WEIGHTS, None)
    for name, entry in plain.items():
        per_token = name not in tensors and _is_per_token(entry, lengths, rows.width)
        if name in scalars:
            rows.add("scalars", name, entry.tolist())
        elif per_token and where is not None:
            rows.tensor(name, entry)
        else:
            rows.add("tokens" if per_token else "tensors", name, (row.clone() for row in entry.unbind()))
    copies = [False] * len(lengths) if weights is None else (weights == 0).tolist()
    return [sb.Rollout(**row, is_padding=copy) for row, copy in zip(rows.fields, copies, strict=True)]


def tensordict_from(
    rollouts: Sequence[sb.Rollout],
    *,
    padding_side: _rows.Side | None = None,
    pad_values: Mapping[str, float | int | bool] | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> TensorDict:
    """A TensorDict with batch size ``[n]`` of all that the rollouts hold: ``rank_batch.rollouts``, ``mb.rollouts``.

    ``padding_side``: None for jagged columns, else ``"left"`` or ``"right"``, filled with ``pad_values`` (0 where they
    say nothing) up to the longest, beside a bool ``attention_mask``. ``dtypes`` of scalars; otherwise bool,
    int64 or float64. ``tensors`` of different shapes become jagged; give their names to
    ``rollouts_from(tensors=...)``.

    Raises ValueError for no rollouts, or rollouts that differ in their columns' names or dtypes; ImportError, saying
    which extra to install, where tensordict is missing. O(all tokens).
    """
    try:
        from tensordict import TensorDict
    except ImportError as error:
        raise ImportError("this needs the tensordict package: pip install 'stream-balancer[tensordict]'") from error
    taken = _rows.together(_rows.unshared(rollouts))
    entries: dict[str, Any] = {}
    if padding_side is None:
        offsets = _offsets(taken.lengths)  # one for all: torch adds columns only if shared
        entries |= {name: _jagged(columns, offsets) for name, columns in taken.tokens.items()}
    else:
        width, fill = max(taken.lengths), pad_values or {}
        for name, columns in taken.tokens.items():
            entries[name] = _rows.padded(columns, width, padding_side, fill.get(name, 0))
        entries[_MASK] = _rows.mask_of(taken.lengths, width, padding_side)
    for name, numbers in taken.scalars.items():
        entries[name] = torch.tensor(numbers, dtype=(dtypes or {}).get(name, _dtype_of(numbers)))
    entries |= {name: _together(same_name) for name, same_name in taken.tensors.items()}
    if any(rollout.is_padding for rollout in rollouts):
        entries[_WEIGHTS] = torch.tensor([0.0 if r.is_padding else 1.0 for r in rollouts])
    return TensorDict({**entries, **_non_tensors(rollouts, entries.keys())}, batch_size=[len(rollouts)])


# --- what is not a tensor ---------------------------------------------------------------------------------------------


def _split_off_non_tensors(td: TensorDict) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Fields and metadata of every row, and the tensors by name."""
    from tensordict import is_non_tensor

    own: list[dict[str, Any]] = [{} for _ in range(td.batch_size[0])]
    plain: dict[str, Tensor] = {}
    for name, entry in td.items():
        if isinstance(entry, Tensor):
            plain[name] = entry
            continue
        if not is_non_tensor(entry):
            raise ValueError(f"{name!r} is a TensorDict of its own. Call td.flatten_keys('.') first")
        for row, value in zip(own, entry.tolist(), strict=True):
            _note(row, name, value)
    return own, plain


def _note(row: dict[str, Any], name: str, value: Any) -> None:
    if name == "metadata":
        row["metadata"] = {**row.get("metadata", {}), **value}
    elif name not in _FIELDS:
        row.setdefault("metadata", {})[name] = value
    elif name == "version" and isinstance(value, list):
        row[name] = tuple(value)  # a TensorDict that was saved and loaded has lists for tuples
    else:
        row[name] = value


def _non_tensors(rollouts: Sequence[sb.Rollout], taken: Collection[str]) -> dict[str, Any]:
    """Fields, and metadata: keys that all rollouts have become entries of their own, the rest stays together."""
    from tensordict import NonTensorStack

    found = {name: [getattr(rollout, name) for rollout in rollouts] for name in _FIELDS}
    kept = {name: values for name, values in found.items() if any(value is not None for value in values)}
    if not any(kept["prefix"]):
        del kept["prefix"]
    # a key that some rollouts lack cannot be a stack of its own
    common = set.intersection(*(set(r.metadata) for r in rollouts)) - {*taken, *_FIELDS, "metadata", _WEIGHTS}
    kept |= {name: [rollout.metadata[name] for rollout in rollouts] for name in sorted(common)}
    rest = [{key: value for key, value in r.metadata.items() if key not in common} for r in rollouts]
    if any(rest):
        kept["metadata"] = rest
    return {name: NonTensorStack(*values) for name, values in kept.items()}


# --- tensors ----------------------------------------------------------------------------------------------------------


def _is_per_token(entry: Tensor, lengths: list[int], width: int | None) -> bool:
    if entry.is_nested:
        return _lengths(entry) == lengths
    return width is not None and entry.ndim >= 2 and entry.shape[1] == width


def _lengths(nested: Tensor) -> list[int]:
    return [row.shape[0] for row in nested.unbind()]


def _dtype_of(numbers: Sequence[float | int | bool]) -> torch.dtype:
    kinds = {type(number) for number in numbers}
    return torch.bool if kinds == {bool} else torch.float64 if float in kinds else torch.int64


def _together(tensors: Sequence[Tensor]) -> Tensor:
    if len({tensor.shape for tensor in tensors}) == 1 or any(tensor.ndim == 0 for tensor in tensors):
        return _rows.stacked(tensors)  # which says what is wrong
    return _jagged(tensors, _offsets([tensor.shape[0] for tensor in tensors]))


def _offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor(list(accumulate(lengths, initial=0)))


def _jagged(columns: Sequence[Tensor], offsets: Tensor) -> Tensor:
    first = columns[0]
    for column in columns:
        if column.dtype != first.dtype or column.shape[1:] != first.shape[1:]:
            _rows.stacked([first, column])
    return torch.nested.nested_tensor_from_jagged(torch.cat(list(columns)), offsets)
