"""Ranks that share a rollout compute what one rank would, with the example's ring attention; torch cuts alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from forked import run_world
from processes import world_of
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from stream_balancer import Rollout
from stream_balancer.rollouts import MicroBatch

EXAMPLE = Path(__file__).parents[2] / "examples" / "context_parallel" / "train_shared.py"
LENGTHS = (1, 5, 16, 63, 64, 200)  # tokens of a rollout: some leave whole members with padding only


def zigzag(length: int, size: int, place: int) -> Tensor:
    """[2 c] places in the whole rollout of the tokens that a member holds; they go on beyond its end."""
    rollout = Rollout(tokens={"input_ids": torch.zeros(length, dtype=torch.int64)})
    return MicroBatch.of([rollout], cp_group=tuple(range(size)), cp_rank=place).packed().position_ids


def cut_by_torch(rank: int) -> list[str]:
    """Where torch's public context manager cuts its buffers otherwise than we cut rollouts; it takes whole multiples of
    2 g only."""
    from torch.distributed.tensor.experimental import context_parallel

    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("block", "cp"))
    otherwise = []
    for mesh, place in ((pairs["cp"], rank % 2), (init_device_mesh("cpu", (4,)), rank)):
        for length in LENGTHS:
            padded = 2 * mesh.size() * -(-length // (2 * mesh.size()))
            ids, rows = torch.arange(padded), torch.arange(padded).view(1, padded, 1).expand(1, padded, 3).contiguous()
            expected = zigzag(length, mesh.size(), place)
            with context_parallel(mesh, buffers=[ids, rows], buffer_seq_dims=[0, 1]):
                if not (ids.equal(expected) and rows[0, :, 2].equal(expected)):
                    otherwise.append(f"{length} tokens over {mesh.size()} ranks")
    return otherwise


def test_torch_cuts_a_sequence_alike():
    assert world_of(4, cut_by_torch) == [[]] * 4


@pytest.mark.parametrize("sync", ["step", pytest.param("micro_batch", marks=pytest.mark.slow)])
def test_loss_and_gradients_of_a_shared_step_are_those_of_one_process(sync):
    """The example: planned and delivered through the balancer, trained with rings of 2 and of 4, in float32."""
    figures = json.loads(run_world(4, EXAMPLE, sync))
    assert figures["loss_apart"] <= 1e-5
    assert figures["gradient_apart"] <= 1e-5
    by_degree = figures["rollouts_by_degree"]
    assert by_degree.keys() == {"1", "2", "4"}
    assert sum(by_degree.values()) == 48
