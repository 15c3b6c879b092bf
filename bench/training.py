"""DP-rank training time before and after: real forward and backward passes of every rank batch, timed one by one.

``python bench/training.py [--json] [--steps 40] [--repeats 1] [--device cuda] [--model 0.5b]``. Every policy trains the
same rollouts, in the same order of arrival. The rank batches run one after another in this process, undisturbed. The
slowest rank sets the time of a step. Where ranks meet at every micro-batch, the slowest micro-batches add up. On a CPU
seconds are CPU seconds, the least of ``--repeats`` runs. Rows of verl need the peers' environment
(``make bench-peers``).

Then ``CalibratedCost``, started from the right FLOPs and from TokenCost, which knows nothing of attention. "ideal" is
all ranks' work divided by their number.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from _common import Rows, arguments
from micro_batches import verl_layout
from numpy.typing import NDArray
from peers import Floats, finish_times, part, peers
from stream_balancer_demo.model import Decoder, build_model, loss_sum, training_cost
from stream_balancer_demo.options import DemoOptions

from stream_balancer import BalancerConfig, MicroBatches, Rollout, StreamBalancer
from stream_balancer.core.in_flight import StepTiming
from stream_balancer.cost import CalibratedCost, CostModel, LayerSumCost, TokenCost
from stream_balancer.planning.arrays import Sync
from stream_balancer.rollouts import MicroBatch
from stream_balancer.tools.length_models import generate_trace
from stream_balancer.tools.trace import load_trace

Layout = list[list[list[Rollout]]]
"""``[rank][micro_batch]`` -> rollouts."""
MODELS = {
    "toy": DemoOptions(hidden_size=16, num_layers=1, num_heads=2, vocab_size=32),
    "small": DemoOptions(),
    "0.5b": DemoOptions(hidden_size=1280, num_layers=24, num_heads=20, vocab_size=32000),
}
Layouts = Generator[Layout, Floats, None]
"""Layouts out, every rank's seconds for the last one in."""
SLOTS = 64  # rollouts that are generated at the same time


@dataclass(frozen=True)
class Setting:
    """Common to all policies."""

    ranks: int
    batch: int
    cap: int
    cost: CostModel


def stream(options: argparse.Namespace) -> list[Rollout]:
    """Rollouts in the order in which they finish."""
    count = (options.steps + 5) * options.batch
    trace = load_trace(options.trace) if options.trace else generate_trace(count, "lrm", seed=options.seed)
    trace = trace.resampled(count, options.seed) if len(trace) < count else part(trace, slice(count))
    trace = trace.scaled(options.max_length / int(trace.lengths.max()))
    lengths = trace.lengths
    order = np.argsort(finish_times(trace, SLOTS, seed=options.seed), kind="stable")
    random = torch.Generator().manual_seed(options.seed)
    vocab = MODELS[options.model].vocab_size
    return [
        Rollout(
            tokens={"input_ids": torch.randint(0, vocab, (int(lengths[row]),), generator=random)},
            rollout_id=f"r{row}",
        )
        for row in order
    ]


# --- policies: rollouts in order of arrival -> layouts ---------------------------------------------------------------


def ours(
    rollouts: Sequence[Rollout],
    setting: Setting,
    errors: list[float] | None = None,
    sync: Sync = "step",
    **knobs: object,
) -> Layouts:
    """Through the balancer itself. ``errors``: the prediction error after every step, if the cost model learns."""
    config = BalancerConfig(
        dp_size=setting.ranks,
        batch_size=setting.batch,
        micro_batches=MicroBatches(max_tokens=setting.cap),
        sync=sync,
        cost=setting.cost,
        **knobs,  # type: ignore[arg-type]
    )
    balancer = StreamBalancer(config)
    arriving = iter(rollouts)
    core = balancer.parts.core
    while True:
        batch = core.poll(0.0)
        if batch is None:
            rollout = next(arriving, None)
            if rollout is None:
                return
            core.add(rollout, 0.0)
            continue
        seconds = yield [[list(mb.rollouts) for mb in share.micro_batches] for share in batch.ranks]
        for rank, one in enumerate(seconds.tolist()):
            core.record_step(StepTiming(batch.step, rank, one), 0.0)
        core.acknowledge(batch.step)
        fit = core.statistics(0.0).cost_fit
        if errors is not None and fit is not None and fit.prediction_error is not None:
            errors.append(fit.prediction_error)


