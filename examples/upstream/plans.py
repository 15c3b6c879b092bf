"""Idle time under a project's own planner, imported from a checkout: ``python plans.py NAME LENGTHS``, a JSON list.

20 steps of 128 recorded rollouts on 8 ranks, cap: the longest. A rollout of n tokens is n² + 24,576 n work, a 7B
model's; ranks of verl, slime and miles, OpenRLHF and AReaL meet once a step, the others' at every micro-batch.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import stand_ins  # noqa: F401 - first: it hides what is absent

RANKS, ROLLOUTS, STEPS = 8, 128, 20

Meetings = list[list[list[int]]]
"""[meeting][rank] -> the lengths that a rank works on until all meet."""


def work(length: int) -> int:
    return length * length + 24_576 * length


def verl(lengths: list[int], cap: int) -> Meetings:
    balancing = importlib.import_module("verl.utils.seqlen_balancing")
    parts = balancing.get_seqlen_balanced_partitions([work(n) for n in lengths], RANKS, equal_size=True)
    return [[[lengths[i] for i in part] for part in parts]]


def openrlhf(lengths: list[int], cap: int) -> Meetings:
    balancing = importlib.import_module("openrlhf.utils.seqlen_balancing")
    parts = balancing.get_seqlen_balanced_partitions(lengths, RANKS, equal_size=False)
    return [[[lengths[i] for i in part] for part in parts]]


def areal(lengths: list[int], cap: int) -> Meetings:
    seqpack = importlib.import_module("areal.utils.seqpack")
    name = "balanced" if "balanced" in seqpack.PACKING_ALGORITHMS else "ffd"
    parts = seqpack.get_allocate_fn(name)(lengths, 10**9, RANKS)
    return [[[lengths[i] for i in part] for part in parts]]


def schedule(package: str) -> Callable[[list[int], int], Meetings]:
    def plan(lengths: list[int], cap: int) -> Meetings:
        module: Any = importlib.import_module(f"{package}.utils.dp_schedule")
        # the work of lengths, in place of the FLOPs of a model that its arguments describe
        module.calculate_fwd_flops = lambda found, _: sum(map(work, found))
        args = SimpleNamespace(
            use_dynamic_batch_size=True, max_tokens_per_gpu=cap, balance_data=True, balance_by_flops=False
        )
        parallel = {"dp_size": RANKS, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
        partitions, _, _, _ = module.build_dp_schedule(
            args, parallel, lengths, global_batch_size=len(lengths), rollout_indices=list(range(len(lengths)))
        )
        return [[[lengths[i] for i in part] for part in partitions]]

    return plan


def trl(lengths: list[int], cap: int) -> Meetings:
    batchers = importlib.import_module("trl.experimental.async_grpo.async_grpo_trainer")
    found = batchers.TokenBudgetBatcher([{"input_ids": range(n)} for n in lengths], RANKS, cap)
    return [[[len(one["input_ids"]) for one in row] for row in rows] for rows in found]


def torchtitan(lengths: list[int], cap: int) -> Meetings:
    module = importlib.import_module("torchtitan.experiments.rl.components.batcher")

    class Batcher(module.Batcher):  # type: ignore[misc, name-defined]
        def _pack_training_sample_row(self, training_samples: list[Any]) -> list[int]:
            return [len(one.token_ids) - 1 for one in training_samples]

        @staticmethod
        def collate(rows: list[list[int]]) -> list[int]:
            return [length for row in rows for length in row]

    config = SimpleNamespace(batch=SimpleNamespace(local_batch_size=1, seq_len=cap), per_sample_pad_multiple=None)
    batcher = Batcher(config, num_prompts_per_train_step=1, dp_degree=RANKS, pad_id=0)
    rows = batcher._assign_training_samples_to_rows([SimpleNamespace(token_ids=range(n + 1)) for n in lengths])
    grid: Meetings = batcher._build_microbatch_grid([batcher._pack_training_sample_row(row) for row in rows])
    return grid


PLANS: dict[str, Callable[[list[int], int], Meetings]] = {
    "verl": verl,
    "torchtitan": torchtitan,
    "trl": trl,
    "slime": schedule("slime"),
    "miles": schedule("miles"),
    "OpenRLHF": openrlhf,
    "AReaL": areal,
}


def steps_of(name: str, lengths: list[int]) -> Iterator[Meetings]:
    # TRL's batcher knows no steps
    size = len(lengths) if name == "trl" else ROLLOUTS
    for first in range(0, len(lengths), size):
        yield PLANS[name](lengths[first : first + size], max(lengths))


def main(name: str, file: Path) -> None:
    lengths = random.Random(0).choices(json.loads(file.read_text()), k=STEPS * ROLLOUTS)
    busy = finish = 0
    planned: list[int] = []
    for meetings in steps_of(name, lengths):
        for of_ranks in meetings:
            planned += [length for share in of_ranks for length in share]
            times = [sum(map(work, share)) for share in of_ranks]
            busy += sum(times)
            finish += RANKS * max(times)
    # the same samples, each once: so the sum of their gradients is the same
    lost, twice = Counter(lengths) - Counter(planned), Counter(planned) - Counter(lengths)
    # TRL's stream has no end: what fills no micro-batch of all ranks waits for more
    if twice or (lost and name != "trl"):
        sys.exit(f"of {len(lengths)} samples {lost.total()} are lost, and {twice.total()} are there twice")
    sys.stdout.write(f"{100 * (1 - busy / finish):.2f} %\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
