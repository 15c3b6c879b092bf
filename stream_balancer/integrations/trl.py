"""TRL: GRPO's dict of padded tensors in and out of rollouts, and a source of micro-batches for its async trainer.

::

    for rollout in rollouts_from(inputs, group_size=8, version=step):    # what GRPOTrainer generated and scored
        balancer.put(rollout)
    ...
    for inputs in inputs_from(share, pad_token_id=tokenizer.pad_token_id):      # one dict per micro-batch, for its loss

    patch()                                                              # AsyncGRPOTrainer then takes our plan as it is
    trainer = AsyncGRPOTrainer(..., rollout_worker=RolloutSource(balancer, args))

``num_items_in_batch`` of a dict is the whole step's, over all ranks: what TRL divides its loss by.
"""

from __future__ import annotations

import queue
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from stream_balancer.controller.blocking import BlockingBalancer
from stream_balancer.integrations import _rows
from stream_balancer.types import Batch, MicroBatch, RankBatch, Rollout, Version

__all__ = ["RolloutSource", "inputs_from", "patch", "rollouts_from", "rollouts_from_samples"]

_MASKS_AND_IDS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "num_items_in_batch")
_PADDED_WITH_ONES = ("tool_mask",)  # as TRL pads them
_SPLIT_IMAGES = frozenset(
    ["pixel_values", "image_grid_thw", "image_position_ids", "pixel_attention_mask", "spatial_shapes", "image_sizes"]
)


# --- GRPO's dict ------------------------------------------------------------------------------------------------------


def rollouts_from(
    inputs: Mapping[str, Any], *, group_size: int | None = None, version: Version | None = None
) -> list[Rollout]:
    """One rollout per row of what ``GRPOTrainer._generate_and_score_completions`` returned, images split by
    ``trl.trainer.utils.split_pixel_values_by_grid``.

    ``prompt_ids`` (left-padded) and ``completion_ids`` become ``input_ids``; ``completion_mask``, times ``tool_mask``
    where there is one, ``loss_mask``. ``[B, C]`` columns lie on the completion, with zeros on the prompt; ``[B, P+C]``
    on both; ``advantages`` and other float32 ``[B]`` are scalars; other rows are ``tensors`` or ``metadata``. A
    completion that TRL masked (truncated) is left out with its tokens: it trains nothing. ``group_size``: so many
    neighbours are siblings.
    """
    prompts, completions = inputs["prompt_mask"] != 0, inputs["completion_mask"] != 0
    name = uuid.uuid4().hex
    rows = []
    for index in range(len(prompts)):
        prompt, completion = prompts[index], completions[index]
        group = None if group_size is None else f"{name}/{index // group_size}"
        row = _Row(prompt, completion)
        for key, value in inputs.items():
            if key not in _MASKS_AND_IDS and value is not None and not (isinstance(value, Tensor) and value.ndim == 0):
                row.note(key, value, index)
        rows.append(row.rollout(inputs, index, rollout_id=f"{name}/{index}", group_id=group, version=version))
    return rows


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

    ``num_items_in_batch`` is ``share.global_num_loss_tokens``. A padding copy has a zero ``completion_mask``.
    """
    return [_inputs(mb, pad_token_id) | _items(share.global_num_loss_tokens) for mb in share.micro_batches]


def _items(count: int) -> dict[str, Any]:
    return {"num_items_in_batch": torch.tensor(count)}


def _inputs(micro_batch: MicroBatch, pad_token_id: int) -> dict[str, Any]:
    rollouts = _rows.with_prompt(micro_batch.rollouts)
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
    for name in first.metadata.keys() - {"prompt_tokens", "on_the_prompt_too"}:
        out[name] = [rollout.metadata[name] for rollout in rollouts]
    return out


def _together(name: str, tensors: list[Tensor]) -> Tensor | list[Tensor]:
    """Images remain a list, one tensor per row, as TRL splits them."""
    return tensors if name in _SPLIT_IMAGES else _rows.stacked(tensors)


def _upto(columns: Sequence[Tensor], ends: Sequence[int]) -> list[Tensor]:
    return [column[:end] for column, end in zip(columns, ends, strict=True)]


def _beyond(columns: Sequence[Tensor], ends: Sequence[int]) -> list[Tensor]:
    return [column[end:] for column, end in zip(columns, ends, strict=True)]


# --- the async trainer ------------------------------------------------------------------------------------------------


def rollouts_from_samples(samples: Iterable[Any]) -> list[Rollout]:
    """Rollouts of the ``RolloutSample``s that async GRPO's workers score: ``completion_mask`` is ``loss_mask``,
    ``old_log_probs`` a column, ``model_version`` ``version``; prompt, completion and metrics are metadata."""
    return [
        Rollout(
            tokens={
                "input_ids": torch.as_tensor(sample.input_ids),
                "loss_mask": torch.as_tensor(sample.completion_mask),
                "old_log_probs": torch.as_tensor(sample.old_log_probs),
            },
            scalars={"advantage": sample.advantage},
            metadata={"prompt": sample.prompt, "completion": sample.completion, "metrics": dict(sample.metrics)},
            group_id=str(sample.group_id),
            version=sample.model_version,
        )
        for sample in samples
    ]


class RolloutSource:
    """``AsyncGRPOTrainer(rollout_worker=RolloutSource(balancer, args))``: its micro-batches are the balancer's plan.

    ``balancer``: an entered :func:`sb.blocking` with ``dp_size=accelerator.num_processes``, into which rollouts with
    the columns of :func:`rollouts_from_samples` are put: by TRL's own loop, by ``sb.connect`` from other machines, by
    anything. Rows are its ranks, so its ``max_tokens_per_micro_batch`` takes the place of ``token_budget``, and its
    ``max_staleness`` that of TRL's check. ``args``: the trainer's, for how far it looks ahead: a step is acknowledged
    when the trainer is surely done with it, not when it was fetched. What was fetched at the end and not trained is
    delivered again after a restart. Call :func:`patch` before the trainer is built.

    The trainer stops it by closing the balancer.
    """

    def __init__(self, balancer: BlockingBalancer, args: Any) -> None:
        # accelerate's dispatcher holds one micro-batch, the trainer fetches a whole accumulation before it trains
        self._in_hand = int(args.gradient_accumulation_steps) + 1
        self._balancer = balancer
        self.rollout_buffer = _NoQueue(self)
        self.metrics_queue: queue.Queue[Any] = queue.Queue()

    def start(self) -> None:
        """Nothing to start: producers put by themselves."""

    def stop(self) -> None:
        """Close the balancer: producers that wait in ``put`` get ClosedResourceError."""
        self._balancer.close()

    def update_model_version(self, model_version: int) -> None:
        """The policy moved on."""
        self._balancer.set_version(model_version)

    def check_health(self, stale_after_s: float) -> None:
        """The balancer says so itself when something is wrong: from the iteration."""

    def micro_batches(self, num_processes: int) -> Iterator[list[Any]]:
        """TRL's rows, one per rank, micro-batch by micro-batch; ends with the balancer."""
        if self._balancer.config.dp_size != num_processes:
            raise ValueError(
                f"the balancer balances for dp_size={self._balancer.config.dp_size}, but TRL trains on {num_processes} "
                "processes. Give BalancerConfig dp_size=accelerator.num_processes"
            )
        if self._balancer.config.micro_batch_counts == "free":
            raise ValueError("TRL deals out a micro-batch to every rank at a time: leave micro_batch_counts at 'equal'")
        fetched: deque[int | None] = deque()  # the step that is over with each micro-batch in the trainer's hands
        for batch in self._balancer.batches(auto_ack=False):
            rows = _rows_of(batch)
            for index, micro_batch in enumerate(rows):
                if len(fetched) >= self._in_hand and (done := fetched.popleft()) is not None:
                    self._balancer.acknowledge(done)
                fetched.append(batch.step if index == len(rows) - 1 else None)
                yield micro_batch


