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
| ``rollout_id``, ``group_id``, ``version``, ``cost`` | these |
| ``rollout_weights`` | 0.0 where ``is_padding`` |
| any other non-tensor | ``metadata``, under its name |
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import stream_balancer as sb
from stream_balancer.integrations import _rows

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["rollouts_from", "tensordict_from"]

_WEIGHTS = "rollout_weights"


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
    entries = _entries(td)
    mask = entries.pop("attention_mask", None)
    ids = entries.get("input_ids")
    if ids is None:
        raise ValueError(f"no 'input_ids' in the TensorDict; it has {sorted(td.keys())}")
    if ids.is_nested:
        where, width = [slice(0, len(row)) for row in ids.unbind()], None
    elif mask is None:
        raise ValueError(
            f"input_ids is padded, {list(ids.shape)}, and there is no 'attention_mask' that says what is padding. "
            "Add one, or give jagged columns"
        )
    else:
        where, width = _rows.spans(mask), ids.shape[1]
    # what tensordict_from wrote of padding copies, not a column
    if (weights := entries.pop(_WEIGHTS, None)) is not None:
        entries["is_padding"] = (weights == 0).tolist()
    # a TensorDict that was saved and loaded has lists for tuples
    if (versions := entries.get("version")) is not None:
        entries["version"] = [tuple(version) if isinstance(version, list) else version for version in versions]
    return _rows.rollouts_of(entries, where, width, scalars=scalars, tensors=tensors)


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
    rollouts = list(rollouts)
    entries: dict[str, Any] = {**_rows.entries_of(rollouts, padding_side, pad_values=pad_values, dtypes=dtypes)}
    if any(rollout.is_padding for rollout in rollouts):
        entries[_WEIGHTS] = torch.tensor([0.0 if rollout.is_padding else 1.0 for rollout in rollouts])
    return TensorDict({**entries, **_non_tensors(rollouts, entries.keys())}, batch_size=[len(rollouts)])


# --- what is not a tensor ---------------------------------------------------------------------------------------------


def _entries(td: TensorDict) -> dict[str, Any]:
    """Tensors, and lists of what is none."""
    from tensordict import is_non_tensor

    entries: dict[str, Any] = {}
    for name, entry in td.items():
        if not isinstance(entry, Tensor) and not is_non_tensor(entry):
            raise ValueError(f"{name!r} is a TensorDict of its own. Call td.flatten_keys('.') first")
        entries[name] = entry if isinstance(entry, Tensor) else entry.tolist()
    return entries


def _non_tensors(rollouts: Sequence[sb.Rollout], taken: Collection[str]) -> dict[str, Any]:
    """Fields, and metadata: keys that all rollouts have become entries of their own, the rest stays together."""
    from tensordict import NonTensorStack

    found = {name: [getattr(rollout, name) for rollout in rollouts] for name in _rows.FIELDS}
    # in a TensorDict these are weights
    del found["is_padding"]
    kept = {name: values for name, values in found.items() if any(value is not None for value in values)}
    # a key that some rollouts lack cannot be a stack of its own
    common = set.intersection(*(set(r.metadata) for r in rollouts)) - {*taken, *_rows.FIELDS, "metadata", _WEIGHTS}
    kept |= {name: [rollout.metadata[name] for rollout in rollouts] for name in sorted(common)}
    rest = [{key: value for key, value in r.metadata.items() if key not in common} for r in rollouts]
    if any(rest):
        kept["metadata"] = rest
    return {name: NonTensorStack(*values) for name, values in kept.items()}
