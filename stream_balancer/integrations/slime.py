"""slime: its schedule of ranks and micro-batches, its train data in and out of rollouts; miles: its schedule.

::

    patch()                                             # slime.ray.rollout.build_dp_schedule is then ours
    patch("miles")                                      # or its fork's

    train_data = manager._convert_samples_to_train_data(group)          # a finished group, as a dict of lists
    for rollout in rollouts_from(train_data, group_id="g17", version=3):
        await balancer.put(rollout)
    ...
    async for batch in balancer.batches():
        rank_data = rank_data_from(batch)               # one dict of lists per rank, scheduled

slime's samples are its own to read: what comes in here is the dict of lists it makes of them, group by group, in which
rewards are already normalised over the group. Nothing of slime is imported but in :func:`patch`.
"""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise, repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

import stream_balancer as sb
from stream_balancer import planning
from stream_balancer.integrations import _rows
from stream_balancer.integrations._plans import UnplannableError
from stream_balancer.integrations._rows import Version
from stream_balancer.integrations.partitions import replace

__all__ = ["build_dp_schedule", "patch", "rank_data_from", "rollouts_from"]

# --- the schedule -----------------------------------------------------------------------------------------------------


def build_dp_schedule(
    args: Any,
    train_parallel_config: Mapping[str, int],
    total_lengths: Sequence[int],
    *,
    global_batch_size: int,
    rollout_indices: Sequence[int],
    cost: Callable[[ArrayLike], ArrayLike] | None = None,
) -> tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]:
    """slime's function of this name by our planning, for ``use_dynamic_batch_size``: rank totals are balanced first and
    each rank packs its own under ``max_tokens_per_gpu * cp_size``; a sample longer than that is alone in its
    micro-batch.

    ``cost``: work of lengths (``sb.cost.TransformerCost...``); tokens by default. Arguments and answer are otherwise
    slime's: ``(partitions, micro_batch_indices, num_microbatches, global_batch_sizes)``, trailing rollouts that fill no
    step dropped, samples of one rollout in one step. With miles' ``allow_partial_train_step`` trailing rollouts are a
    smaller step of their own, if they have a sample for every rank.

    Raises UnplannableError, a ValueError, if the batches are not dynamic, for less than one step, or if a step has too
    few samples for its ranks and their virtual pipelines.
    """
    if not args.use_dynamic_batch_size:
        raise UnplannableError("there is nothing to plan with fixed micro-batches. Set --use-dynamic-batch-size")
    dp_size = train_parallel_config["dp_size"]
    partial = getattr(args, "allow_partial_train_step", False)  # miles only
    steps = _steps(rollout_indices, global_batch_size, partial_from=dp_size if partial else None)
    virtual = (train_parallel_config["vpp_size"] or 1) > 1
    # Megatron's interleaved schedule refuses any other number of micro-batches
    multiple_of = train_parallel_config["microbatch_group_size_per_vp_stage"] if virtual else 1
    partitions: list[list[int]] = [[] for _ in range(dp_size)]
    micro_batches: list[list[list[int]]] = [[] for _ in range(dp_size)]
    counts = []
    for step, positions in enumerate(steps):
        lengths = np.array([total_lengths[position] for position in positions])
        plan = planning.form_micro_batches(
            lengths,
            lengths if cost is None else cost(lengths),
            dp_size,
            # the GPUs of a context-parallel group hold a sample together, so their caps add up
            max_tokens=args.max_tokens_per_gpu * train_parallel_config["cp_size"],
            multiple_of=multiple_of,
            oversize="alone",  # as slime's own schedule: at this point a sample can no longer be refused
            rotation=step,
        )
        counts.append(_same_count(plan, step, multiple_of))
        for rank, of_rank in enumerate(plan):
            for micro_batch in of_rank:
                start = len(partitions[rank])
                partitions[rank] += [positions[i] for i in micro_batch]
                micro_batches[rank].append(list(range(start, len(partitions[rank]))))
    sizes = [len({rollout_indices[position] for position in positions}) for positions in steps]
    return partitions, micro_batches, counts, sizes


