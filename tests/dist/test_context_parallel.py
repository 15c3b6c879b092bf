"""Ranks that share a rollout compute what one rank would: processes, gloo, and the example's ring attention."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked import run_world
from processes import world_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

from stream_balancer import Rollout
from stream_balancer.types import MicroBatch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "context_parallel"))
from ring import Ring, ring_attention

EXAMPLE = Path(sys.path[0]) / "train_shared.py"

LENGTHS = (1, 5, 16, 63, 64, 200)  # tokens of a rollout: some leave whole members with padding only


def zigzag(length: int, size: int, place: int) -> Tensor:
    """[2 c] places in the whole rollout of the tokens that a member holds; they go on beyond its end."""
    rollout = Rollout(tokens={"input_ids": torch.zeros(length, dtype=torch.int64)})
    return MicroBatch.shared([rollout], tuple(range(size)), place).packed().position_ids


def whole_attention(length: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Output of a rollout's causal attention, then q, k, v and the gradient that came back, with theirs: [1, heads,
    length, head_dim]."""
    random = torch.Generator().manual_seed(length)
    q, k, v, grad = (torch.randn(1, 2, length, 8, dtype=dtype, generator=random) for _ in range(4))
    for one in (q, k, v):
        one.requires_grad_()
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    out.backward(grad)
    return out.detach(), [q, k, v, grad]


def part_of(whole: Tensor, ring: Ring) -> Tensor:
    """A member's part of [1, heads, length, head_dim], zeros beyond the end."""
    places = zigzag(whole.shape[2], ring.size, ring.place)
    beyond = 2 * ring.size * (len(places) // 2) - whole.shape[2]
    return functional.pad(whole.detach(), (0, 0, 0, beyond))[:, :, places]


def apart(ours: Tensor, whole: Tensor, ring: Ring) -> float:
    """Over the tokens that are not padding, in units of the greatest entry of the whole, or of 1."""
    length = whole.shape[2]
    real = zigzag(length, ring.size, ring.place) < length
    difference = (ours - part_of(whole, ring))[:, :, real].abs()
    return float(difference.max() / whole.abs().max().clamp(min=1)) if real.any() else 0.0


def of_ring(ring: Ring, length: int, dtype: torch.dtype) -> Iterator[float]:
    """Ours: output and three gradients."""
    out, (q, k, v, grad) = whole_attention(length, dtype)
    parts = [part_of(one, ring).requires_grad_() for one in (q, k, v)]
    attended = ring_attention(*parts, ring)
    attended.backward(part_of(grad, ring))  # type: ignore[no-untyped-call]
    yield apart(attended.detach(), out, ring)
    for part, one in zip(parts, (q, k, v), strict=True):
        assert part.grad is not None
        assert one.grad is not None
        yield apart(part.grad, one.grad, ring)


def of_torchs_ring(ring: Ring, length: int) -> float:
    """torch's own ring attention, given our slices; its public way in, SDPA, has no sharding rule for the CPU's
    kernel, so we hand it that kernel."""

    def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, ...]:
        return tuple(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal))

    from torch.distributed.tensor.experimental._context_parallel import _attention as of_torch

    out, (q, k, v, _) = whole_attention(length, torch.float64)
    parts = [part_of(one, ring) for one in (q, k, v)]
    attended, *_ = of_torch._templated_ring_attention(ring.group, 2, attend, *parts, is_causal=True)
    return apart(attended, out, ring)


def of_torchs_sharding(mesh: DeviceMesh, ring: Ring, length: int) -> bool:
    """The public context manager cuts its buffers as we cut rollouts; it takes whole multiples of 2 g only."""
    from torch.distributed.tensor.experimental import context_parallel

    padded = 2 * ring.size * -(-length // (2 * ring.size))
    ids, rows = torch.arange(padded), torch.arange(padded).view(1, padded, 1).expand(1, padded, 3).contiguous()
    expected = zigzag(length, ring.size, ring.place)
    with context_parallel(mesh, buffers=[ids, rows], buffer_seq_dims=[0, 1]):
        return bool(ids.equal(expected) and rows[0, :, 2].equal(expected))


def figures_of(rank: int) -> dict[str, float]:
    """Attention over slices against attention over the whole, and torch's slices against ours; of one of four ranks."""
    found = dict[str, float]()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rings = {
        2: Ring((0, 1) if rank < 2 else (2, 3), rank % 2, pairs[rank // 2]),
        4: Ring(range(4), rank, dist.group.WORLD),
    }
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("block", "cp"))
    meshes = {2: mesh["cp"], 4: init_device_mesh("cpu", (4,))}
    for size, ring in rings.items():
        for dtype in (torch.float32, torch.float64):
            found[f"ring of {size}, {dtype}"] = max(max(of_ring(ring, length, dtype)) for length in LENGTHS)
        found[f"torch's ring of {size}"] = max(of_torchs_ring(ring, length) for length in LENGTHS)
        found[f"torch's sharding to {size}"] = float(
            not all(of_torchs_sharding(meshes[size], ring, length) for length in LENGTHS)
        )
    return found


def test_attention_around_a_ring_is_that_of_the_whole_and_torch_cuts_alike():
    """Output and gradients, on 2 and on 4 of 4 ranks; torch's own ring attention takes the same slices."""
    of_ranks = world_of(4, figures_of)
    assert len(of_ranks[0]) == 8
    for what, how_far in ((what, max(one[what] for one in of_ranks)) for what in of_ranks[0]):
        bar = 1e-12 if "float64" in what else 1e-5  # torch's merges in float32
        assert how_far <= bar, what


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_loss_and_gradients_of_a_shared_step_are_those_of_one_process(sync):
    """The example: planned and delivered through the balancer, trained with rings of 2 and of 4, in float32."""
    figures = json.loads(run_world(4, EXAMPLE, sync))
    assert figures["loss_apart"] <= 1e-5
    assert figures["gradient_apart"] <= 1e-5
    by_degree = figures["rollouts_by_degree"]
    assert by_degree.keys() == {"1", "2", "4"}
    assert sum(by_degree.values()) == 48
