"""The codec gives a rank what ``wire.rank_batch`` gave it. To be deleted with that."""

from __future__ import annotations

import pytest
import torch
from codec_help import carried
from scripted import awkward_micro_batches, rank_batch, same_rollout
from test_codec_holes import same_layout
from test_shared_rollouts import a_rollout

from stream_balancer.testing import make_rollout
from stream_balancer.types import ExecutionSize, MicroBatch
from stream_balancer.wire import rank_batch as wire

BATCHES = [
    [MicroBatch.of(its) for its in awkward_micro_batches()],
    [MicroBatch.of([make_rollout(5, "a"), make_rollout(1, "b").padding_copy("padding-0")])],
    [MicroBatch.shared([a_rollout(33), a_rollout(2, "s")], (1, 0, 4), 2), MicroBatch.of([a_rollout(5, "own")])],
    [MicroBatch.of([make_rollout(5, "a"), make_rollout(1, "b")], None, (ExecutionSize(3, 9), ExecutionSize(1, 1)))],
]


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("micro_batches", BATCHES)
def test_as_before(micro_batches: list[MicroBatch], narrow: bool) -> None:
    encoded = wire.encode(rank_batch(*micro_batches, rank=4, dp_size=5), narrow=narrow)
    buffer = torch.zeros(encoded.message.total_bytes, dtype=torch.uint8)
    assert list(encoded.fill(buffer))
    before = wire.decode(encoded.message, buffer).micro_batches
    for ours, theirs in zip(carried(*micro_batches, narrow=narrow).micro_batches, before, strict=True):
        assert ours.execution_sizes == theirs.execution_sizes
        same_layout(ours, theirs)
        assert all(same_rollout(a, b) for a, b in zip(ours.rollouts, theirs.rollouts, strict=True))
