"""Three ranks whose shares differ, over gloo: they get the same number of micro-batches, or all raise. Forked from one
process, which imports verl once."""

from __future__ import annotations

import multiprocessing
import sys
from datetime import timedelta
from itertools import chain

import torch
import torch.distributed as dist
from guard import GUARD_S
from tensordict import TensorDict

from stream_balancer.integrations import verl as ours

WORLD_SIZE = 3
SHARES = {0: [40, 30, 20, 10, 5, 5], 1: [50, 50, 50, 50, 50], 2: [60, 1, 1, 1, 1, 1, 1, 1]}
"""Alone they need 2, 5 and 2 micro-batches of 60 tokens."""


def batch_of(lengths: list[int]) -> TensorDict:
    rows = [torch.arange(length) for length in lengths]
    ids = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return TensorDict({"input_ids": ids}, batch_size=[len(lengths)])


def counts(number: int) -> list[int]:
    """`number` on every rank."""
    everybody = [torch.zeros(1, dtype=torch.int64) for _ in range(WORLD_SIZE)]
    dist.all_gather(everybody, torch.tensor([number]))
    return [int(one) for one in everybody]


def main(init_method: str, rank: int) -> None:
    dist.init_process_group(
        "gloo", init_method=init_method, rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=GUARD_S)
    )
    world = dist.group.WORLD
    lengths = SHARES[rank]
    batch = batch_of(lengths)

    _, positions = ours.rearrange_micro_batches(batch, 60, dp_group=world)
    assert counts(len(positions)) == [5, 5, 5], counts(len(positions))
    assert sorted(chain.from_iterable(positions)) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in one) <= 60 for one in positions)

    _, positions = ours.rearrange_micro_batches(batch, 60, dp_group=world, same_micro_num_in_dp=False)
    assert counts(len(positions)) == [2, 5, 2], counts(len(positions))

    # one rank needs 5 and so all 6, of which it has not enough rows: nobody is left waiting
    assert raised(batch, 60, dp_group=world, num_batches_divided_by=2)
    # the rows of one rank are too wide
    assert raised(batch, 55, dp_group=world)
    # two rows that must stay together are too long on one rank: alone there, and the ranks agree all the same
    _, positions = ours.rearrange_micro_batches(batch_of(lengths[:4]), 65, dp_group=world, force_group_size=2)
    assert counts(len(positions)) == [2, 2, 2], counts(len(positions))
    assert all(len(one) == 2 for one in positions)
    assert counts(1) == [1, 1, 1]  # still in step
    dist.destroy_process_group()


def raised(batch: TensorDict, cap: int, **knobs: object) -> bool:
    try:
        ours.rearrange_micro_batches(batch, cap, **knobs)  # type: ignore[arg-type]
    except AssertionError as error:
        return isinstance(error, ValueError)
    return False


if __name__ == "__main__":
    forking = multiprocessing.get_context("fork")
    ranks = [forking.Process(target=main, args=(sys.argv[1], rank), daemon=True) for rank in range(WORLD_SIZE)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    sys.exit(any(one.exitcode for one in ranks))
