"""GRPO's dict of padded tensors, in and out of rollouts: what ``GRPOTrainer`` generated and scored, and what its loss
takes. No trainer is known here."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stream_balancer.integrations import _rows
from stream_balancer.types import MicroBatch, RankBatch, Rollout, Version

__all__ = ["inputs_from", "rollouts_from"]

_MASKS_AND_IDS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "num_items_in_batch")
_PADDED_WITH_ONES = ("tool_mask",)  # as TRL pads them
_PADDING = "prompt_padding"
_SPLIT_IMAGES = frozenset(
    ["pixel_values", "image_grid_thw", "image_position_ids", "pixel_attention_mask", "spatial_shapes", "image_sizes"]
)


def rollouts_from(
    inputs: Mapping[str, Any],
    *,
    group_size: int | None = None,
    version: Version | None = None,
    prompt_length: int | None = None,
) -> list[Rollout]:
    """One rollout per row of what ``GRPOTrainer._generate_and_score_completions`` returned, images split by
    ``trl.trainer.utils.split_pixel_values_by_grid``.

    ``prompt_ids`` (left-padded) and ``completion_ids`` become ``input_ids``; ``completion_mask``, times ``tool_mask``
    where there is one, ``loss_mask``. ``[B, C]`` columns lie on the completion, with zeros on the prompt; ``[B, P+C]``
    on both; ``advantages`` and other float32 ``[B]`` are scalars; other rows are ``tensors`` or ``metadata``. A
    completion that TRL masked (truncated) is left out with its tokens: it trains nothing. ``group_size``: so many
    neighbours are siblings.

    ``prompt_length``: pad every prompt to so many tokens, which then count. The loss pads prompts and completions
    apart, to the longest of each, so that a micro-batch is up to twice as large as its rollouts x the longest; with all
    prompts of one length under ``sb.PaddedCost()`` the balancer's cap bounds what is really padded.
    :func:`inputs_from` takes the padding off again. Raises ValueError for a longer prompt.
    """
    prompts, completions = inputs["prompt_mask"] != 0, inputs["completion_mask"] != 0
    if prompt_length is not None and (longest := int(prompts.sum(1).max())) > prompt_length:
        raise ValueError(f"a prompt has {longest} tokens, and prompt_length is {prompt_length}. Raise it")
    name = uuid.uuid4().hex
    rows = []
    for index in range(len(prompts)):
        prompt, completion = prompts[index], completions[index]
        group = None if group_size is None else f"{name}/{index // group_size}"
        row = _Row(prompt, completion)
        for key, value in inputs.items():
            if key not in _MASKS_AND_IDS and value is not None and not (isinstance(value, Tensor) and value.ndim == 0):
                row.note(key, value, index)
        made = row.rollout(inputs, index, rollout_id=f"{name}/{index}", group_id=group, version=version)
        rows.append(made if prompt_length is None else _padded_before(made, prompt_length))
    return rows


def _padded_before(rollout: Rollout, prompt_length: int) -> Rollout:
    """With zeros before its tokens, so that its prompt is ``prompt_length`` long."""
    missing = prompt_length - rollout.metadata["prompt_tokens"]
    tokens = {
        name: torch.cat([column.new_zeros(missing, *column.shape[1:]), column])
        for name, column in rollout.tokens.items()
    }
    prefix = missing + rollout.prefix if rollout.prefix else 0
    return replace(rollout, tokens=tokens, prefix=prefix, metadata={**rollout.metadata, _PADDING: missing})


def _without_padding(rollout: Rollout) -> Rollout:
    """As it was before :func:`_padded_before`; a padding copy keeps what it has."""
    missing = 0 if rollout.is_padding else rollout.metadata.get(_PADDING, 0)
    tokens = {name: column[missing:] for name, column in rollout.tokens.items()}
    return replace(rollout, tokens=tokens, prefix=max(rollout.prefix - missing, 0))


class _Row:
    """One row of GRPO's dict on its way to a rollout."""

    def __init__(self, prompt: Tensor, completion: Tensor) -> None:
        self._prompt, self._completion = prompt, completion
        self._whole = torch.cat([prompt, completion])
        self._tokens: dict[str, Tensor] = {}
        self._scalars: dict[str, float] = {}
        self._tensors: dict[str, Tensor] = {}
        self._metadata: dict[str, Any] = {"prompt_tokens": int(prompt.sum())}

    def note(self, key: str, value: Any, index: int) -> None:
        """An entry that is neither the ids nor their masks."""
        if not isinstance(value, Tensor):
            item = value[index]
            (self._tensors if isinstance(item, Tensor) else self._metadata)[key] = item
        elif value.ndim >= 2 and value.shape[1] == self._completion.numel():
            self._tokens[key] = self._after_the_prompt(value[index])
        elif value.ndim >= 2 and value.shape[1] == self._whole.numel():
            self._tokens[key] = value[index][self._whole]
            self._metadata.setdefault("on_the_prompt_too", []).append(key)
        elif value.ndim == 1 and value.dtype is torch.float32:
            self._scalars[key] = float(value[index])
        else:
            self._tensors[key] = value[index].clone()

    def rollout(self, inputs: Mapping[str, Any], index: int, **fields: Any) -> Rollout:
        ids = torch.cat([inputs["prompt_ids"][index], inputs["completion_ids"][index]])[self._whole]
        mask = self._after_the_prompt(inputs["completion_mask"][index])
        if "tool_mask" in self._tokens:  # what a tool wrote is context, not the policy's own
            mask = mask * self._tokens["tool_mask"]
        return Rollout(
            tokens={"input_ids": ids, "loss_mask": mask, **self._tokens},
            scalars=self._scalars,
            tensors=self._tensors,
            metadata=self._metadata,
            **fields,
        )

    def _after_the_prompt(self, column: Tensor) -> Tensor:
        of_completion = column[self._completion]
        return torch.cat([of_completion.new_zeros(int(self._prompt.sum()), *of_completion.shape[1:]), of_completion])


