"""``torchrun --nproc-per-node 2 torch_data_rank.py FOLDER``: the accelerate and Lightning loops of docs/trl.md,
against a loop in which every sequence goes through the model by itself, and the time that ranks wait against a plain
split, which deals the same rollouts out in their order. Rank 0 writes what it found as JSON."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext  # noqa: F401 - the blocks use it
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from guard import GUARD_S
from torch import Tensor
from torch.utils.data import DataLoader
from two_ranks import leave

import stream_balancer as sb
from stream_balancer.integrations.torch_data import RolloutDataset

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from stream_balancer_demo.model import Decoder

PER_STEP, STEPS, RANKS, VOCABULARY = 8, 3, 2, 50
PAGE = (Path(__file__).parents[2] / "docs" / "trl.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.partition("## DataLoader")[2], re.S)

PAGES: dict[str, Any] = {"torch": torch}
exec(BLOCKS[0].partition("\n\n")[2].partition("\n\n")[0], PAGES)

TOKENS: dict[int, int] = {}
"""This rank's, of each step of the loop that runs."""


def rollouts() -> list[sb.Rollout]:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(4, 1, PER_STEP * STEPS).astype(int) + 2, 600)
    return [
        sb.Rollout(
            tokens={
                "input_ids": torch.from_numpy(rng.integers(0, VOCABULARY, length)),
                "loss_mask": torch.from_numpy(rng.random(length) < (0.4, 1.0)[number % 2]),
            },
            scalars={"advantage": float(np.float32(rng.normal()))},
        )
        for number, length in enumerate(lengths.tolist())
    ]


def Model() -> Decoder:
    torch.manual_seed(0)
    return Decoder(vocab_size=VOCABULARY, hidden_size=16).double()


def loss_sum(model: Any, item: dict[str, Any]) -> Tensor:
    """The page's, of which the tokens are counted."""
    TOKENS[item["step"]] = TOKENS.get(item["step"], 0) + len(item["input_ids"])
    return PAGES["loss_sum"](model, item)  # type: ignore[no-any-return]


class Noting(torch.optim.SGD):
    """Notes the gradient of each step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.gradients: list[Tensor] = []

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.gradients.append(torch.cat([p.grad.flatten().clone() for p in self.param_groups[0]["params"]]))
        super().step(closure)


def by_sequence(everything: list[sb.Rollout]) -> list[Tensor]:
    """In one process, one sequence after the other: -log p(token | those before) of each token from the second on that
    is trained on. Every second rollout is counted as rank 1's."""
    model = Model()
    optimizer = Noting(model.parameters())
    for step in range(STEPS):
        of_step = everything[step * PER_STEP : (step + 1) * PER_STEP]
        TOKENS[step] = sum(rollout.num_tokens for rollout in of_step[dist.get_rank() :: RANKS])
        count = sum(int(rollout.tokens["loss_mask"][1:].sum()) for rollout in of_step)
        for rollout in of_step:
            ids, mask = rollout.tokens["input_ids"], rollout.tokens["loss_mask"]
            logits = model(ids, torch.arange(len(ids)), torch.tensor([0, len(ids)]))
            logprobs = logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
            (-(logprobs * mask[1:]).sum() * rollout.scalars["advantage"] / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.gradients


def balanced(everything: list[sb.Rollout], train: Callable[[str], list[Tensor]]) -> list[Tensor]:
    """``train`` on the feed of a balancer whose steps have the same rollouts."""
    with ExitStack() as stack:
        address: list[Any] = [None]
        if dist.get_rank() == 0:
            transport = sb.TorchTransport.listen(dp_size=RANKS)
            config = sb.BalancerConfig(
                dp_size=RANKS,
                batch_size=PER_STEP,
                window=PER_STEP,
                capacity=PER_STEP * STEPS,
                micro_batches=sb.MicroBatches(max_tokens=600),
                sync="step",
                policy="fifo",
            )
            balancer = stack.enter_context(sb.blocking(config))
            served = balancer.serve(transport)
            for rollout in everything:
                balancer.put(rollout)
            balancer.end()
            address = [transport.address]
        dist.broadcast_object_list(address)
        gradients = train(address[0])
        if dist.get_rank() == 0:
            served.result(GUARD_S)
    return gradients


def by_accelerate(address: str) -> list[Tensor]:
    model = Model()
    names = globals() | {"model": model, "optimizer": Noting(model.parameters()), "address": address}
    exec(BLOCKS[1], names)
    return list(names["optimizer"].optimizer.gradients)


def by_lightning(address: str) -> list[Tensor]:
    names = dict(globals())
    exec(BLOCKS[2], names)

    class Policy(names["Policy"]):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()
            self.noting = Noting(self.model.parameters())

        def configure_optimizers(self) -> Noting:
            return self.noting

    policy = Policy()
    dataset = RolloutDataset(sb.RankFeed(address, rank=dist.get_rank(), dp_size=RANKS))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        max_epochs=1,
        use_distributed_sampler=False,
        enable_model_summary=False,
        **quiet,
    )
    trainer.fit(policy, DataLoader(dataset, batch_size=None))
    return policy.noting.gradients


def apart(ours: list[Tensor], theirs: list[Tensor]) -> float:
    assert len(ours) == len(theirs) == STEPS
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


def idle() -> float:
    """Part of the ranks' time that they wait for the other, where they meet once a step and work is tokens."""
    gathered: list[Any] = [None] * RANKS
    dist.all_gather_object(gathered, list(TOKENS.values()))
    TOKENS.clear()
    return 1 - sum(map(sum, gathered)) / RANKS / sum(map(max, zip(*gathered, strict=True)))


def main(folder: Path) -> None:
    Accelerator(cpu=True)  # starts the process group
    everything = rollouts()
    theirs = by_sequence(everything)
    found: dict[str, Any] = {"plain": {"idle": idle()}}
    for train in (by_accelerate, by_lightning):
        ours = balanced(everything, train)
        found[train.__name__] = {"gradients_apart": apart(ours, theirs), "idle": idle()}
    leave(folder, found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
