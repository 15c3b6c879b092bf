"""AsyncGRPOTrainer on a balancer: a source of rollouts whose micro-batches are the balancer's plan."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, NoReturn

import numpy as np
import torch

import stream_balancer as sb
from stream_balancer.integrations import _rows

_OF_A_TERM = ("token_index", "old_log_probs", "advantages", "segment_id")


def rollouts_from_samples(samples: Iterable[Any]) -> list[sb.Rollout]:
    """Rollouts of the ``RolloutSample``s that async GRPO's workers score: ``completion_mask`` is ``loss_mask``,
    ``old_log_probs`` a column, ``model_version`` ``version``; prompt, completion and metrics are metadata."""
    return [
        sb.Rollout(
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
    anything. Rows are its ranks, so its ``micro_batches.max_tokens`` takes the place of ``token_budget``, and its
    ``staleness.max_versions`` that of TRL's check. ``args``: the trainer's, for its gradient accumulation: a step is
    acknowledged after the optimizer step that has the last of it, not when it was fetched. What was fetched at the end
    and not trained is delivered again after a restart. Call :func:`patch` before the trainer is built, on every rank;
    only the main process needs a source.

    The trainer stops it by closing the balancer.
    """

    def __init__(self, balancer: sb.BlockingBalancer, args: Any) -> None:
        self._per_optimizer_step = int(args.gradient_accumulation_steps)
        self._fetched: deque[int | None] = deque()  # of each micro-batch not trained yet: the step that it ends
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
        if not self._balancer.config.micro_batches.equal_number:
            raise ValueError(
                "TRL deals out a micro-batch to every rank at a time: leave micro_batches.equal_number at True"
            )
        for batch in self._balancer.batches(auto_ack=False):
            rows = _rows_of(batch)
            for index, micro_batch in enumerate(rows):
                self._fetched.append(batch.step if index == len(rows) - 1 else None)
                yield micro_batch

    def stepped(self) -> None:
        """The optimizer stepped, after a whole gradient accumulation: :func:`patch` has the trainer call it."""
        # what was fetched and belongs to the next accumulation stays unacknowledged
        for _ in range(self._per_optimizer_step):
            if (done := self._fetched.popleft()) is not None:
                self._balancer.acknowledge(done)


def patch() -> Callable[[], None]:
    """Have TRL's async trainer take a :class:`RolloutSource`'s micro-batches as they are, instead of planning again,
    and stop when the balancer has ended, be that before ``max_steps``. Other workers are planned as before. On every
    rank, before the trainer is built. Returns a function that undoes it."""
    from trl.experimental.async_grpo import async_grpo_trainer as home

    trainer = home.AsyncGRPOTrainer
    get_train_dataloader = trainer.get_train_dataloader

    def instead_of(original: Callable[..., Any]) -> Callable[..., Any]:
        def batcher(dataset: Any, num_processes: int, *args: Any, **options: Any) -> Any:
            if isinstance(dataset.queue, _NoQueue):
                return _planned(dataset.queue.source, num_processes)
            return original(dataset, num_processes, *args, **options)

        return batcher

    class Collator(home.DataCollatorForRollout):  # type: ignore[misc]
        def torch_call(self, examples: list[Any]) -> dict[str, Any]:
            batch: dict[str, Any] = super().torch_call(examples)
            # an example is a micro-batch of all ranks, and its loader's batch size one
            (rows,) = examples
            batch["global_n_tokens"] -= sum(getattr(row, "uncounted", 0) for row in rows)
            return batch

    class StepEnds(home.TrainerCallback):  # type: ignore[misc]
        def __init__(self, worker: Any) -> None:
            self._worker = worker

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if isinstance(self._worker, RolloutSource):
                self._worker.stepped()

        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = True  # an epoch is the whole stream: a second one would have no batch at all

    def with_steps(self: Any) -> Any:
        # training asks for the loader first, so the callback is there before any step
        self.add_callback(StepEnds(self.rollout_worker))
        return get_train_dataloader(self)

    undo = ExitStack()
    for owner, name, ours in (
        (home, "TokenBudgetBatcher", instead_of(home.TokenBudgetBatcher)),
        (home, "FixedCountBatcher", instead_of(home.FixedCountBatcher)),
        (home, "DataCollatorForRollout", Collator),
        (trainer, "get_train_dataloader", with_steps),
    ):
        undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, ours)
    return undo.close


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


def _rows_of(batch: sb.Batch) -> list[list[Any]]:
    """[micro_batch][rank] TRL's TreeRow, in which samples share their common prefixes."""
    from trl.experimental.async_grpo.packing import TreeRow

    class Row(TreeRow):  # type: ignore[misc]
        """A row that may train nothing: padding copies alone, or samples that are masked altogether. TRL's loss takes
        the maximum of its terms' numbers; so it gets one term of advantage 0, which the collator does not count."""

        uncounted = 0

        def pack(self) -> dict[str, torch.Tensor]:
            packed: dict[str, torch.Tensor] = super().pack()
            if packed["token_index"].numel() == 0:
                self.uncounted = 1
                packed |= {name: packed[name].new_zeros(1) for name in _OF_A_TERM}
            return packed

    rows = []
    for of_ranks in zip(*(share.micro_batches for share in batch.ranks), strict=True):
        rows.append([Row() for _ in of_ranks])
        for row, micro_batch in zip(rows[-1], of_ranks, strict=True):
            for rollout in _rows.with_prompt(micro_batch.rollouts):
                row.add(_sample(rollout))
    return rows


def _sample(rollout: sb.Rollout) -> dict[str, Any]:
    """A sample as TRL's queue yields it. Numpy, as TRL has it."""
    group = rollout.group_id or rollout.rollout_id
    tokens: dict[str, np.ndarray[Any, Any]] = {name: column.numpy() for name, column in rollout.tokens.items()}
    return {
        "input_ids": tokens["input_ids"],
        "completion_mask": tokens["loss_mask"],
        "old_log_probs": tokens["old_log_probs"],
        "advantage": float(rollout.scalars["advantage"]),
        # TRL numbers its groups; other producers may name theirs
        "group_id": int(group) if group.isdecimal() else group,
        "metrics": rollout.metadata.get("metrics", {}),
    }
