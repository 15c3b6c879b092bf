"""The models behind shared rollouts and shared prefixes, against real training: predicted and measured step times.

python bench/beyond_models.py [--json] [--steps 24] [--only ranks|prefixes] [--cpu]

Ranks: two processes of one thread each, and ring attention between them. The cost model learns from steps of whole
rollouts (CalibratedCost), the overhead of sharing from a few steps with shared ones. Then every further step is
predicted before it runs, as the planner does it: the load of the slower rank, overhead counted. Ranks run their
micro-batches in the order they have, and meet once a step.

Prefixes: this process trains the ranks' parts one after another, and computes a prompt once for all its siblings there.
The cost model learns from steps that compute a prompt as often as it comes.

The same steps run without sharing, too: the error there is that of the cost model alone. On a machine that does
nothing else, with a core for each of the two ranks; where others work, --cpu counts each rank's own CPU seconds, and
so leaves out what they wait for one another.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from _common import Rows, arguments, peer
from stream_balancer_demo.model import training_cost
from stream_balancer_demo.options import DemoOptions
from tree_attention import tree_loss_sum

import stream_balancer as sb
from stream_balancer.core.step_times import StepTiming
from stream_balancer.cost import CalibratedCost, QuadraticCost

sys.path.append(str(Path(__file__).parents[1] / "examples" / "context_parallel"))
from ring_model import Decoder, aligned_groups, loss_sum, ring_of

MODEL = DemoOptions(hidden_size=192, num_layers=3, num_heads=3, vocab_size=512)
LEARNING_STEPS, OVERHEAD_STEPS = 20, 24
BAR = 10.0  # percent

Seconds = list[list[float]]
"""``[rank][micro_batch]``."""
Train = Callable[[sb.Batch], Seconds]
"""Forward and backward of every rank's part of a step."""


def model() -> Decoder:
    torch.manual_seed(0)
    return Decoder(
        vocab_size=MODEL.vocab_size,
        hidden_size=MODEL.hidden_size,
        num_layers=MODEL.num_layers,
        num_heads=MODEL.num_heads,
    )


# --- steps, and what they should take --------------------------------------------------------------------------------


class Learned(NamedTuple):
    """From the seconds of whole rollouts."""

    cost: QuadraticCost
    """In seconds."""
    micro_batch_s: float
    step_s: float

    def step_of(self, batch: sb.Batch, seconds: Seconds) -> Step:
        """The plan's load, and what the planner does not know of: what a micro-batch and a step cost in any case."""
        fixed = (len(one.micro_batches) * self.micro_batch_s + self.step_s for one in batch.ranks)
        predicted = max(one.load + more for one, more in zip(batch.ranks, fixed, strict=True))
        micro_batches = [one for share in batch.ranks for one in share.micro_batches]
        shares = any(one.cp_group or one.tree().num_tokens < one.num_tokens for one in micro_batches)
        return Step(predicted, max(map(sum, seconds)), shares)


class Step(NamedTuple):
    """How long it should have taken, and did."""

    predicted_s: float
    measured_s: float
    shares: bool
    """Whether something is shared in it."""


class Run:
    """Rollouts in the order in which they come, through the balancer itself. Planning is deterministic: processes that
    see the same seconds make the same steps."""

    def __init__(self, train: Train, **knobs: Any) -> None:
        self.balancer = sb.StreamBalancer(sb.BalancerConfig(policy="fifo", **knobs))
        self.train = train

    def of(self, rollouts: Sequence[sb.Rollout]) -> Iterator[tuple[sb.Batch, Seconds]]:
        core = self.balancer.parts.core
        for rollout in rollouts:
            core.add(rollout, 0.0)
            while (batch := core.poll(0.0)) is not None:
                seconds = self.train(batch)
                for rank, one in enumerate(seconds):
                    core.record_step(StepTiming(batch.step, rank, sum(one)), 0.0)
                core.acknowledge(batch.step)
                yield batch, seconds

    def learned(self) -> Learned:
        fit = self.balancer.parts.core.statistics(0.0).cost_fit
        assert fit is not None
        cost = QuadraticCost(linear=fit.seconds_per_token, quadratic=fit.seconds_per_token_pair)
        return Learned(cost, fit.seconds_per_micro_batch, fit.seconds_per_step)