def patch(package: str = "slime", *, cost: Callable[[ArrayLike], ArrayLike] | None = None) -> Callable[[], None]:
    """Put our schedule in place of slime's, or its fork's with ``"miles"``, in every module loaded so far that has it;
    fixed micro-batches remain theirs. In the process of the rollout manager, after it was imported. Returns a function
    that puts it back."""
    dp_schedule = importlib.import_module(f"{package}.utils.dp_schedule")
    original = dp_schedule.build_dp_schedule

    def ours(args: Any, *more: Any, **options: Any) -> Any:
        if not args.use_dynamic_batch_size:
            return original(args, *more, **options)
        return build_dp_schedule(args, *more, **options, cost=cost)

    return replace(dp_schedule, "build_dp_schedule", ours)


def _steps(
    rollout_indices: Sequence[int], global_batch_size: int, *, partial_from: int | None = None
) -> list[list[int]]:
    """Positions of each step's samples: ``global_batch_size`` rollouts, with all samples of each. A last step of fewer
    rollouts is one if it has ``partial_from`` samples."""
    samples_of: dict[int, list[int]] = {}
    for position, rollout in enumerate(rollout_indices):
        samples_of.setdefault(rollout, []).append(position)
    rollouts = list(samples_of.values())
    if len(rollouts) < global_batch_size:
        raise UnplannableError(
            f"num_rollouts={len(rollouts)} do not fill one step of global_batch_size={global_batch_size}"
        )
    starts = range(0, len(rollouts), global_batch_size)
    steps = [[i for samples in rollouts[at : at + global_batch_size] for i in samples] for at in starts]
    if len(rollouts) % global_batch_size and (partial_from is None or len(steps[-1]) < partial_from):
        steps.pop()
    return steps


def _same_count(plan: Sequence[Sequence[Any]], step: int, multiple_of: int) -> int:
    counts = {len(of_rank) for of_rank in plan}
    if len(counts) > 1 or 0 in counts or max(counts) % multiple_of:
        raise UnplannableError(
            f"step {step} has too few samples for {len(plan)} ranks with a multiple of {multiple_of} micro-batches "
            "each. Raise global_batch_size"
        )
    return counts.pop()


# --- train data in ----------------------------------------------------------------------------------------------------

_WHOLE = ("tokens", "response_lengths", "loss_masks", "total_lengths", "rollout_ids", "rollout_mask_sums")
_OF_THE_RESPONSE = ("rollout_log_probs", "teacher_log_probs")
_MULTIMODAL = "multimodal_train_inputs"
_DTYPES = {"rollout_log_probs": torch.float32, "teacher_log_probs": torch.float32}
_DTYPES |= {"rollout_top_p_token_ids": torch.int32, "rollout_top_p_token_offsets": torch.int32}


def rollouts_from(
    train_data: Mapping[str, Any], *, group_id: str | None = None, version: Version | None = None
) -> list[sb.Rollout]:
    """Rollouts, one per sample, of the dict that slime's ``_convert_samples_to_train_data`` made: of one finished
    group, so that its ``rollout_ids`` name rollouts of this group only.

    ``tokens`` become ``input_ids``; ``loss_masks`` and log-probabilities, which slime keeps for the response,
    ``loss_mask`` int32 and float32 columns with zeros on the prompt; ``rewards``, ``raw_reward`` and ``truncated``
    scalars; routed experts, top-p ids and multimodal inputs ``tensors``; anything else ``metadata``.
    """
    name = group_id or uuid.uuid4().hex
    ids = [torch.as_tensor(tokens, dtype=torch.int64) for tokens in train_data["tokens"]]
    rows = _rows.Rows([slice(0)] * len(ids))
    rows.add("tokens", "input_ids", ids)
    rows.add("tokens", "loss_mask", map(_on_the_prompt_too, train_data["loss_masks"], ids, repeat(torch.int32)))
    rows.add("metadata", "response_length", map(int, train_data["response_lengths"]))
    rows.add("metadata", "rollout", [f"{name}/{rollout}" for rollout in train_data["rollout_ids"]])
    rows.add("metadata", "mask_sum", map(int, train_data["rollout_mask_sums"]))
    for key in train_data.keys() - set(_WHOLE):
        for fields, value, of_row in zip(rows.fields, train_data[key], ids, strict=True):
            _note(fields, key, value, of_row)
    return rows.rollouts(name=name, group_ids=[group_id] * len(ids), version=version)


