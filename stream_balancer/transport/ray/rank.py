"""A rank's end over Ray: actor calls to the controller, payloads from the object store."""

from __future__ import annotations

from typing import Any

from stream_balancer.transport.rank_port import Decode, RankPort
from stream_balancer.transport.ray.bundles import ObjectStore
from stream_balancer.transport.ray.caller import CallingChannel
from stream_balancer.wire.messages import JoinRank
from stream_balancer.wire.rank_batch import decode

__all__ = ["open_port"]


def open_port(
    actor: Any,
    request: JoinRank,
    *,
    rejoin: bool = False,
    linger_s: float = 5.0,
    decode: Decode = decode,
    pinned: bool = False,
) -> RankPort:
    """A rank's port, for ``RankFeed``; connects in the background. ``actor``: a handle of the actor that hosts the
    balancer. ``rejoin``: it has a journal, so Ray starts it again should it die, and it goes on."""

    def connect() -> CallingChannel:
        return CallingChannel(actor, request, name=f"sb-ray-rank-{request.rank}")

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