def verl(rollouts: Sequence[Rollout], setting: Setting) -> Layouts | None:
    """Rank batches and micro-batches of verl's functions and workload model, for each batch in arrival order."""
    kk = peers().get("verl (list)")
    if kk is None:
        return None

    def layouts() -> Layouts:
        for first in range(0, len(rollouts) - setting.batch + 1, setting.batch):
            batch = rollouts[first : first + setting.batch]
            lengths = np.array([r.num_tokens for r in batch], dtype=np.int64)
            costs: Floats = np.asarray(setting.cost(lengths), dtype=np.float64)
            layout, _ = verl_layout(kk, lengths, costs, setting.ranks, setting.cap)
            yield [[[batch[i] for i in one] for one in share] for share in layout]

    return layouts()


# --- timing ----------------------------------------------------------------------------------------------------------


class Trainer:
    """Runs micro-batches and says how long they took."""

    def __init__(self, model: Decoder, device: torch.device) -> None:
        self.model = model.to(device)
        self.device = device
        self.repeats = 1
        self.on_cpu = device.type == "cpu"

    @classmethod
    def of(cls, options: argparse.Namespace) -> Trainer:
        """A trainer by the command line: float32 on a CPU, bfloat16 elsewhere."""
        device = torch.device(options.device)
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        return cls(build_model(MODELS[options.model], dtype), device)

    def least_seconds(self, rollouts: Sequence[Rollout]) -> float:
        """The least of ``repeats`` times: other processes on the machine lengthen some of the runs."""
        return min(self.seconds(rollouts) for _ in range(self.repeats))

    def seconds(self, rollouts: Sequence[Rollout]) -> float:
        """Forward and backward of one micro-batch."""
        if not self.on_cpu:
            rollouts = [Rollout(tokens={k: v.to(self.device) for k, v in r.tokens.items()}) for r in rollouts]
            torch.accelerator.synchronize()
        clock: Callable[[], float] = time.thread_time if self.on_cpu else time.perf_counter
        began = clock()
        (loss_sum(self.model, MicroBatch.of(rollouts)) / 1e4).backward()  # type: ignore[no-untyped-call]
        if not self.on_cpu:
            torch.accelerator.synchronize()
        took = clock() - began
        self.model.zero_grad(set_to_none=False)
        return took


@dataclass
class Measured:
    """One policy: ``seconds[step][rank][micro_batch]``, tokens and costs."""

    seconds: list[NDArray[np.float64]]
    tokens: int
    costs: list[NDArray[np.float64]]

    def idle(self, *, micro: bool = False) -> float:
        """Percent of the ranks' time spent waiting for the slowest."""
        busy = sum(float(step.sum()) / len(step) for step in self.seconds)
        return 100.0 * (1.0 - busy / self.step_s(micro=micro))

    def step_s(self, *, micro: bool = False) -> float:
        """All steps together."""
        if micro:
            return sum(float(step.max(axis=0).sum()) for step in self.seconds)
        return sum(float(step.sum(axis=1).max()) for step in self.seconds)

    def variance(self) -> float:
        """Variance of the ranks' seconds within a step, mean over steps."""
        return float(np.mean([step.sum(axis=1).var() for step in self.seconds]))

    def prediction_error(self) -> float:
        """Mean absolute relative error of the cost model's prediction of a rank's seconds, best scale."""
        seconds = np.concatenate([step.sum(axis=1) for step in self.seconds])
        costs = np.concatenate(self.costs)
        scale = float(np.median(seconds / costs))
        return 100.0 * float(np.mean(np.abs(scale * costs - seconds) / seconds))


def measure(trainer: Trainer, layouts: Layouts, setting: Setting, steps: int) -> Measured:
    measured = Measured([], 0, [])
    layout = next(layouts)
    for step in range(steps):
        if step:
            layout = layouts.send(measured.seconds[-1].sum(axis=1))
        times = np.array([[trainer.least_seconds(one) for one in share] for share in layout])
        measured.seconds.append(times)
        measured.tokens += sum(r.num_tokens for share in layout for one in share for r in one)
        lengths = [np.array([r.num_tokens for one in share for r in one], dtype=np.int64) for share in layout]
        measured.costs.append(np.array([float(np.sum(setting.cost(one))) for one in lengths]))
    return measured


