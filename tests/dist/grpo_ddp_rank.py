"""One rank under torchrun: the example's backward() on its share, in DDP, against one padded batch. See
test_grpo_runs.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import anyio
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from test_grpo_gradient import (
    TEMPERATURE,
    backward,
    flat_gradient,
    gradient_of_padded_batch,
    make_rollouts,
    new_model,
    plan,
    relative_difference,
)


async def batches():
    """The same on every rank: planning is deterministic."""
    return await plan(make_rollouts(64), dp_size=2, batch_size=32, micro_batches={"max_tokens": 125})


def main() -> None:
    dist.init_process_group("gloo")
    differences = []
    for batch in anyio.run(batches):
        model = DistributedDataParallel(new_model())
        backward(model, batch.ranks[dist.get_rank()], TEMPERATURE)
        differences.append(relative_difference(flat_gradient(model), gradient_of_padded_batch(list(batch.rollouts))))
    if dist.get_rank() == 0:
        print(json.dumps(differences))  # noqa: T201 - the test reads it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
