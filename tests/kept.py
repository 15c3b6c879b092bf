"""Payloads that stay with a producer, of ranks in one event loop: what is gone, how often it was read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

import stream_balancer as sb
from stream_balancer.types import Rollout
from stream_balancer.types.shared import part_of
from stream_balancer.wire.messages import Owner, RolloutHeader
from stream_balancer.wire.partial_batch import Lease, WantedPayload, payload
from stream_balancer.wire.rollouts import decode_kept, encode_rollout

OWNER = Owner("127.0.0.1", 1, "token", "worker 3")


class Kept:
    """A producer's payloads. ``gone`` are not there any more; a ``gate`` holds the fetching up."""

    def __init__(self) -> None:
        self.payloads: list[Rollout] = []
        self.gone: set[int] = set()
        self.num_reads = self.num_bytes = 0

    def remote(self, rollout: Rollout) -> Rollout:
        """The rollout, as the controller has it."""
        encoded = encode_rollout(rollout, kept=True)
        header = encoded.header
        buffer = torch.zeros(header.wire_bytes, dtype=torch.uint8)
        for _ in encoded.fill(buffer):
            pass
        self.payloads.append(rollout)
        key = len(self.payloads) - 1
        named = RolloutHeader(header.meta_bytes, header.meta_crc, header.wire_bytes, header.total_bytes, key)
        return decode_kept(named, buffer, OWNER, Lease())

    def read(self, wanted: Sequence[WantedPayload]) -> Mapping[int, str]:
        """See PayloadSource."""
        self.num_reads += 1
        gone = {}
        for index, one in enumerate(wanted):
            if one.key in self.gone:
                gone[index] = "connection closed by peer"
                continue
            kept = self.payloads[one.key]
            if one.part is not None:
                kept = part_of(kept, one.part.degree, one.part.place)
            self.num_bytes += sum(piece.numel() for piece in one.pieces)
            for piece, data in zip(one.pieces, payload(kept), strict=True):
                piece.copy_(data)
        return gone

    def close(self) -> None:
        """See PayloadSource."""


class Stuck(Kept):
    """Dies instead of fetching."""

    def __init__(self, die: Callable[[], object]) -> None:
        super().__init__()
        self._die = die

    def read(self, wanted: Sequence[WantedPayload]) -> Mapping[int, str]:
        """See PayloadSource."""
        self._die()
        raise sb.ClosedResourceError