def main() -> None:
    options = arguments(
        __doc__,
        steps=40,
        repeats=1,
        ranks=8,
        batch=32,
        max_length=1536,
        cap=1536,
        trace=None,
        device="cpu",
        model="small",
        calibration_steps=60,
        seed=0,
    )
    torch.set_num_threads(1)
    rows = Rows(options.json, options.results)
    setting = Setting(options.ranks, options.batch, options.cap, training_cost(MODELS[options.model]))
    trainer = Trainer.of(options)
    trainer.repeats = options.repeats
    compare(rows, trainer, stream(options), setting, options.steps)
    if options.calibration_steps:
        calibration(rows, trainer, options, setting)


def compare(rows: Rows, trainer: Trainer, rollouts: Sequence[Rollout], setting: Setting, steps: int) -> None:
    """The same rollouts under every policy."""
    for _ in range(3):
        trainer.seconds(rollouts[:8])
    batch = setting.batch
    policies: dict[str, Layouts | None] = {
        "round-robin": ours(rollouts, setting, policy="round_robin"),
        "verl KK": verl(rollouts, setting),
        "arrival order, best partition": ours(rollouts, setting, policy="fifo"),
        "window 2x": ours(rollouts, setting, window=2 * batch),
        "window 4x": ours(rollouts, setting, window=4 * batch),
        "window 2x, sync=micro_batch": ours(rollouts, setting, window=2 * batch, sync="micro_batch"),
    }
    done: dict[str, Measured] = {}
    for name, layouts in policies.items():
        if layouts is None:
            continue
        one = done[name] = measure(trainer, layouts, setting, steps)
        step_s = one.step_s() / len(one.seconds)
        rows.add(f"{name}: step", 1e3 * step_s, "ms")
        rows.add(f"{name}: idle, meeting once per step", one.idle(), "%")
        rows.add(f"{name}: variance over ranks of a rank's time", 1e6 * one.variance(), "ms2")
        rows.add(f"{name}: throughput", one.tokens / one.step_s() / 1e3, "ktok/s")
        rows.add(f"{name}: micro-batches a rank", float(np.mean([s.shape[1] for s in one.seconds])), "")
        rows.add(f"{name}: idle, meeting at every micro-batch", one.idle(micro=True), "%")
        rows.add(f"{name}: prediction error of the FLOPs model", one.prediction_error(), "%")
    rows.add("idle, window 2x over round-robin", done["window 2x"].idle() / done["round-robin"].idle(), "ratio", 1 / 3)
    if "verl KK" in done:
        rows.add("idle, window 2x over verl KK", done["window 2x"].idle() / done["verl KK"].idle(), "ratio", 1.0)


LEARNED = 30
"""Steps after which a calibrated cost is looked at."""


def calibration(rows: Rows, trainer: Trainer, options: argparse.Namespace, setting: Setting) -> None:
    """The same stream under a cost model that learns."""
    steps = max(options.calibration_steps, LEARNED + 5)
    rollouts = stream(argparse.Namespace(**{**vars(options), "steps": steps + 5}))
    assert isinstance(setting.cost, LayerSumCost)
    models: dict[str, CostModel] = {
        "FLOPs": setting.cost,
        "calibrated from FLOPs": CalibratedCost(setting.cost),
        "calibrated from tokens": CalibratedCost(TokenCost()),
    }
    for name, cost in models.items():
        errors: list[float] = []
        layouts = ours(rollouts, replace(setting, cost=cost), errors, window=2 * options.batch)
        late = measure(trainer, layouts, setting, steps).seconds[LEARNED:]
        ideal = sum(float(step.sum(axis=1).mean()) for step in late)
        took = sum(float(step.sum(axis=1).max()) for step in late)
        rows.add(f"all ranks alike, {name}: step over ideal, from step {LEARNED}", took / ideal, "ratio")
        if errors:
            error = 100 * float(np.mean(errors[LEARNED:]))
            rows.add(f"all ranks alike, {name}: prediction error, from step {LEARNED}", error, "%", 10.0)


if __name__ == "__main__":
    main()