def learn(train: Train, rollouts: Sequence[sb.Rollout], **knobs: Any) -> Learned:
    """Begins with the model's FLOPs; a causal kernel does half of the pairs."""
    flops = training_cost(MODEL)
    prior = QuadraticCost(linear=flops.flops_per_token, quadratic=flops.flops_per_token_pair / 2)
    run = Run(train, cost=CalibratedCost(prior), **knobs)
    for _ in run.of(rollouts):
        pass
    return run.learned()


def add_rows(rows: Rows, name: str, whole: Sequence[Step], shared: Sequence[Step]) -> None:
    """Of the same rollouts, without sharing and with it."""
    sharing = [one for one in shared if one.shares]
    if not sharing:
        sys.exit(f"{name}: in no step something is shared, so nothing is learned of it; --steps was too few")
    for how, made, bar in (("whole", whole, None), ("shared", sharing, BAR)):
        errors = [100 * abs(one.predicted_s / one.measured_s - 1) for one in made]
        rows.add(
            f"{name}, {how}: error of a step's predicted time",
            float(np.mean(errors)),
            "%",
            bar,
            worst=f"{max(errors):.1f}",
            of=len(made),
        )
    for how, which in (("predicted", 0), ("measured", 1)):
        ratio = sum(one[which] for one in shared) / sum(one[which] for one in whole)
        rows.add(f"{name}: time of all steps, shared over whole, {how}", ratio, "ratio")


# --- ranks that share a rollout: a process for each ------------------------------------------------------------------

RANKS, BATCH_SIZE = 2, 4
GANG = {
    "dp_size": RANKS,
    "batch_size": BATCH_SIZE,
    # numbers of micro-batches differ, so what one costs is learned
    "micro_batches": {"max_tokens": 4096, "counts": "free"},
}
SHARING = {
    "context_parallel": {"sizes": (1, 2), "min_tokens": 1024}
}  # a ring takes some 40 ms more, however short its parts


def long_tailed(count: int) -> list[sb.Rollout]:
    """Lognormal lengths of 96 to 4,096 tokens: nearly every second batch has one that is longer than a fair share."""
    random = np.random.default_rng(0)
    lengths = random.lognormal(np.log(300), 1.4, count).clip(96, 4096).astype(int)
    ids = (random.integers(0, MODEL.vocab_size, length) for length in lengths)
    return [sb.Rollout(tokens={"input_ids": torch.tensor(one)}, rollout_id=f"r{n}") for n, one in enumerate(ids)]


@dataclass
class Rank:
    """One of the processes."""

    rank: int
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self.model, self.groups = model(), aligned_groups((1, 2))

    def train(self, batch: sb.Batch) -> Seconds:
        """Its own part, while the other does the same; everybody's seconds."""
        mine = batch.ranks[self.rank]
        times = []
        dist.barrier()
        for micro_batch in mine.micro_batches:
            began = self.clock()
            loss = loss_sum(self.model, micro_batch, ring_of(micro_batch, self.groups)) / mine.global_num_tokens
            loss.backward()  # type: ignore[no-untyped-call]
            times.append(self.clock() - began)
        self.model.zero_grad(set_to_none=False)
        everyones: Seconds = [[] for _ in batch.ranks]
        dist.all_gather_object(everyones, times)
        return everyones