def inputs_from(share: RankBatch, *, pad_token_id: int) -> list[dict[str, Any]]:
    """GRPO's dict of each micro-batch of a rank batch, as ``GRPOTrainer.compute_loss`` takes it: prompts left-padded,
    completions right-padded; images as lists, for ``trl.trainer.utils.unsplit_pixel_values_by_grid``.

    ``num_items_in_batch`` is ``share.global_num_loss_tokens``. A padding copy has a zero ``completion_mask``. Ranks get
    different numbers of rows, and micro-batches different weights in the step: :class:`BalancedGRPO` sees to both.
    """
    items = torch.tensor(share.global_num_loss_tokens)
    return [_inputs(mb, pad_token_id) | {"num_items_in_batch": items} for mb in share.micro_batches]


def _inputs(micro_batch: MicroBatch, pad_token_id: int) -> dict[str, Any]:
    rollouts = [_without_padding(rollout) for rollout in _rows.with_prompt(micro_batch.rollouts)]
    first = _rows.same_columns(rollouts)
    before = [_rows.within(rollout, rollout.metadata["prompt_tokens"]) for rollout in rollouts]
    after = [rollout.num_tokens - tokens for rollout, tokens in zip(rollouts, before, strict=True)]
    wide, long = max(before), max(after)
    ids = [rollout.tokens["input_ids"] for rollout in rollouts]
    # a padding copy runs through the model like any other rollout, but none of its tokens counts in a loss
    shown = [0 if rollout.is_padding else tokens for rollout, tokens in zip(rollouts, after, strict=True)]
    out: dict[str, Any] = {
        "prompt_ids": _rows.padded(_upto(ids, before), wide, "left", pad_token_id),
        "prompt_mask": _rows.mask_of(before, wide, "left").long(),
        "completion_ids": _rows.padded(_beyond(ids, before), long, "right", pad_token_id),
        "completion_mask": _rows.mask_of(shown, long, "right").long(),
    }
    for name in first.tokens.keys() - {"input_ids", "loss_mask"}:
        columns = [rollout.tokens[name] for rollout in rollouts]
        beyond = _rows.padded(_beyond(columns, before), long, "right", int(name in _PADDED_WITH_ONES))
        if name in first.metadata.get("on_the_prompt_too", ()):
            beyond = torch.cat([_rows.padded(_upto(columns, before), wide, "left"), beyond], dim=1)
        out[name] = beyond
    for name in first.scalars:
        out[name] = torch.tensor([rollout.scalars[name] for rollout in rollouts], dtype=torch.float32)
    for name in first.tensors:
        out[name] = _together(name, [rollout.tensors[name] for rollout in rollouts])
    for name in first.metadata.keys() - {"prompt_tokens", "on_the_prompt_too", _PADDING}:
        out[name] = [rollout.metadata[name] for rollout in rollouts]
    return out


def _together(name: str, tensors: list[Tensor]) -> Tensor | list[Tensor]:
    """Images remain a list, one tensor per row, as TRL splits them."""
    return tensors if name in _SPLIT_IMAGES else _rows.stacked(tensors)


def _upto(columns: Sequence[Tensor], ends: Sequence[int]) -> list[Tensor]:
    return [column[:end] for column, end in zip(columns, ends, strict=True)]


def _beyond(columns: Sequence[Tensor], ends: Sequence[int]) -> list[Tensor]:
    return [column[end:] for column, end in zip(columns, ends, strict=True)]
