"""``torchrun --nproc-per-node 2 trl_async_rank.py FOLDER``: AsyncGRPOTrainer with and without the balancer on the same
samples; the stream ends long before ``max_steps``, with a step that has one rollout for two ranks. Rank 0 writes what
it found as JSON."""

from __future__ import annotations

import os
import queue
import sys
from pathlib import Path
from typing import Any

import numpy as np
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl_tiny import COMMON, WORDS, Gradients, VarlenOnCPU, apart, prompts, recipe, saved_model, tokenizer
from two_ranks import leave

import stream_balancer as sb

PER_STEP = 8
packing._flash_attn = lambda: VarlenOnCPU
async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # asks for a GPU's name


class NoSync:
    """No inference server."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class Queued:
    """A worker that has generated everything already."""

    def __init__(self, samples: list[RolloutSample]) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        for sample in samples:
            self.rollout_buffer.put(sample)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def samples() -> list[RolloutSample]:
    """Two steps, and one sample more."""
    rng = np.random.default_rng(0)
    return [sample(rng, number) for number in range(2 * PER_STEP + 1)]


def sample(rng: np.random.Generator, number: int) -> RolloutSample:
    prompt, completion = int(rng.integers(2, 8)), int(rng.integers(4, 60))
    return RolloutSample(
        prompt=[],
        completion=[],
        input_ids=rng.integers(2, WORDS, prompt + completion),
        completion_mask=np.array([0] * prompt + [1] * completion),
        old_log_probs=rng.uniform(-6, -2, prompt + completion).astype(np.float32),
        advantage=float(rng.normal()),
        model_version=0,
        group_id=number,
        metrics={"reward": float(number)},
    )


def arguments(folder: Path, *, max_steps: int) -> AsyncGRPOConfig:
    return AsyncGRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=PER_STEP // 2,
        gradient_accumulation_steps=1,
        max_steps=max_steps,
        token_budget=0,
        max_staleness=100,
        **COMMON,
    )


def trls_own(model: str, folder: Path, of_three_steps: list[RolloutSample]) -> Gradients:
    gradients = Gradients()
    AsyncGRPOTrainer(
        model,
        args=arguments(folder, max_steps=3),
        train_dataset=prompts(),
        processing_class=tokenizer(),
        callbacks=[gradients],
        rollout_worker=Queued(of_three_steps),
        weight_transfer=NoSync(),
    ).train()
    return gradients


def main(folder: Path) -> None:
    model = saved_model(folder / f"model{os.environ['RANK']}")
    everything = samples()
    alone = everything[-1:] * PER_STEP  # TRL cannot train on less: the mean over copies is that of the one
    ahead = everything[:PER_STEP]  # accelerate fetches one more than is trained
    theirs = trls_own(model, folder, everything[:-1] + alone + ahead)

    gradients, args = Gradients(), arguments(folder, max_steps=10)
    acknowledged: list[int] = []

    def start_workers(put: Any, end: Any) -> None:
        put(everything)
        end()

    class Watched(sb.blocking):  # type: ignore[misc,valid-type]
        def acknowledge(self, step: int) -> None:
            acknowledged.append(step)
            super().acknowledge(step)

    here = {"start_workers": start_workers, "dataset": prompts(), "args": args, "blocking": Watched, "given": {}}
    here["given"] = {"callbacks": [gradients], "processing_class": tokenizer(), "weight_transfer": NoSync()}
    code = recipe(
        1,
        {
            'args = AsyncGRPOConfig(output_dir="out", max_steps=1000, token_budget=0)\n': "",
            'batch_size=256, sync="micro_batch", micro_batches=cut': "batch_size=8, window=8, "
            'capacity=64, policy="fifo"',
            "sb.blocking(": "blocking(",
            '"Qwen/Qwen3-0.6B"': repr(model),
            "rollout_worker=source": "rollout_worker=source, **given",
        },
    )
    exec(code, here)
    ours, trainer = gradients, here["trainer"]
    found = {"steps": trainer.state.global_step, "acknowledged": acknowledged}
    leave(folder, found | {"gradients_apart": apart(ours.steps, theirs.steps)})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
