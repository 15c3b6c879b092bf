"""GRPO's dict of padded tensors, in and out of rollouts: what ``GRPOTrainer`` generated and scored, and what its loss
takes. No trainer is known here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import stream_balancer as sb
from stream_balancer.integrations import _rows
from stream_balancer.integrations._rows import Version

_MASKS_AND_IDS = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "num_items_in_batch"}
_PADDED_WITH_ONES = ("tool_mask",)  # as TRL pads them
_PROMPT, _ON_BOTH = "prompt_tokens", "on_the_prompt_too"
_SPLIT_IMAGES = frozenset(  # lists, one tensor per row, as TRL splits them
    ["pixel_values", "image_grid_thw", "image_position_ids", "pixel_attention_mask", "spatial_shapes", "image_sizes"]
)


def rollouts_from(
    inputs: Mapping[str, Any],
    *,
    group_size: int | None = None,
    version: Version | None = None,
    prompt_length: int | None = None,
) -> list[sb.Rollout]:
    """Rollouts, one per row, of the dict that ``GRPOTrainer._generate_and_score_completions`` returned, images split by
    ``trl.trainer.utils.split_pixel_values_by_grid``.

    ``prompt_ids`` (left-padded) and ``completion_ids`` become ``input_ids``; ``completion_mask``, times ``tool_mask``
    where there is one, ``loss_mask``. ``[B, C]`` columns lie on the completion, with zeros on the prompt; ``[B, P+C]``
    on both; ``advantages`` and other float32 ``[B]`` are scalars; other rows are ``tensors`` or ``metadata``. A
    completion that TRL masked (truncated) is left out with its tokens: it trains nothing. ``group_size``: so many
    neighbours are siblings.

    ``prompt_length``: pad every prompt to so many tokens, which then count. The loss pads prompts and completions
    apart, to the longest of each, so that a micro-batch is up to twice as large as its rollouts x the longest; with all
    prompts of one length under ``sb.cost.PaddedCost()`` the balancer's cap bounds what is really padded.
    :func:`inputs_from` takes the padding off again. Raises ValueError for a longer prompt.
    """
    prompts, (count, long) = inputs["prompt_mask"] != 0, inputs["completion_mask"].shape
    wide, before = prompts.shape[1], prompts.sum(1).tolist()
    if prompt_length is not None and max(before) > prompt_length:
        raise ValueError(f"a prompt has {max(before)} tokens, and prompt_length is {prompt_length}. Raise it")
    begins = max(wide, prompt_length or 0)  # every prompt ends where its completion begins
    # padding that counts: the cap then bounds what is really padded
    kept = before if prompt_length is None else [prompt_length] * count
    after = (inputs["completion_mask"] != 0).sum(1).tolist()
    where = [slice(begins - tokens, begins + others) for tokens, others in zip(kept, after, strict=True)]

    def whole(completion: Tensor, prompt: Tensor | None = None) -> Tensor:
        """``[B, begins + C, ...]``, zero where there is no prompt."""
        column = completion.new_zeros(count, begins + long, *completion.shape[2:])
        column[:, begins:] = completion
        if prompt is not None:
            column[:, begins - wide : begins][prompts] = prompt[prompts]
        return column

    entries: dict[str, Any] = {
        "input_ids": whole(inputs["completion_ids"], inputs["prompt_ids"]),
        # what a tool wrote is context, not the policy's own
        "loss_mask": whole(inputs["completion_mask"] * inputs.get("tool_mask", 1)),
        _PROMPT: [[tokens - own, tokens] for tokens, own in zip(kept, before, strict=True)],
    }
    on_both = []
    for name in inputs.keys() - _MASKS_AND_IDS:
        value = inputs[name]
        is_tensor = isinstance(value, Tensor)
        if is_tensor and value.ndim >= 2 and value.shape[1] == long:
            entries[name] = whole(value)
        elif is_tensor and value.ndim >= 2 and value.shape[1] == wide + long:
            on_both.append(name)
            entries[name] = whole(value[:, wide:], value[:, :wide])
        # numbers of the whole batch belong to no row
        elif value is not None and not (is_tensor and value.ndim == 0):
            entries[name] = value
    entries[_ON_BOTH] = [on_both] * count
    return _rows.rollouts_of(entries, where, begins + long, group_size=group_size, version=version)


def inputs_from(share: Any, *, pad_token_id: int) -> list[dict[str, Any]]:
    """GRPO's dict of each micro-batch of a rank batch, as ``GRPOTrainer.compute_loss`` takes it: prompts left-padded,
    completions right-padded; images as lists, for ``trl.trainer.utils.unsplit_pixel_values_by_grid``.

    ``num_items_in_batch`` is ``share.global_num_loss_tokens``. A padding copy has a zero ``completion_mask``. Ranks get
    different numbers of rows, and micro-batches different weights in the step: :class:`BalancedGRPO` sees to both.
    """
    items = torch.tensor(share.global_num_loss_tokens)
    return [_inputs(mb, pad_token_id) | {"num_items_in_batch": items} for mb in share.micro_batches]


def _inputs(micro_batch: sb.rollouts.MicroBatch, pad_token_id: int) -> dict[str, Any]:
    rollouts = _rows.with_prompt(micro_batch.rollouts)
    taken, noted = _rows.together(rollouts), rollouts[0].metadata
    prompts, completions = zip(*map(_parts, rollouts), strict=True)

    def prompt(columns: Sequence[Tensor], value: int = 0) -> Tensor:
        return _rows.padded([column[one] for column, one in zip(columns, prompts, strict=True)], "left", value)

    def completion(columns: Sequence[Tensor], value: int = 0) -> Tensor:
        rows = _rows.padded([column[one] for column, one in zip(columns, completions, strict=True)], "right", value)
        # TRL needs a column, also where every completion was truncated
        return rows if rows.shape[1] else rows.new_full((len(rows), 1, *rows.shape[2:]), value)

    ids = taken.tokens.pop("input_ids")
    # a padding copy runs through the model like any other rollout, but none of its tokens counts in a loss
    counted = [torch.full((one.num_tokens,), int(not one.is_padding)) for one in rollouts]
    out: dict[str, Any] = {
        "prompt_ids": prompt(ids, pad_token_id),
        "prompt_mask": prompt([torch.ones_like(column) for column in ids]).long(),
        "completion_ids": completion(ids, pad_token_id),
        "completion_mask": completion(counted),
        **{name: torch.tensor(values, dtype=torch.float32) for name, values in taken.scalars.items()},
    }
    for name in taken.tokens.keys() - {"loss_mask"}:
        out[name] = completion(taken.tokens[name], int(name in _PADDED_WITH_ONES))
        if name in noted.get(_ON_BOTH, ()):
            out[name] = torch.cat([prompt(taken.tokens[name]), out[name]], dim=1)
    for name, tensors in taken.tensors.items():
        out[name] = tensors if name in _SPLIT_IMAGES else _rows.stacked(tensors)
    return out | {name: [one.metadata[name] for one in rollouts] for name in noted.keys() - {_PROMPT, _ON_BOTH}}


def _parts(rollout: sb.Rollout) -> tuple[slice, slice]:
    """Prompt of the rollout, without zeros before it, and its completion. A padding copy keeps what it has."""
    start, stop = rollout.metadata[_PROMPT]
    stop = _rows.within(rollout, stop)
    return slice(0 if rollout.is_padding else start, stop), slice(stop, rollout.num_tokens)