def _note(fields: dict[str, Any], key: str, value: Any, ids: Tensor) -> None:
    """A sample's value as what it is to a rollout."""
    if key in _OF_THE_RESPONSE:
        fields["tokens"][key] = _on_the_prompt_too(value, ids, _DTYPES[key])
    elif key in _DTYPES or isinstance(value, (Tensor, np.ndarray)):
        fields["tensors"][key] = torch.as_tensor(value, dtype=_DTYPES.get(key))
    elif key == _MULTIMODAL:
        fields["tensors"] |= {f"{key}.{inner}": torch.as_tensor(tensor) for inner, tensor in (value or {}).items()}
    else:
        fields["scalars" if isinstance(value, (int, float)) else "metadata"][key] = value


def _on_the_prompt_too(values: Any, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """A column of the response as one of the whole sample: zeros on the prompt."""
    column = torch.zeros(ids.shape[0], dtype=dtype)
    of_response = torch.as_tensor(values, dtype=dtype)
    column[ids.shape[0] - of_response.shape[0] :] = of_response
    return column


# --- per-rank data out ------------------------------------------------------------------------------------------------


def rank_data_from(batch: sb.Batch) -> list[dict[str, Any]]:
    """Train data of each rank as slime's ``_split_train_data_by_dp`` makes it, before it goes into a Box: a dict of
    lists with ``partition`` (places in the whole step), the schedule ``micro_batch_indices``, ``num_microbatches`` and
    ``global_batch_sizes`` (one step), ``rollout_mask_sums``, and the whole step's ``raw_reward`` and ``total_lengths``.

    ``rollout_ids`` are numbered anew, from 0, over the step. A padding copy has a zero loss mask and counts in no
    rollout: it keeps its rollout's id and mask sum, so it adds nothing.
    """
    rollouts = _rows.with_prompt(rollout for share in batch.ranks for rollout in share.rollouts)
    columns = _columns(rollouts)
    whole: dict[str, Any] = {key: columns[key] for key in ("raw_reward", "total_lengths") if key in columns}
    # slime counts places over all ranks, in rank order
    starts = accumulate((share.num_rollouts for share in batch.ranks), initial=0)
    return [
        {
            "partition": list(range(start, start + share.num_rollouts)),
            **{key: values[start : start + share.num_rollouts] for key, values in columns.items()},
            **whole,
            "rollout_mask_sums": torch.tensor(
                columns["rollout_mask_sums"][start : start + share.num_rollouts], dtype=torch.float32
            ),
            "global_batch_sizes": [len(set(columns["rollout_ids"]))],
            "num_microbatches": [len(share.micro_batches)],
            "micro_batch_indices": [
                list(range(*ends))
                for ends in pairwise(accumulate((len(mb.lengths) for mb in share.micro_batches), initial=0))
            ],
        }
        for share, start in zip(batch.ranks, starts, strict=False)
    ]


def _columns(rollouts: Sequence[sb.Rollout]) -> dict[str, list[Any]]:
    """slime's dict of lists, of all ranks' rollouts one after the other."""
    taken = _rows.together(rollouts, some_tensors=True)
    responses = [_rows.within(rollout, rollout.metadata["response_length"]) for rollout in rollouts]
    # slime's are whole numbers, and unique within the step only
    numbers: dict[str, int] = {}
    columns: dict[str, list[Any]] = {
        "tokens": taken.tokens.pop("input_ids"),
        "response_lengths": responses,
        "total_lengths": taken.lengths,
        "rollout_ids": [numbers.setdefault(rollout.metadata["rollout"], len(numbers)) for rollout in rollouts],
        "rollout_mask_sums": [rollout.metadata["mask_sum"] for rollout in rollouts],
        **taken.scalars,
    }
    for name, whole in taken.tokens.items():
        key = "loss_masks" if name == "loss_mask" else name
        columns[key] = [column[len(column) - kept :] for column, kept in zip(whole, responses, strict=True)]
    for name, tensors in taken.tensors.items():
        key, dot, inner = name.partition(".")
        if not dot:
            columns[name] = tensors
            continue
        for at, tensor in enumerate(tensors):
            inputs = columns.setdefault(key, [None] * len(rollouts))
            if tensor is not None:
                inputs[at] = {**(inputs[at] or {}), inner: tensor}
    for name in rollouts[0].metadata.keys() - {"response_length", "rollout", "mask_sum"}:
        columns[name] = [rollout.metadata[name] for rollout in rollouts]
    return columns
