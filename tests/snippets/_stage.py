"""What the pages' fragments take for granted: a controller that has rollouts, ranks that can reach it."""

from __future__ import annotations

import importlib
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace

import anyio
import torch
import torch.distributed as dist
from anyio.abc import TaskGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

import stream_balancer as sb
from stream_balancer import serve
from stream_balancer.net.address import current_world
from stream_balancer.testing import MemoryNetwork

GUARD_S = 120.0  # against hangs


def rollout(n: int = 0) -> sb.Rollout:
    return sb.Rollout(tokens={"input_ids": torch.arange(5 + n % 7)}, rollout_id=f"r{n}")


@contextmanager
def controller(
    dp_size: int = 1, rollouts: int = 8, store: dist.Store | None = None, stay_s: float = 0.0, **options: object
) -> Iterator[str]:
    """A balancer in a thread, with rollouts; the address for its ranks and producers. ``stay_s``: so long can one more
    rank come in after the end. ``options``: of ``serve``."""
    address: SimpleQueue[str] = SimpleQueue()
    done = threading.Event()

    async def main() -> None:
        config = sb.BalancerConfig(dp_size=dp_size, batch_size=2, capacity=64, max_skips=32)
        listening = (
            sb.TorchTransport.listen(dp_size=dp_size) if store is None else sb.TorchTransport(store, dp_size=dp_size)
        )
        async with sb.StreamBalancer(config) as balancer, listening as transport, anyio.create_task_group() as tasks:
            tasks.start_soon(partial(sb.serve, balancer, transport, **options))
            tasks.start_soon(anyio.sleep, stay_s)
            address.put("" if store is not None else transport.address)
            for n in range(rollouts):
                await balancer.put(rollout(n))
            if rollouts:
                balancer.end()
            else:  # producers bring them; none may lose its controller before it knows that a rollout was accepted
                await anyio.to_thread.run_sync(done.wait, GUARD_S)
                assert balancer.statistics().accepted
                tasks.cancel_scope.cancel()

    thread = threading.Thread(target=anyio.run, args=(main,), daemon=True)
    thread.start()
    yield address.get(timeout=GUARD_S)
    done.set()
    thread.join(GUARD_S)
    assert not thread.is_alive(), "the controller did not end"


# --- losses -----------------------------------------------------------------------------------------------------------

VOCABULARY = 20


class Model(torch.nn.Module):
    """Logits [T, VOCABULARY] of the token that follows each, from all of its sequence so far if it is told where
    sequences begin."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = torch.nn.Embedding(VOCABULARY, VOCABULARY, dtype=torch.float64)
        self.places = torch.nn.Embedding(400, VOCABULARY, dtype=torch.float64)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows = self.tokens(input_ids) if position_ids is None else self.tokens(input_ids) + self.places(position_ids)
        if cu_seqlens is None:
            return rows
        return torch.cat([sequence.cumsum(0) for sequence in rows.split(cu_seqlens.diff().tolist())])

    no_sync = staticmethod(nullcontext)  # DDP's

    def gradient(self) -> torch.Tensor:
        return flat(one.grad for one in self.parameters())


class Optimizer:
    """Notes the gradient of every step, and changes nothing."""

    def __init__(self, model: Model) -> None:
        self.zero_grad = model.zero_grad
        self._model = model
        self.gradients: list[torch.Tensor] = []

    def step(self) -> None:
        self.gradients.append(self._model.gradient())


def flat(gradients: Iterable[torch.Tensor | None]) -> torch.Tensor:
    return torch.cat([one.flatten() for one in gradients if one is not None]).clone()


def to_train_on() -> list[sb.Rollout]:
    """Of lengths that differ, from one token on; with masks that begin late, early and not at all."""
    dice, found = torch.Generator().manual_seed(0), []
    for n in range(24):
        ids = torch.randint(VOCABULARY, (1 + n * n % 23,), generator=dice)
        tokens = {"input_ids": ids, "loss_mask": torch.rand(len(ids), generator=dice) < (0.3, 0.7, 1.1)[n % 3]}
        found.append(sb.Rollout(tokens=tokens, scalars={"advantage": n / 8 - 1}, rollout_id=f"r{n}"))
    return found


def batches_of(rollouts: Iterable[sb.Rollout], **knobs: object) -> list[sb.Batch]:
    with sb.blocking(sb.BalancerConfig(**knobs)) as balancer:
        for one in rollouts:
            balancer.put(one)
        balancer.end()
        return list(balancer.batches())


def of_batch(rollouts: Iterable[sb.Rollout], batch: sb.Batch) -> list[sb.Rollout]:
    ids = {one.rollout_id for rank in batch.ranks for mb in rank.micro_batches for one in mb.rollouts}
    return [one for one in rollouts if one.rollout_id in ids]


def loss_of_sequences(model: Callable[[torch.Tensor], torch.Tensor], rollouts: Iterable[sb.Rollout]) -> torch.Tensor:
    """The loss of every page where each rollout goes through the model by itself: of each token from the second on
    that is trained on, -log p(token | those before) times the rollout's advantage, over the number of these tokens."""
    total, count = 0.0, 0
    for one in rollouts:
        ids = torch.as_tensor(one.tokens["input_ids"])
        mask = torch.as_tensor(one.tokens.get("loss_mask", torch.ones(len(ids))))
        logprobs = model(ids).log_softmax(-1)
        for place in range(1, len(ids)):
            total = total - logprobs[place - 1, ids[place]] * float(mask[place]) * one.scalars.get("advantage", 1.0)
            count += int(mask[place])
    return total / count


def gradient_of_sequences(
    model: torch.nn.Module,
    rollouts: Iterable[sb.Rollout],
    called: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """``called``: how the model is called with one sequence."""
    loss = loss_of_sequences(called or model, rollouts)
    return flat(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((found - expected).norm()) < 1e-6 * float(expected.norm())


@asynccontextmanager
async def in_memory(dp_size: int) -> AsyncIterator[tuple[sb.StreamBalancer, MemoryNetwork, TaskGroup]]:
    """A balancer that has ended, with rollouts for two steps; a transport for its ranks; who trains and serves."""
    config = sb.BalancerConfig(dp_size=dp_size, batch_size=2)
    async with sb.StreamBalancer(config) as balancer, MemoryNetwork(dp_size=dp_size) as transport:
        for n in range(4):
            await balancer.put(rollout(n))
        balancer.end()
        async with anyio.create_task_group() as tasks:
            yield balancer, transport, tasks


@contextmanager
def world() -> Iterator[None]:
    """torchrun's world, of one rank, which hosts the controller too."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with controller(store=current_world()[0]):
        yield
    dist.destroy_process_group()