def as_rank(rank: int, store: str, count: int, cpu: bool) -> None:
    """What one of the processes does; the first prints what came out."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    train = Rank(rank, time.thread_time if cpu else time.perf_counter).train
    rollouts = long_tailed((LEARNING_STEPS + OVERHEAD_STEPS + count) * BATCH_SIZE)
    first, then = LEARNING_STEPS * BATCH_SIZE, (LEARNING_STEPS + OVERHEAD_STEPS) * BATCH_SIZE
    learned = learn(train, rollouts[:first], **GANG)
    overhead = overhead_of(train, rollouts[first:then], learned)
    whole, shared = [], []
    for batch, seconds in Run(train, cost=learned.cost, **GANG).of(rollouts[then:]):
        whole.append(learned.step_of(batch, seconds))
    for batch, seconds in Run(
        train, cost=learned.cost, context_parallel={**SHARING["context_parallel"], "overhead": overhead}, **GANG
    ).of(rollouts[then:]):
        shared.append(learned.step_of(batch, seconds))
    if rank == 0:
        sys.stdout.write(json.dumps([whole, shared, overhead]))
    dist.destroy_process_group()


def overhead_of(train: Train, rollouts: Sequence[sb.Rollout], learned: Learned) -> float:
    """What a shared rollout took on each of two ranks, over half of what it takes on one, less 1. The median of all:
    the first of a group connects its ranks."""
    ratios: list[float] = []
    for batch, seconds in Run(train, cost=learned.cost, **SHARING, **GANG).of(rollouts):
        for share, times in zip(batch.ranks, seconds, strict=True):
            for one, its_s in zip(share.micro_batches, times, strict=True):
                if one.cp_group:
                    half = float(learned.cost(one.packed().whole_lengths).sum()) / RANKS
                    ratios.append((its_s - learned.micro_batch_s) / half)
    if not ratios:
        sys.exit("no rollout was shared in the steps that the overhead is learned from: seconds say that none is long")
    return max(float(np.median(ratios)) - 1.0, 0.0)


def ranks(rows: Rows, count: int, cpu: bool) -> None:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        peers = [stack.enter_context(peer(rank, f"{folder}/store", count, cpu)) for rank in range(RANKS)]
        said = peers[0].communicate()[0]
        if peers[0].returncode:
            sys.exit("a rank failed")
    whole, shared, overhead = json.loads(said)
    rows.add("ranks: overhead of two ranks, measured", 100 * overhead, "%")
    add_rows(rows, "ranks", [Step(*one) for one in whole], [Step(*one) for one in shared])


# --- siblings that share a prefix ------------------------------------------------------------------------------------

SIBLINGS = 6
PREFIXES = {
    "dp_size": 2,
    "batch_size": 2 * SIBLINGS,
    "micro_batches": {"max_tokens": 4096, "counts": "free"},
}


def siblings(count: int) -> list[sb.Rollout]:
    """Groups of 6: prompts of 128 to 1,024 tokens, and as long answers."""
    random, made = np.random.default_rng(0), list[sb.Rollout]()
    for group in range(count // SIBLINGS):
        prompt = random.integers(0, MODEL.vocab_size, int(random.integers(128, 1024)))
        for number in range(SIBLINGS):
            answer = random.integers(0, MODEL.vocab_size, int(np.clip(random.lognormal(np.log(300), 0.7), 32, 2048)))
            columns = {
                "input_ids": torch.tensor(np.concatenate((prompt, answer))),
                "loss_mask": torch.arange(len(prompt) + len(answer)) >= len(prompt),
            }
            name = f"g{group}"
            made.append(sb.Rollout(tokens=columns, rollout_id=f"{name}-{number}", group_id=name, prefix=len(prompt)))
    return made


def one_process(its_model: Decoder, sharing: bool) -> Train:
    """Ranks one after another, in CPU seconds."""
    loss_of = tree_loss_sum if sharing else loss_sum

    def seconds(micro_batch: sb.types.MicroBatch) -> float:
        began = time.thread_time()
        (loss_of(its_model, micro_batch) / 1e4).backward()  # type: ignore[no-untyped-call]
        took = time.thread_time() - began
        its_model.zero_grad(set_to_none=False)
        return took

    return lambda batch: [[seconds(one) for one in share.micro_batches] for share in batch.ranks]


def prefixes(rows: Rows, count: int, _: bool) -> None:
    torch.set_num_threads(1)
    its_model = model()
    rollouts = siblings((LEARNING_STEPS + count) * 2 * SIBLINGS)
    first = LEARNING_STEPS * 2 * SIBLINGS
    dense, tree = one_process(its_model, sharing=False), one_process(its_model, sharing=True)
    learned = learn(dense, rollouts[:first], **PREFIXES)
    whole = [learned.step_of(*one) for one in Run(dense, cost=learned.cost, **PREFIXES).of(rollouts[first:])]
    sharing = Run(tree, cost=learned.cost, groups={"size": SIBLINGS, "share_prefixes": True}, **PREFIXES)
    shared = [learned.step_of(*one) for one in sharing.of(rollouts[first:])]
    add_rows(rows, "prefixes", whole, shared)


def main() -> None:
    options = arguments(__doc__, steps=24, only="", cpu=False)
    if options.as_peer:
        return as_rank(*options.as_peer)
    rows = Rows(options.json)
    for part in (ranks, prefixes):
        if part.__name__.startswith(options.only):
            part(rows, options.steps, options.cpu)
    if rows.failed:
        sys.exit(f"not within {BAR:g} %: {', '.join(rows.failed)}")
    return None


if __name__ == "__main__":
    main()
