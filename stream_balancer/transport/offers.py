"""What a producer asks, as the controller's event loop takes it: a message and its buffers, decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from torch import Tensor

from stream_balancer.core.groups import GroupSize, closed
from stream_balancer.errors import RolloutError
from stream_balancer.transport.leases import Leases
from stream_balancer.transport.requests import Mode
from stream_balancer.types import Rollout
from stream_balancer.wire.messages import (
    Cancel,
    DeclareGroup,
    EndInput,
    Put,
    PutGroup,
    ReleaseSlot,
    Reserve,
    RolloutHeader,
    StatisticsRequest,
)

__all__ = ["Item", "Offer", "RequestMessage", "headers_of", "offer_of"]

RequestMessage: TypeAlias = Put | PutGroup | DeclareGroup | Reserve | EndInput | StatisticsRequest
"""What is numbered, and gets one reply."""


class Offer(NamedTuple):
    """A request that has arrived at the controller."""

    number: int
    mode: Mode
    rollouts: tuple[Rollout, ...] = ()
    refusal: str | None = None
    """Why it cannot be put: one of its rollouts is none. The connection is in order. (Text: an error would keep the
    frames it went through alive.)"""
    declared: GroupSize | None = None
    """Of its group, with or without rollouts."""
    slot: int | None = None
    """The slot it is put in."""
    reserve: Reserve | None = None
    """What is asked for, if that is a slot."""


Item: TypeAlias = Offer | Cancel | ReleaseSlot


def headers_of(message: Put | PutGroup) -> Sequence[RolloutHeader]:
    """One for each rollout."""
    return (message.rollout,) if isinstance(message, Put) else message.rollouts


def offer_of(message: RequestMessage, buffers: Sequence[Tensor], leases: Leases) -> Offer:
    """Decode it. A rollout that is none makes a refusal; WireError: what breaks the protocol. O(bytes)."""
    number = message.number
    if isinstance(message, (Put, PutGroup)):
        return _put(message, buffers, leases)
    if isinstance(message, DeclareGroup):
        mode = Mode.ABANDON if message.fate == "abandoned" else Mode.DECLARE
        declared = GroupSize(message.group_id, message.size if message.fate == "expected" else None)
        return Offer(number, mode, declared=declared)
    if isinstance(message, Reserve):
        return Offer(number, Mode.RESERVE, reserve=message)
    return Offer(number, Mode.END if isinstance(message, EndInput) else Mode.STATISTICS)


def _put(message: Put | PutGroup, buffers: Sequence[Tensor], leases: Leases) -> Offer:
    rollouts, refusal = [], None
    for header, buffer in zip(headers_of(message), buffers, strict=True):
        try:
            rollouts.append(leases.decode(header, buffer))
        except RolloutError as error:
            refusal = refusal or str(error)
    if isinstance(message, PutGroup):
        declared = closed(rollouts[0].group_id) if rollouts and message.complete else None
        return Offer(message.number, Mode.GROUP, tuple(rollouts), refusal, declared, message.slot)
    mode = Mode.PUT if message.wait else Mode.NOWAIT
    return Offer(message.number, mode, tuple(rollouts), refusal, slot=message.slot)