def patch() -> Callable[[], None]:
    """Have TRL's async trainer take a :class:`RolloutSource`'s micro-batches as they are, instead of planning again.
    Other workers are planned as before. Returns a function that undoes it."""
    from trl.experimental.async_grpo import async_grpo_trainer as home

    originals = {name: getattr(home, name) for name in ("TokenBudgetBatcher", "FixedCountBatcher")}

    def instead_of(original: Callable[..., Any]) -> Callable[..., Any]:
        def batcher(dataset: Any, num_processes: int, *args: Any, **options: Any) -> Any:
            if isinstance(dataset.queue, _NoQueue):
                return _planned(dataset.queue.source, num_processes)
            return original(dataset, num_processes, *args, **options)

        return batcher

    for name, original in originals.items():
        setattr(home, name, instead_of(original))

    def put_back() -> None:
        for name, original in originals.items():
            setattr(home, name, original)

    return put_back


def _planned(source: RolloutSource, num_processes: int) -> torch.utils.data.IterableDataset[list[Any]]:
    class Planned(torch.utils.data.IterableDataset[list[Any]]):
        def __iter__(self) -> Iterator[list[Any]]:
            return source.micro_batches(num_processes)

    return Planned()


class _NoQueue:
    """In the place of TRL's queue of samples, which a planned source has no use for."""

    def __init__(self, source: RolloutSource) -> None:
        self.source = source

    def get(self, timeout: float | None = None) -> NoReturn:
        raise RuntimeError("call stream_balancer.integrations.trl.patch() before the trainer is built")

    def qsize(self) -> int:
        return self.source._balancer.statistics().waiting


def _rows_of(batch: Batch) -> list[list[Any]]:
    """[micro_batch][rank] TRL's TreeRow, in which samples share their common prefixes."""
    from trl.experimental.async_grpo.packing import TreeRow

    rows = []
    for of_ranks in zip(*(share.micro_batches for share in batch.ranks), strict=True):
        rows.append([TreeRow() for _ in of_ranks])
        for row, micro_batch in zip(rows[-1], of_ranks, strict=True):
            for rollout in _rows.with_prompt(micro_batch.rollouts):
                row.add(_sample(rollout))
    return rows


def _sample(rollout: Rollout) -> dict[str, Any]:
    """A sample as TRL's queue yields it. Numpy, as TRL has it."""
    group = rollout.group_id or rollout.rollout_id
    tokens: dict[str, np.ndarray[Any, Any]] = {name: column.numpy() for name, column in rollout.tokens.items()}
    return {
        "input_ids": tokens["input_ids"],
        "completion_mask": tokens["loss_mask"],
        "old_log_probs": tokens["old_log_probs"],
        "advantage": float(rollout.scalars["advantage"]),
        "group_id": int(group) if group.isdecimal() else group,
        "metrics": rollout.metadata.get("metrics", {}),
    }
