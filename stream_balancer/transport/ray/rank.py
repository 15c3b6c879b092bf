"""A rank's end over Ray: actor calls to the controller, payloads from the object store."""

from __future__ import annotations

import secrets
from typing import Any

from stream_balancer.transport.rank_port import Decode, RankPort
from stream_balancer.transport.ray.bundles import ObjectStore
from stream_balancer.transport.ray.caller import CallingChannel
from stream_balancer.wire.messages import JoinRank
from stream_balancer.wire.share import decode

__all__ = ["open_port"]


def open_port(
    actor: Any,
    *,
    rank: int,
    dp_size: int,
    depth: int = 2,
    incarnation: int = 0,
    max_batch_bytes: int = 4 * 2**30,
    rejoin: bool = False,
    linger_s: float = 5.0,
    decode: Decode = decode,
    pinned: bool = False,
) -> RankPort:
    """A rank's port, for ``RankFeed``; connects in the background. ``actor``: a handle of the actor that hosts the
    balancer. ``rejoin``: it has a journal, so Ray starts it again should it die, and it goes on."""
    request = JoinRank(rank, dp_size, incarnation, depth, max_batch_bytes, feed_id=secrets.token_bytes(8))

    def connect() -> CallingChannel:
        return CallingChannel(actor, request, name=f"sb-ray-rank-{rank}")

    port = RankPort(
        connect(),
        request,
        decode=decode,
        pinned=pinned,
        payloads=ObjectStore(),
        linger_s=linger_s,
        reconnect=connect if rejoin else None,
    )
    port.start()
    return port
