"""Steps of plans that a cost model makes, timed by another law: waves of tokens, tiles of attention, an overhead.

A user who sets no cost plans with the default. This program plans with some costs, and times every step by a law of
rank time that no cost model states. Its rows: the time of all steps relative to arrival order with the right cost, the
idle share by the law, and the idle share that the balancer reports.

    python bench/default_cost.py --traces DIR --seeds 3
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import anyio
import numpy as np
import torch
from _common import Rows, arguments
from peers import alone, finish_times, trace_folder, traces

import stream_balancer as sb
from stream_balancer.tools.length_models import LengthModel

FIRST_SEED = 20
RECORDED = ("lrm_token_economy_g5", "misguided_thinking_g3", "rl_traces_bench_anchors")
LONG_REASONING = LengthModel(
    mu=8.68, sigma_between=0.72, sigma_within=0.32, cap=30_000, cap_share=0.071, siblings=10, prompt_mu=4.5
)
"""Long reasoning of a small model, ten samples a prompt."""


@dataclass(frozen=True)
class Law:
    """Time of a micro-batch in the work of one token.

    Example: rollouts of 1,000 and 3,000 tokens take two waves of 2,048 tokens (4,096), 683 for tiles of 128 tokens
    (1.6 / 24,576 * (1,024**2 + 3,072**2)), and an overhead of 1,500: 6,279.
    """

    attention: float
    overhead: float
    wave: int = 2048
    tile: int = 128

    def __call__(self, lengths: list[int]) -> float:
        linear = math.ceil(sum(lengths) / self.wave) * self.wave
        pairs = sum((math.ceil(length / self.tile) * self.tile) ** 2 for length in lengths)
        return linear + self.attention * pairs + self.overhead

    @property
    def cost(self) -> sb.cost.CostModel:
        """The nearest cost model."""
        return sb.cost.QuadraticCost(1.0, self.attention)


LAWS = {"1.5B": Law(1.6 / 8000, 3000.0), "7B": Law(1.6 / 24576, 1500.0), "70B": Law(1.6 / 49152, 500.0)}


@dataclass
class Timed:
    """A run: time of all its steps and of their mean ranks, and the idle share that the balancer reports."""

    slowest: float = 0.0
    mean: float = 0.0
    reported: float = 0.0

    @property
    def idle(self) -> float:
        return 1.0 - self.mean / self.slowest


async def timed(lengths: list[int], config: sb.BalancerConfig, law: Law) -> Timed:
    ids, run = torch.zeros(max(lengths), dtype=torch.int64), Timed()
    async with sb.StreamBalancer(config) as balancer:
        batches, waiting = balancer.batches(), 0
        for number, length in enumerate(lengths):
            balancer.put_nowait(sb.Rollout(tokens={"input_ids": ids[:length]}, rollout_id=str(number)))
            waiting += 1
            if waiting < config.window:
                continue
            batch = await anext(batches)
            waiting -= batch.num_rollouts
            times = [sum(law(list(one.lengths)) for one in rank.micro_batches) for rank in batch.ranks]
            run.slowest += max(times)
            run.mean += sum(times) / len(times)
        run.reported = balancer.statistics().idle_fraction or 0.0
    return run


def streams(folder: str | None, count: int, seed: int) -> Iterator[tuple[str, list[int]]]:
    """Lengths by name, in the order in which the rollouts finish."""
    recorded = [one for one in traces(trace_folder(folder)) if one.name.partition(".")[0] in RECORDED]
    drawn = [alone(one).resampled(count, seed) for one in recorded]
    drawn.append(sb.generate_trace(count, LONG_REASONING, seed=seed))
    for trace, name in zip(drawn, [*(one.name for one in recorded), "long reasoning, generated"], strict=True):
        order = np.argsort(finish_times(trace, 256, seed=seed), kind="stable")
        yield name, trace.lengths[order].tolist()


def main() -> None:
    options = arguments(__doc__, traces=None, seeds=3, rollouts=4_800, size="32/8")
    batch_size, dp_size = map(int, options.size.split("/"))

    def config(**knobs: Any) -> sb.BalancerConfig:
        return sb.BalancerConfig(dp_size=dp_size, batch_size=batch_size, **knobs)

    rows = Rows(options.json, options.results)
    found: dict[tuple[str, str, str], list[Timed]] = {}
    for seed in range(FIRST_SEED, FIRST_SEED + options.seeds):
        for name, lengths in streams(options.traces, options.rollouts, seed):
            for model, law in LAWS.items():
                knobs: dict[str, sb.BalancerConfig] = {
                    "arrival order, the right cost": config(policy="fifo", cost=law.cost),
                    'window, cost="tokens"': config(cost="tokens"),
                    "window, no cost given": config(),
                    "window, the right cost": config(cost=law.cost),
                }
                for how, one in knobs.items():
                    found.setdefault((name, model, how), []).append(anyio.run(timed, lengths, one, law))
    for (name, model, how), runs in found.items():
        arrival = found[name, model, "arrival order, the right cost"]
        rows.add(
            f"{options.size}, {name}, {model}: {how}",
            sum(run.slowest for run in runs) / sum(run.slowest for run in arrival),
            "x",
            idle=f"{100 * sum(run.idle for run in runs) / len(runs):.1f}",
            reported=f"{100 * sum(run.reported for run in runs) / len(runs):.1f}",
        )


if __name__ == "__main__":
    main()
