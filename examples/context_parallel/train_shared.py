"""Ranks share the longest rollouts: ``torchrun --nproc-per-node 4 examples/context_parallel/train_shared.py``.

The plan says who: a rollout that exceeds a rank's fair share goes to 2 or 4 ranks that lie side by side, and each
receives its own part of the tokens and no more. After every step rank 0 trains the same rollouts unsplit, by itself,
and says how far loss and gradients are apart.

With ``micro_batch`` behind the command: as planned for ranks that meet at every micro-batch (FSDP), not once a step.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter

import anyio
import torch
import torch.distributed as dist
from ring_model import Decoder, Groups, aligned_groups, loss_sum, ring_of
from torch import Tensor

import stream_balancer as sb

CP_SIZES = (1, 2, 4)
NUM_STEPS, BATCH_SIZE, VOCABULARY = 4, 12, 97
LENGTHS = (1400, 500, 64, 75, 41, 58, 36, 81, 47, 62, 55, 70)
"""Tokens of a step's rollouts: a rank's fair share is about 600."""


def rollouts() -> dict[str, sb.Rollout]:
    """The same in every process; a prompt of 8 tokens is not trained on."""
    random = torch.Generator().manual_seed(0)
    made = {}
    for number in range(NUM_STEPS * BATCH_SIZE):
        tokens = LENGTHS[number % BATCH_SIZE] + number // BATCH_SIZE
        columns = {
            "input_ids": torch.randint(0, VOCABULARY, (tokens,), generator=random),
            "loss_mask": torch.arange(tokens) >= 8,
        }
        made[f"rollout-{number}"] = sb.Rollout(tokens=columns, rollout_id=f"rollout-{number}")
    return made


async def control() -> None:
    """The controller, in a thread of rank 0."""
    transport = sb.TorchTransport.in_world()
    config = sb.BalancerConfig(
        dp_size=transport.dp_size,
        batch_size=BATCH_SIZE,
        sync="micro_batch" if "micro_batch" in sys.argv else "step",
        policy="fifo",  # so that every step has some to share: the window leaves few
        context_parallel=sb.ContextParallel(sizes=CP_SIZES, min_tokens=64),  # of a piece: tiny, as the model is
        micro_batches=sb.MicroBatches(max_tokens=600),
    )
    async with sb.StreamBalancer(config) as balancer, transport, anyio.create_task_group() as tasks:
        tasks.start_soon(sb.serve, balancer, transport)
        for rollout in rollouts().values():
            await balancer.put(rollout)
        balancer.end()


def train(model: Decoder, batch: sb.rollouts.RankBatch | sb.Step, groups: Groups) -> Tensor:
    """This rank's part of the step; returns the step's loss. Gradients are those of the whole step, on every rank.

    Micro-batches run in the order in which they come: then no member waits for another.
    """
    total = torch.zeros((), dtype=torch.float64)
    for micro_batch in batch.micro_batches:
        loss = loss_sum(model, micro_batch, ring_of(micro_batch, groups)) / batch.global_num_loss_tokens
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)  # the sum, not the mean: the denominator is the step's
    dist.all_reduce(total)
    return total


def trained_ids(batch: sb.rollouts.RankBatch | sb.Step) -> dict[str, int]:
    """The step's rollouts over all ranks, and how many ranks shared each."""
    held = [(one, len(mb.cp_group) or 1) for mb in batch.micro_batches for one in mb.rollouts if not one.is_padding]
    mine = {one.rollout_id: degree for one, degree in held}
    everyones: list[dict[str, int]] = [{}] * batch.dp_size
    dist.all_gather_object(everyones, mine)
    return {name: degree for one in everyones for name, degree in one.items()}


def unsplit(model: Decoder, names: list[str]) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of these rollouts in one process, one rollout after another."""
    everything = rollouts()
    whole = [everything[name] for name in names]
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for rollout in whole:
        loss = loss_sum(model, sb.rollouts.MicroBatch.of([rollout])) / sum(one.num_loss_tokens for one in whole)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total, gradients_of(model)


def gradients_of(model: Decoder) -> list[Tensor]:
    """A copy."""
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def apart(ours: tuple[Tensor, list[Tensor]], theirs: tuple[Tensor, list[Tensor]]) -> tuple[float, float]:
    """Of the loss, and of the gradients' entries in units of the greatest."""
    largest = max(float(one.abs().max()) for one in theirs[1])
    furthest = max(float((a - b).abs().max()) for a, b in zip(ours[1], theirs[1], strict=True))
    return float((ours[0] / theirs[0] - 1).abs()), furthest / largest


def main() -> None:
    dist.init_process_group("gloo")
    controller = threading.Thread(target=anyio.run, args=(control,), daemon=True)  # an error below ends rank 0
    if dist.get_rank() == 0:
        controller.start()
    torch.manual_seed(0)
    model = Decoder(vocab_size=VOCABULARY, hidden_size=64, num_layers=2, num_heads=4)
    groups, degrees, furthest = aligned_groups(CP_SIZES), Counter[int](), (0.0, 0.0)
    for batch in sb.RankFeed():
        model.zero_grad()
        ours = train(model, batch, groups), gradients_of(model)
        trained = trained_ids(batch)
        degrees.update(trained.values())
        if dist.get_rank() == 0:
            loss, gradient = apart(ours, unsplit(model, sorted(trained)))
            furthest = max(loss, furthest[0]), max(gradient, furthest[1])
        with torch.no_grad():
            for parameter, one in zip(model.parameters(), ours[1], strict=True):
                parameter.sub_(one, alpha=0.1)
    if dist.get_rank() == 0:
        controller.join()
        figures = {"loss_apart": furthest[0], "gradient_apart": furthest[1]}
        print(json.dumps(figures | {"rollouts_by_degree": dict(sorted(degrees.items()))}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
