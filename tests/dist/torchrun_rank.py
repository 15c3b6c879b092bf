"""A trainer under torchrun that checkpoints every third step and dies twice: ``torchrun_rank.py ADDRESS FOLDER``.

Its "weights" are the ids it has trained on, so that a checkpoint tells exactly what they are made of.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import stream_balancer as sb
from stream_balancer.types import RankBatch


class Trainer:
    """One rank: what it has learned, and how that is kept."""

    def __init__(self, folder: Path) -> None:
        self.rank, self.life = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self._folder = folder
        self._latest = folder / "latest"
        self.state: dict[str, Any] = {"next": 0, "trained": [], "skipped": []}
        if self._latest.exists():
            self.state = json.loads(self._file(int(self._latest.read_text())).read_text())

    def _file(self, step: int) -> Path:
        return self._folder / f"rank{self.rank}-{step}.json"

    def train(self, batch: RankBatch) -> None:
        """One step, which all ranks must be in."""
        steps = torch.tensor([batch.step])
        dist.all_reduce(steps)
        assert int(steps) == 2 * batch.step, "ranks are in different steps"
        if (self.life, self.rank, batch.step) == (0, 1, 4):
            os.kill(os.getpid(), signal.SIGKILL)
        self.state["trained"] += [r.rollout_id for r in batch.rollouts]
        self.state["next"] = batch.step + 1

    def commit(self, batch: RankBatch) -> None:
        """Save, agree that all have saved, and only then acknowledge."""
        self._file(batch.step).write_text(json.dumps(self.state))
        dist.barrier()
        if self.rank == 0:
            draft = self._folder / "draft"
            draft.write_text(str(batch.step))
            draft.rename(self._latest)
        dist.barrier()
        if (self.life, self.rank, batch.step) == (1, 0, 5):
            os.kill(os.getpid(), signal.SIGKILL)  # saved, but not acknowledged
        batch.ack()


def main(address: str, folder: Path) -> None:
    dist.init_process_group("gloo")
    trainer = Trainer(folder)
    last = None
    for batch in sb.RankFeed(address, rank=trainer.rank, dp_size=2, auto_ack=False):
        if batch.step < trainer.state["next"]:  # the checkpoint holds it already
            trainer.state["skipped"].append(batch.step)
            batch.ack()
            continue
        trainer.train(batch)
        last = batch
        if batch.step % 3 == 2:
            trainer.commit(batch)
    if last is not None:
        trainer.commit(last)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
