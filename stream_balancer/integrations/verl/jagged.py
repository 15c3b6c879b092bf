"""verl's no-padding TensorDict: jagged ``input_ids [B, j]``, and prompts and responses jagged on their own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stream_balancer.integrations import _rows
from stream_balancer.integrations.verl.columns import Column, Kind, column_of_row, span
from stream_balancer.integrations.verl.plain import objects
from stream_balancer.integrations.verl.rows import Form, Row, encode_meta_info, make_rollouts, read_share, stored_name
from stream_balancer.types import MicroBatch, RankBatch, Rollout

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["rollouts_from_tensordict", "tensordict_from_share"]


def rollouts_from_tensordict(data: TensorDict, *, whole: Collection[str] = ()) -> list[Rollout]:
    """One rollout per row of a jagged TensorDict. Nothing is lost: :func:`tensordict_from_share` gives the same again.

    Jagged tensors as long as ``input_ids``, ``prompts`` or ``responses`` become token columns of the whole rollout
    ``[L]``, zero on the part that they do not have; ``response_mask`` becomes ``loss_mask`` unless there is one of that
    name too. Any other tensor, and those named in `whole`, are kept row by row as they are. Non-tensor stacks and data
    are what ``non_tensor_batch`` and ``meta_info`` are in a DataProto.

    Raises ValueError without jagged ``input_ids``, or if prompts and responses do not add up to it; RolloutError for a
    row without a token, and for a non-tensor that cannot travel. O(all tokens): every one is copied once.
    """
    tensors, non_tensor, meta_info = _sorted_out(data)
    ids = tensors.get("input_ids")
    if ids is None or not ids.is_nested:
        raise ValueError(f"the TensorDict needs jagged 'input_ids' to become rollouts; it has {sorted(data.keys())}")
    lengths = _lengths(ids)
    parts = {name: _lengths(tensors[name]) for name in ("prompts", "responses") if _is_jagged(tensors.get(name))}
    prompts = parts.get("prompts") or [
        length - response for length, response in zip(lengths, parts.get("responses", [0] * len(lengths)), strict=True)
    ]
    responses = [length - prompt for length, prompt in zip(lengths, prompts, strict=True)]
    if parts.get("responses", responses) != responses or min(responses, default=0) < 0:
        raise ValueError("prompts and responses together are not as long as input_ids in every row")
    rows = [Row(-prompt) for prompt in prompts]
    by_kind: dict[Kind, list[int]] = {"sequence": lengths, "response": responses, "prompt": prompts}
    columns = {
        name: _into(rows, name, tensor, {} if name in whole else by_kind, tensors) for name, tensor in tensors.items()
    }
    form = Form(
        columns=columns,
        non_tensor=dict.fromkeys(non_tensor, ("|O", 1)),
        meta_info=encode_meta_info(meta_info),
    )
    return make_rollouts(rows, form, {name: objects(items) for name, items in non_tensor.items()})


def _sorted_out(data: TensorDict) -> tuple[dict[str, Tensor], dict[str, list[Any]], dict[str, Any]]:
    """-> tensors, lists of one object per row, objects of the whole batch."""
    from tensordict import NonTensorData, NonTensorStack

    tensors: dict[str, Tensor] = {}
    non_tensor: dict[str, list[Any]] = {}
    meta_info: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, Tensor):
            tensors[name] = value
        elif isinstance(value, NonTensorStack):
            non_tensor[name] = [one.data for one in value]
        elif isinstance(value, NonTensorData):
            meta_info[name] = value.data
        else:
            raise ValueError(f"{name} is a {type(value).__name__}; only tensors and non-tensor entries become rollouts")
    return tensors, non_tensor, meta_info


def _is_jagged(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.is_nested


def _lengths(nested: Any) -> list[int]:
    lengths: list[int] = nested.offsets().diff().tolist()
    return lengths


def _into(
    rows: list[Row], name: str, tensor: Tensor, by_kind: Mapping[Kind, list[int]], tensors: Mapping[str, Tensor]
) -> Column:
    """Give every row its part of this tensor."""
    if not tensor.is_nested:
        for row, own in zip(rows, tensor, strict=True):
            row.tensors[name] = own.clone()
        return Column("row")
    token_dim: int = getattr(tensor, "_ragged_idx", 1)
    own_lengths = _lengths(tensor)
    # token dimension first; by hand, since unbind() of jagged tensors with more dimensions cuts the wrong one
    values = tensor.values().movedim(token_dim - 1, 0)
    parts = list(torch.split(values, own_lengths))
    kinds: Sequence[Kind] = [kind for kind, lengths in by_kind.items() if lengths == own_lengths]
    if not kinds:
        for row, own in zip(rows, parts, strict=True):
            row.tensors[name] = own.clone()
        return Column("row", token_dim=token_dim, jagged=True)
    kind: Kind = "prompt" if name == "prompts" and "prompt" in kinds else kinds[0]
    ids = tensors["input_ids"]
    if name in ("prompts", "responses") and kind != "sequence" and tensor.dtype == ids.dtype:
        whole = torch.split(ids.values(), by_kind["sequence"])
        spans = [span(kind, 0, row.offset, len(one)) for row, one in zip(rows, whole, strict=True)]
        if all(
            torch.equal(own, one[at.first : at.first + at.size])
            for own, one, at in zip(parts, whole, spans, strict=True)
        ):
            return Column(kind, None, token_dim)
    stored = stored_name(name, tensor, tensors)
    for row, own, length in zip(rows, parts, by_kind["sequence"], strict=True):
        row.tokens[stored] = column_of_row(own, span(kind, 0, row.offset, length)._replace(start=0), length)
    return Column(kind, stored, token_dim)


def tensordict_from_share(
    share: RankBatch | MicroBatch | Iterable[Rollout], *, meta_info: Mapping[str, Any] | None = None
) -> TensorDict:
    """A rank batch, a micro-batch, or any rollouts that came from verl, as one jagged TensorDict, in their order.

    ``meta_info`` becomes non-tensor data of the batch; by default whatever all the rollouts' own agree on. Padding
    copies (``is_padding``) have a ``response_mask`` and ``loss_mask`` of zeros.

    Raises ValueError where there are no rollouts, some are not verl's, or their fields differ.
    """
    from tensordict import NonTensorData, NonTensorStack, TensorDict

    read = read_share(share)
    fields: dict[str, Any] = {}
    for name, column in read.form.columns.items():
        parts = read.column(name)
        if column.kind == "row":
            fields[name] = _jagged(parts, column.token_dim) if column.jagged else _rows.stacked(parts)
            continue
        spans = [span(column.kind, 0, offset, len(part)) for offset, part in zip(read.offsets, parts, strict=True)]
        own = [part[at.first : at.first + at.size] for part, at in zip(parts, spans, strict=True)]
        fields[name] = _jagged(own, column.token_dim)
    data = TensorDict(fields, batch_size=[len(read.rollouts)])
    for name, array in read.non_tensor.items():
        data[name] = NonTensorStack.from_list([NonTensorData(one) for one in array])
    for name, value in (read.meta_info if meta_info is None else meta_info).items():
        data[name] = NonTensorData(value)
    return data


def _jagged(parts: Sequence[Tensor], token_dim: int) -> Tensor:
    offsets = torch.tensor(list(accumulate(map(len, parts), initial=0)), device=parts[0].device)
    values = torch.cat(list(parts)).movedim(0, token_dim - 1).contiguous()
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=token_dim)
