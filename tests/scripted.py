"""Balancers that are filled, rank batches without a plan, and whether what arrived is what was sent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import anyio
import torch
from torch import Tensor

import stream_balancer as sb
from stream_balancer.rollouts import SUPPORTED_DTYPES, Denominators, MicroBatch, RankBatch, Rollout


def rank_batch(*micro_batches: MicroBatch | Iterable[Rollout], **fields: Any) -> RankBatch:
    """A step's only rank batch, of these rollouts; ``fields`` of it that matter."""
    cut = tuple(one if isinstance(one, MicroBatch) else MicroBatch.of(list(one)) for one in micro_batches)
    rollouts = [rollout for micro_batch in cut for rollout in micro_batch.rollouts]
    tokens = sum(rollout.num_tokens for rollout in rollouts)
    ordinary: dict[str, Any] = {
        "step": 0,
        "rank": 0,
        "dp_size": 1,
        "load": float(tokens),
        "denominators": Denominators(
            len(rollouts), tokens, sum(rollout.num_loss_tokens for rollout in rollouts), len(rollouts)
        ),
    }
    return RankBatch(micro_batches=cut, **(ordinary | fields))


def awkward_micro_batches() -> list[list[Rollout]]:
    generator = torch.Generator().manual_seed(0)
    rollouts = []
    for number, length in enumerate((1, 3, 64, 2, 129)):
        tokens = {"input_ids": torch.arange(length) * (2**40 if number == 2 else 1)}
        for dtype in SUPPORTED_DTYPES:
            name = str(dtype).removeprefix("torch.")
            raw = torch.randint(0, 256, (length * 3 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
            tokens[name] = (raw % 2 if dtype is torch.bool else raw).view(dtype).view(length, 3)
        tokens["strided"] = torch.randn(7, 2 * length, generator=generator).T[::2, 3:5]
        tokens["nothing"] = torch.empty(length, 2, 0)
        rollouts.append(
            Rollout(
                tokens=tokens,
                scalars={"reward": float("inf"), "count": 2**53 + number, "flag": True},
                tensors={"pixels": torch.randn(2, number, 3, generator=generator), "one": torch.tensor(number)},
                metadata={"text": "Größe\x00", "deep": [{"a": None, "b": [1.5, -(2**63), b"\xff"]}]},
                rollout_id=f"r{number} \N{SNOWMAN}",
                group_id="g" if number % 2 else None,
                execution_id=f"e{number}" if number > 2 else None,
                version=(number, number + 1) if number % 2 else number,
                cost=1.5 if number else None,
            )
        )
    rollouts.append(rollouts[0].padding_copy("padding"))
    return [rollouts[:1], rollouts[1:4], rollouts[4:]]


def same_rollout(one: Rollout, other: Rollout) -> bool:
    """Equal in every field, tensors bit by bit."""
    plain = ["rollout_id", "group_id", "execution_id", "version", "cost", "is_padding", "num_tokens", "num_loss_tokens"]
    plain += ["scalars", "metadata"]
    return (
        all(getattr(one, name) == getattr(other, name) for name in plain)
        and same_tensors(dict(one.tokens), dict(other.tokens))
        and same_tensors(dict(one.tensors), dict(other.tensors))
    )


def same_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(
        a.dtype == b.dtype and a.shape == b.shape and _bits(a) == _bits(b)
        for a, b in zip(one.values(), other.values(), strict=True)
    )


def _bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


class Filled(sb.Observer):
    """A balancer that has steps of ``num_tokens``, or more, a rollout; what it planned, and what was acknowledged."""

    def __init__(
        self, steps: int, dp_size: int, *, num_tokens: int = 5, rollouts: int = 4, hold: bool = False, **knobs: Any
    ) -> None:
        """``rollouts``: of each rank and step. ``hold``: it does not end after the last step."""
        self.steps, self._hold, self._num_tokens = steps, hold, num_tokens
        per_step = rollouts * dp_size
        self._config = sb.BalancerConfig(**{"dp_size": dp_size, "batch_size": per_step, "window": per_step, **knobs})
        self.plans: dict[int, sb.Batch] = {}
        """By step."""
        self.acknowledged_steps: list[int] = []
        """In the order they were acknowledged."""

    async def __aenter__(self) -> Self:
        self.balancer = await sb.StreamBalancer(self._config).__aenter__()
        self.balancer.observers.append(self)
        self._tasks = await anyio.create_task_group().__aenter__()
        self._tasks.start_soon(self._fill)
        return self

    async def __aexit__(self, *error: Any) -> bool | None:  # noqa: PYI036
        self._tasks.cancel_scope.cancel()
        result = await self._tasks.__aexit__(*error)
        await self.balancer.__aexit__(*error)
        return result

    async def _fill(self) -> None:
        for step in range(self.steps):
            for number in range(self._config.batch_size):
                tokens = {"input_ids": torch.arange(self._num_tokens + number % 2) + 1000 * step}
                await self.balancer.put(sb.Rollout(tokens=tokens, rollout_id=f"{step}.{number}"))
        if not self._hold:
            self.balancer.end()

    def dispatched(self, batch: sb.Batch) -> None:
        """An event of the balancer."""
        self.plans[batch.step] = batch

    def acknowledged(self, batch: sb.Batch) -> None:
        """An event of the balancer."""
        self.acknowledged_steps.append(batch.step)

    def share(self, step: int, rank: int) -> sb.rollouts.RankBatch:
        """What a rank was to be given."""
        return self.plans[step].ranks[rank]
