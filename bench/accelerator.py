"""What one accelerator can measure, in minutes: training at real sizes, and copies beside the step.

``make bench-gpu``, or ``python bench/accelerator.py [--json] [--device cuda] [--max-length 16384] [--steps 12]``.

1. Every rank's share of every step, in bfloat16 with variable-length attention, one rank after the other, under
   round-robin, verl's partition (where it is installed), first in first out and the window: idle time, step time, and
   how well FLOPs predict seconds. What ranks would do to each other (collectives, memory traffic) is not in it.
2. The calibrated cost model on the same stream: prediction error, and the step over the ideal one.
3. A feed to the accelerator: how much longer a training step takes while the next batch is copied, and how long the
   trainer waits for a batch that has already arrived.

``--device cpu`` runs it all at toy sizes: a check of the benchmark, not a measurement.
"""

from __future__ import annotations

import argparse
import statistics
import time

import anyio
import torch
from _common import Rows, arguments, keep_putting, peer
from stream_balancer_demo.model import Decoder, build_model, training_cost
from torch import Tensor
from training import MODELS, Setting, Trainer, calibration, compare, stream

import stream_balancer as sb
from stream_balancer import RankFeed, Rollout

BAR_BESIDE = 1.05
"""Of a step beside a copy over a step alone."""


class VarlenDecoder(Decoder):
    """The same decoder; all rollouts of a micro-batch in one variable-length attention kernel."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn  # asks for a build of torch with flash attention

        x = self.embedding(input_ids)
        rotation, bounds = self.rotation(position_ids, x), cu_seqlens.to(torch.int32)
        longest = int(bounds.diff().max())
        for block in self.layers():
            q, k, v = (one.contiguous() for one in block.project(x, rotation))
            attended = varlen_attn(q, k, v, bounds, bounds, longest, longest, window_size=(-1, 0))  # causal
            assert isinstance(attended, Tensor)
            x = block.finish(x, attended)
        logits: Tensor = self.head(self.norm(x))
        return logits


def trainer_of(options: argparse.Namespace) -> Trainer:
    """bfloat16 and variable-length attention where the device has them."""
    device = torch.device(options.device)
    if device.type == "cpu":
        return Trainer.of(options)
    model = build_model(MODELS[options.model], torch.bfloat16)
    if device.type == "cuda":
        model.__class__ = VarlenDecoder
    return Trainer(model, device)


# --- copies beside the step ------------------------------------------------------------------------------------------


def controller(num_tokens: int, steps: int) -> None:
    """Serves batches of one size, from a process of its own."""

    async def main() -> None:
        config = sb.BalancerConfig(dp_size=1, batch_size=4, window=4, capacity=8)
        async with (
            sb.TorchTransport.listen(dp_size=1) as transport,
            sb.StreamBalancer(config) as balancer,
            anyio.create_task_group() as tasks,
        ):
            print(transport.address, flush=True)
            tasks.start_soon(keep_putting, balancer, num_tokens, 4 * steps)
            await sb.serve(balancer, transport)

    torch.set_num_threads(1)
    anyio.run(main)


def copies(rows: Rows, trainer: Trainer, micro_batch: list[Rollout], megabytes: float, steps: int) -> None:
    """The same work for every step, with and without the next batch on its way to the device."""
    num_tokens = int(megabytes * 1e6 / 4 / 8)  # four rollouts of the rank, 8 bytes a token
    alone = [trainer.seconds(micro_batch) for _ in range(steps)]
    beside, waited = [], []
    with peer(num_tokens, steps + 1) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        feed = RankFeed(address, rank=0, dp_size=1, device=trainer.device)
        next(feed)
        for _ in range(steps):
            beside.append(trainer.seconds(micro_batch))  # the next batch is copied meanwhile
            began = time.perf_counter()
            next(feed)
            waited.append(time.perf_counter() - began)
        for _ in feed:
            pass
    quiet, copied = statistics.median(alone), statistics.median(beside)
    rows.add("a step beside a copy, over a step alone", copied / quiet, "ratio", BAR_BESIDE, quiet_ms=1e3 * quiet)
    rows.add("the trainer waits for a batch that was copied beside the step", 1e3 * statistics.median(waited), "ms")


TOY = {"model": "toy", "ranks": 2, "batch": 8, "max_length": 96, "cap": 96, "steps": 2, "megabytes": 1.0}


def main() -> None:
    options = arguments(
        __doc__,
        steps=12,
        ranks=8,
        batch=64,
        max_length=16384,
        cap=16384,
        trace=None,
        device=None,
        model="0.5b",
        calibration_steps=40,
        megabytes=64.0,
        seed=0,
    )
    if options.as_peer:
        controller(*options.as_peer)
        return
    if options.device is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if found is None:
            raise SystemExit("torch sees no accelerator; --device cpu checks at toy sizes that the benchmark runs")
        options.device = str(found)
    if options.device == "cpu":
        torch.set_num_threads(1)
        vars(options).update(TOY)
    rows = Rows(options.json, options.results)
    trainer, rollouts = trainer_of(options), stream(options)
    setting = Setting(options.ranks, options.batch, options.cap, training_cost(MODELS[options.model]))
    compare(rows, trainer, rollouts, setting, options.steps)
    if options.calibration_steps:
        calibration(rows, trainer, options, setting)
    share = rollouts[: max(1, options.batch // options.ranks)]
    copies(rows, trainer, share, options.megabytes, 4 * options.steps)
    if trainer.device.type == "cuda":
        rows.add("most memory on the device", torch.cuda.max_memory_allocated() / 2**30, "GiB")
        print(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
