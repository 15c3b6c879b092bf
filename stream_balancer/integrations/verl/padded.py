"""``DataProto``: padded on both sides, prompts to the left and responses to the right."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stream_balancer.integrations import _rows
from stream_balancer.integrations.verl.columns import (
    Column,
    Kind,
    NoRuleError,
    Span,
    column_of_row,
    padding_of,
    row_of_column,
    span,
)
from stream_balancer.integrations.verl.rows import (
    Form,
    Row,
    Share,
    encode_meta_info,
    make_rollouts,
    read_share,
    stored_name,
)
from stream_balancer.types import MicroBatch, RankBatch, Rollout

if TYPE_CHECKING:
    from verl import DataProto

__all__ = ["dataproto_from_share", "rollouts_from_dataproto"]


def rollouts_from_dataproto(data: DataProto, *, whole: Collection[str] = ()) -> list[Rollout]:
    """One rollout per row, without padding. Nothing is lost: :func:`dataproto_from_share` gives the same DataProto.

    ``[B, P + R]`` and ``[B, R]`` tensors become token columns of the whole rollout, ``[L]``; those of the response are
    zero on the prompt's tokens. ``response_mask`` becomes ``loss_mask`` and so counts towards the loss denominators.
    ``prompts`` and ``responses`` are read from ``input_ids`` again. Any other tensor, and those named in `whole`, are
    kept row by row as they are, padding included. ``uid`` becomes the group.

    Raises ValueError without ``input_ids`` and a 0/1 ``attention_mask [B, S]``, for a row without a token or with a
    gap, and for a per-token tensor with anything but padding under its padding; RolloutError for a non-tensor that
    cannot travel. O(B S) per column; every token is copied once.
    """
    batch = data.batch
    names = [] if batch is None else list(batch.keys())
    if not {"input_ids", "attention_mask"} <= set(names):
        raise ValueError(
            f"a DataProto needs 'input_ids' and 'attention_mask' to become rollouts; it has {sorted(names)}"
        )
    mask = batch["attention_mask"]
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("attention_mask must be 0 or 1 everywhere")
    where = _rows.spans(mask)
    width = mask.shape[1]
    response = next((batch[name].shape[1] for name in ("responses", "response_mask") if name in names), 0)
    cut = _Cut(batch, width - response, width, [s.start for s in where], [s.stop - s.start for s in where])
    rows = [Row(offset) for offset in cut.offsets]
    columns = {name: cut.into(rows, name, name in whole) for name in names if name != "attention_mask"}
    form = Form(
        columns=columns,
        non_tensor={name: (array.dtype.str, array.ndim) for name, array in data.non_tensor_batch.items()},
        meta_info=encode_meta_info(data.meta_info),
        prompt_width=width - response,
        response_width=response,
        mask_dtype=str(mask.dtype).removeprefix("torch."),
    )
    return make_rollouts(rows, form, data.non_tensor_batch)


class _Cut:
    """A padded batch, and where its tokens are."""

    def __init__(self, batch: Any, prompt_width: int, width: int, starts: list[int], lengths: list[int]) -> None:
        self.batch = batch
        self.prompt_width = prompt_width
        self.width = width
        self.lengths = lengths
        self.offsets = [start - prompt_width for start in starts]

    def into(self, rows: list[Row], name: str, whole: bool) -> Column:
        """Give every row its part of this tensor."""
        tensor: Tensor = self.batch[name]
        kind, token_dim = self.kind(name, tensor, whole)
        if kind == "row":
            for row, own in zip(rows, tensor, strict=True):
                row.tensors[name] = own.clone()
            return Column(kind)
        tensor = tensor.movedim(token_dim, 1)
        spans = self.spans(kind)
        try:
            padding = padding_of(tensor, spans)
        except NoRuleError:
            raise ValueError(
                f"{name} {list(tensor.shape)}: what stands under its padding is neither one number nor a continuation, "
                f"and would be lost. If it means nothing, set it to 0 there; if {name} is not per token, or to keep it "
                f"as it is, pass whole=[{name!r}]"
            ) from None
        if name in ("prompts", "responses") and self.is_part_of_input_ids(tensor, spans):
            return Column(kind, None, token_dim, **padding)
        stored = stored_name(name, tensor, self.batch.keys())
        for row, own, one, length in zip(rows, tensor, spans, self.lengths, strict=True):
            row.tokens[stored] = column_of_row(own, one, length)
        return Column(kind, stored, token_dim, **padding)

    def kind(self, name: str, tensor: Tensor, whole: bool) -> tuple[Kind, int]:
        """Part of the rows that a tensor is for, and which of its dimensions are the tokens."""
        second = tensor.shape[1] if tensor.ndim > 1 and not whole else None
        if name == "position_ids" and tensor.ndim == 3 and tensor.shape[2] == self.width and not whole:
            return "sequence", 2
        if name == "prompts" and second == self.prompt_width:
            return "prompt", 1
        if second == self.width:
            return "sequence", 1
        if second == self.width - self.prompt_width:
            return "response", 1
        return "row", 1

    def spans(self, kind: Kind) -> list[Span]:
        rows = zip(self.offsets, self.lengths, strict=True)
        return [span(kind, self.prompt_width, offset, length) for offset, length in rows]

    def is_part_of_input_ids(self, part: Tensor, spans: list[Span]) -> bool:
        ids = self.batch["input_ids"]
        return part.dtype == ids.dtype and all(
            torch.equal(own[one.start : one.start + one.size], row[start:][one.first : one.first + one.size])
            for own, row, one, start in zip(
                part, ids, spans, [offset + self.prompt_width for offset in self.offsets], strict=True
            )
        )


def dataproto_from_share(
    share: RankBatch | MicroBatch | Iterable[Rollout],
    *,
    prompt_length: int | None = None,
    response_length: int | None = None,
    meta_info: Mapping[str, Any] | None = None,
) -> DataProto:
    """A rank batch, a micro-batch, or any rollouts that came from verl, as one DataProto, in their order.

    Args:
        share: of one DataProto, or of several with the same fields.
        prompt_length: P, and `response_length` R, of the result; by default the widest that came in.
        meta_info: of the result; by default whatever all the rollouts' own agree on.

    Padding copies (``is_padding``) are rows with a ``response_mask`` of zeros. Values under padding are what they were
    in the first DataProto that had any.

    Raises ValueError where there are no rollouts, some are not verl's, fields differ, or a row is longer than asked.
    """
    from verl import DataProto

    read = read_share(share)
    lengths = [rollout.num_tokens for rollout in read.rollouts]
    prompt = _width("prompt_length", prompt_length, read.form.prompt_width, max(-one for one in read.offsets))
    ends = [offset + length for offset, length in zip(read.offsets, lengths, strict=True)]
    response = _width("response_length", response_length, read.form.response_width, max(ends))
    tensors = {
        name: _whole(read, name) if column.kind == "row" else _padded(read, name, prompt, response)
        for name, column in read.form.columns.items()
    }
    tensors["attention_mask"] = _attention_mask(read, prompt, prompt + response)
    return DataProto.from_dict(
        tensors=tensors,
        non_tensors=read.non_tensor,
        meta_info=dict(read.meta_info if meta_info is None else meta_info),
    )


def _width(what: str, asked: int | None, came: int, needed: int) -> int:
    if asked is not None and asked < needed:
        raise ValueError(
            f"{what} ({asked}) is smaller than the {needed} tokens of a rollout. Raise it, or truncate before"
        )
    return max(came, needed, 0) if asked is None else asked


def _padded(read: Share, name: str, prompt: int, response: int) -> Tensor:
    column = read.form.columns[name]
    parts = read.column(name)
    width = {"sequence": prompt + response, "prompt": prompt, "response": response}[column.kind]
    rows = parts[0].new_empty((len(parts), width, *parts[0].shape[1:]))
    for row, part, offset in zip(rows, parts, read.offsets, strict=True):
        row_of_column(row, part, span(column.kind, prompt, offset, part.shape[0]), column)
    return rows.movedim(1, column.token_dim).contiguous()


def _whole(read: Share, name: str) -> Tensor:
    rows = read.column(name)
    if read.form.columns[name].jagged:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return _rows.stacked(rows)


def _attention_mask(read: Share, prompt: int, width: int) -> Tensor:
    ids = read.rollouts[0].tokens["input_ids"]
    mask = ids.new_zeros((len(read.rollouts), width), dtype=getattr(torch, read.form.mask_dtype))
    for row, rollout, offset in zip(mask, read.rollouts, read.offsets, strict=True):
        row[prompt + offset : prompt + offset + rollout.num_tokens] = 1
    return mask
