"""Options of the command line, and what a run prints about itself."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, get_args

from train import StepFigures

from stream_balancer.config import Policy

__all__ = ["Options", "Report", "parse"]


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    steps: int
    ranks: int
    policy: Policy
    batch_size: int
    group_size: int
    seed: int
    json: bool
    single_process: bool


def parse(arguments: list[str]) -> Options:
    """The command line."""
    parser = argparse.ArgumentParser(description="Asynchronous GRPO through stream_balancer, on two CPU cores.")
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps")
    parser.add_argument("--ranks", type=int, default=2, help="data-parallel ranks (torchrun's own number wins)")
    parser.add_argument("--policy", choices=get_args(Policy), default="window", help="round_robin = balancer off")
    parser.add_argument("--batch-size", type=int, default=32, help="rollouts per step, over all ranks")
    parser.add_argument("--group-size", type=int, default=16, help="siblings per prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of progress")
    parser.add_argument("--single-process", action="store_true", help="no torchrun: all ranks in turn, in one process")
    return Options(**vars(parser.parse_args(arguments)))


@dataclass
class Report:
    """Figures of a run, printed as it goes and at its end."""

    options: Options
    steps: list[StepFigures] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)
    start_s: float = field(default_factory=time.monotonic)

    def add(self, figures: StepFigures) -> None:
        """One more step."""
        self.steps.append(figures)
        every = max(self.options.steps // 40, 1)
        if not self.options.json and len(self.steps) % every == 0:
            s = self._summary(self.steps[-every:])
            bar = "#" * round(40 * s["reward"])
            print(
                f"step {len(self.steps):4}  reward {s['reward']:.3f} {bar:40}  tokens/rollout {s['mean_length']:5.1f}  "
                f"staleness {s['staleness']:.1f}  idle {s['idle']:5.1%}",
                flush=True,
            )

    def finish(self, trained_ids: list[str]) -> None:
        """Print what was measured. Raises RuntimeError unless every rollout was trained on exactly once, or evicted."""
        total = self.options.steps * self.options.batch_size
        summary = {
            "policy": self.options.policy,
            "ranks": self.options.ranks,
            "num_steps": len(self.steps),
            "num_trained": len(trained_ids),
            "num_evicted": len(self.evicted),
            "exactly_once": sorted(map(int, trained_ids + self.evicted)) == list(range(total)),
            "reward_start": fmean(s.reward for s in self.steps[:10]),
            "reward_end": fmean(s.reward for s in self.steps[-50:]),
            **self._summary(self.steps),
            "minutes": (time.monotonic() - self.start_s) / 60,
        }
        if self.options.json:
            print(json.dumps(summary | {"rewards": [round(s.reward, 4) for s in self.steps]}))
        else:
            line = (
                "{policy}, {ranks} ranks: reward {reward_start:.3f} -> {reward_end:.3f} in {num_steps} steps, "
                "{minutes:.1f} minutes; ranks idle {idle:.1%}; {num_trained} rollouts trained on, {num_evicted} evicted"
            )
            print(line.format_map(summary))
        if not summary["exactly_once"]:
            raise RuntimeError("some rollout was lost, or trained on more than once")

    def _summary(self, steps: list[StepFigures]) -> dict[str, Any]:
        rollouts = sum(s.num_rollouts for s in steps)
        return {
            "reward": fmean(s.reward for s in steps),
            "mean_length": sum(s.num_tokens for s in steps) / rollouts,
            "staleness": fmean(s.staleness for s in steps),
            "compute_s": sum(sum(s.compute_s) for s in steps),
            # as if every rank had a device of its own: they wait for the slowest of them in every step
            "idle": 1 - sum(fmean(s.compute_s) for s in steps) / sum(max(s.compute_s) for s in steps),
        }
