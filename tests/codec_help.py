"""What a channel does with what the codec makes, without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from stream_balancer.rollouts import MicroBatch, Rollout
from stream_balancer.wire.codec import (
    Decoded,
    Encoded,
    Handle,
    Leases,
    Owner,
    RemoteRollout,
    decode,
    decode_rollouts,
    encode,
    encode_rollouts,
    payload_of,
)  # fmt: skip
from stream_balancer.wire.payload import Memory

A, B = Owner("tcp://127.0.0.1:1", b"secret", "a"), Owner("tcp://127.0.0.1:2", b"secret", "b")


def received(encoded: Encoded) -> Memory | None:
    """The memory of who receives it: what does not come along is full of ones."""
    total, runs, _ = encoded.payload
    if not total:
        return None
    came = b"".join(encoded.payload.views())
    memory = np.full(total, 255, dtype=np.uint8)
    at = 0
    for offset, size in zip(runs[::2], runs[1::2], strict=True):
        memory[offset : offset + size] = np.frombuffer(came[at : at + size], dtype=np.uint8)
        at += size
    assert at == len(came), "the runs are not as long as the pieces"
    return memory


def carried(*micro_batches: MicroBatch | Sequence[Rollout]) -> Decoded:
    """As they arrive at a rank."""
    cut = [one if isinstance(one, MicroBatch) else MicroBatch.of(list(one)) for one in micro_batches]
    encoded = encode(cut)
    return decode(encoded.header, received(encoded))


def put(*rollouts: Rollout) -> list[Rollout]:
    """As they arrive at the controller."""
    encoded = encode_rollouts(rollouts)
    return decode_rollouts(encoded.header, received(encoded))


def remote(local: Rollout, owner: Owner, key: int, its: Leases | None = None) -> RemoteRollout:
    """The rollout, as the controller has it if its owner keeps it."""
    encoded = encode_rollouts([local], handles=[Handle(owner, key)])
    assert encoded.payload.total == 0
    (found,) = decode_rollouts(encoded.header, None, lambda _: its or Leases())
    assert isinstance(found, RemoteRollout)
    return found


def fill(decoded: Decoded, kept: Mapping[tuple[str, int], Rollout]) -> None:
    """What :class:`stream_balancer.client.payloads.Fetcher` does, with owners at hand."""
    for one in decoded.holes():
        one.fill(payload_of(kept[one.owner.label, one.key]))


def rollout(n: int, **fields: Any) -> Rollout:
    length = 3 + 2 * n
    tokens = {
        "input_ids": torch.arange(length) + 10 * n,
        "loss_mask": torch.arange(length) % 2 == 0,
        "hidden": torch.full((length, 3), float(n), dtype=torch.bfloat16),
    }
    ordinary: dict[str, Any] = {
        "tokens": dict(reversed(tokens.items())) if n % 2 else tokens,  # producers need not agree on an order
        "scalars": {"reward": 0.5 * n},
        "tensors": {"pixels": torch.full((n, 2), n), "grid": torch.tensor(n)},
        "metadata": {"n": n},
        "rollout_id": f"r{n}",
        "version": n,
    }
    return Rollout(**(ordinary | fields))
