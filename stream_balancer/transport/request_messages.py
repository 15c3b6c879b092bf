"""A request as it travels: its message, and a buffer for each rollout."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from stream_balancer.transport.channel import Outgoing, Source
from stream_balancer.transport.requests import Mode, PendingRequest, Request
from stream_balancer.wire.messages import (
    DeclareGroup,
    EndInput,
    Put,
    PutGroup,
    Reserve,
    RolloutHeader,
    StatisticsRequest,
)
from stream_balancer.wire.rollouts import encode_rollout

__all__ = ["EncodedRequest", "message_of"]


class EncodedRequest(PendingRequest):
    """A request whose rollouts travel one by one."""

    def __init__(self, request: Request, callback: Callable[[], object], *, kept: bool = False) -> None:
        """``kept``: only descriptions are sent, the producer keeps the payloads."""
        self._encoded = [encode_rollout(rollout, kept=kept) for rollout in request.rollouts]
        self._kept = kept
        headers = [one.header for one in self._encoded]
        super().__init__(
            request,
            callback,
            total_bytes=sum(header.total_bytes for header in headers),
            wire_bytes=sum(header.wire_bytes for header in headers),
        )

    def outgoing(self) -> Outgoing:
        """Its message and buffers, once it has its number."""
        request, number = self.request, self.number
        assert number is not None
        if not self._encoded:
            return message_of(self)
        sources = [Source(one.header.wire_bytes, one.fill, one.pieces) for one in self._encoded]
        slot = None if request.slot is None else request.slot.number
        if request.mode is Mode.GROUP:
            return Outgoing(PutGroup(number, self._headers(), request.declared is not None, slot), sources)
        return Outgoing(Put(number, self._headers()[0], request.mode is Mode.PUT, slot), sources)

    def _headers(self) -> tuple[RolloutHeader, ...]:
        if not self._kept:
            return tuple(one.header for one in self._encoded)
        return tuple(
            msgspec.structs.replace(one.header, payload=key)
            for one, key in zip(self._encoded, self.payloads, strict=True)
        )


def message_of(pending: PendingRequest) -> Outgoing:
    """The message of a request without rollouts, once it has its number."""
    request, number = pending.request, pending.number
    assert number is not None
    if request.mode is Mode.RESERVE:
        return Outgoing(_reserve(request, number))
    if request.mode is Mode.END:
        return Outgoing(EndInput(number))
    if request.mode is Mode.STATISTICS:
        return Outgoing(StatisticsRequest(number))
    assert request.declared is not None
    group_id, size = request.declared
    if request.mode is Mode.ABANDON:
        return Outgoing(DeclareGroup(number, group_id, "abandoned"))
    if size is None:
        return Outgoing(DeclareGroup(number, group_id, "closed"))
    return Outgoing(DeclareGroup(number, group_id, "expected", size))


def _reserve(request: Request, number: int) -> Reserve:
    slot = request.slot
    if slot is None:
        return Reserve(number, request.places)
    slot.number = number  # for the puts in it, which are sent behind this
    return Reserve(number, slot.missing, slot.version)
