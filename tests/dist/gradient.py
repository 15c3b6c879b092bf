"""Gradients of a small model, over ranks that are real processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from forked import hear
from guard import GUARD_S

import stream_balancer as sb


class Gradient:
    """Gradient of a small model, summed over what was added. ``tree``: each shared prefix is computed once."""

    def __init__(self, *, tree: bool = False) -> None:
        self._tree = tree
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Embedding(64, 8), torch.nn.Linear(8, 8), torch.nn.Tanh())
        self.head = torch.nn.Linear(8, 64)
        self.ids: list[str] = []

    def add(self, micro_batch: sb.types.MicroBatch) -> None:
        """A sum, which is divided once all is known."""
        packed = micro_batch.packed()
        ids = packed["input_ids"] % 64
        if self._tree and not micro_batch.cp_group:
            tree = micro_batch.tree()
            said = self.head(self.model(tree["input_ids"] % 64))[tree.index]
        else:
            said = self.head(self.model(ids))
        loss = torch.nn.functional.cross_entropy(said, ids, reduction="none")
        (loss * packed["loss_mask"]).sum().backward()
        self.ids += [r.rollout_id for r in micro_batch.rollouts if not r.is_padding]

    def flat(self) -> torch.Tensor:
        parameters = [*self.model.parameters(), *self.head.parameters()]
        return torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters])


class World:
    """A process group of those that are left, made anew when they are others."""

    def __init__(self, port: int, rank: int) -> None:
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        self._rank = rank
        self._ranks: tuple[int, ...] = ()

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        if ranks != self._ranks:
            if self._ranks:
                dist.destroy_process_group()
            store = dist.PrefixStore(str(ranks), self.store)
            dist.init_process_group("gloo", store=store, rank=ranks.index(self._rank), world_size=len(ranks))
            self._ranks = ranks
        dist.all_reduce(tensor)


def all_said(process: Any, pipe: Any) -> list[Any]:
    """All that a rank's process has sent, once it has ended."""
    said = []
    try:
        while True:
            said.append(hear(pipe))
    except EOFError:
        process.join(GUARD_S)
    return said
