"""What a put is on a socket: frames, each rollout by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from stream_balancer.errors import RolloutError, WireError
from stream_balancer.transport.producer_session import Offer
from stream_balancer.transport.put_ledger import Mode, PendingPut
from stream_balancer.types import MicroBatch, RankBatch, Rollout
from stream_balancer.wire.partial_share import describe
from stream_balancer.wire.share import FRAME_BYTES, Encoded, Frame, Kind, checked, decode, encode, read_frame

__all__ = ["WireTicket", "masks_of", "numbers_in", "read_puts", "write_puts"]

_MASK_BITS = 62  # of a non-negative int64


class WireTicket(PendingPut):
    """A put that travels as frames, each rollout by itself."""

    def __init__(
        self, rollouts: Sequence[Rollout], mode: Mode, callback: Callable[[], object], *, held: bool = False
    ) -> None:
        """``held``: only a description is sent; the producer keeps the tokens."""
        self.parts: list[Encoded] = [
            encode(_lone(rollout, index, len(rollouts)), narrow=False) for index, rollout in enumerate(rollouts)
        ]
        self.descriptions = [describe(part) for part in self.parts] if held else None
        put_bytes = size = sum(FRAME_BYTES + part.frame.wire_bytes for part in self.parts)
        if self.descriptions is not None:
            size = sum(FRAME_BYTES + len(body) for _, body in self.descriptions)
        super().__init__(rollouts, mode, callback, put_bytes=put_bytes, size=size)


def _lone(rollout: Rollout, index: int, count: int) -> RankBatch:
    return RankBatch(
        step=0,
        rank=index,
        dp_size=count,
        micro_batches=(MicroBatch.of([rollout]),),
        load=0.0,
        global_num_rollouts=1,
        global_num_tokens=0,
        global_num_loss_tokens=0,
    )


def numbers_in(mask: int, first: int) -> list[int]:
    """The numbers a frame names: ``first + i`` for every bit ``i``."""
    return [first + bit for bit in range(_MASK_BITS) if mask >> bit & 1]


def masks_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """(mask, first) pairs that name ``numbers``, for as few frames as need be."""
    masks = []
    left = sorted(numbers)
    while left:
        first = left[0]
        masks.append((sum(1 << n - first for n in left if n - first < _MASK_BITS), first))
        left = [n for n in left if n - first >= _MASK_BITS]
    return masks


# --- the format ------------------------------------------------------------------------------------------------------


def write_puts(tickets: Sequence[WireTicket]) -> list[Tensor]:
    """``[n]`` uint8 each: for each rollout a PUT frame and its slab, or a HELD frame and its description. Copies no
    token."""
    found: list[Tensor] = []
    for ticket in tickets:
        for index, part in enumerate(ticket.parts):
            frame, body = (part.frame, b"") if ticket.descriptions is None else ticket.descriptions[index]
            frame = frame._replace(
                kind=Kind.HELD if body else Kind.PUT,
                step=-1 if ticket.number is None else ticket.number,
                taken=int(ticket.mode),
                slab=ticket.first_payload + index,
            )
            found.append(frame.pack().view(torch.uint8))
            found += [torch.frombuffer(bytearray(body), dtype=torch.uint8)] if body else part.pieces()
    return found


def read_puts(
    slab: Tensor, next_number: int, remote: Callable[[Frame, Tensor], Rollout] | None = None
) -> list[tuple[Offer, int]]:
    """Offers and their sizes in bytes. Raises WireError for anything :func:`write_puts` would not have made; an offer
    whose bytes are in order, but hold what no Rollout may be, has a ``refusal``.

    ``remote`` makes a rollout of a HELD frame and its description; None: there may be no such frames."""
    offers: list[tuple[Offer, int]] = []
    at, total = 0, slab.numel()
    group: list[Rollout] = []
    refusal: str | None = None
    index = size = 0
    while at < total:
        if at + FRAME_BYTES > total:
            raise WireError("puts end in the middle of a frame")
        frame = read_frame(slab[at : at + FRAME_BYTES].view(torch.int64))
        at += FRAME_BYTES
        _check_put(frame, next_number, index, total - at, remote is not None)
        body = slab[at : at + frame.wire_bytes]
        alone = FRAME_BYTES + frame.wire_bytes == total
        try:
            if frame.kind is Kind.HELD and remote is not None:
                group.append(remote(frame, body))
            else:  # a copy, so that each can be freed by itself
                group.append(_only(decode(frame, body if alone else body.clone(), check_rollouts=False)))
        except RolloutError as error:
            refusal = refusal or str(error)
        at += frame.wire_bytes
        index += 1
        size += FRAME_BYTES + frame.wire_bytes
        if index == frame.dp_size:
            offers.append((Offer(next_number, Mode(frame.taken), tuple(group), refusal), size))
            group, refusal, index, size, next_number = [], None, 0, 0, next_number + 1
    if index or not offers:
        raise WireError("puts end in the middle of a group")
    return offers


def _check_put(frame: Frame, number: int, index: int, room: int, held_allowed: bool) -> None:
    """Refuse a frame inside PUTS that is not the next, or whose body does not fit. Before it is read."""
    held = frame.kind is Kind.HELD
    if frame.kind not in (Kind.PUT, Kind.HELD) or frame.step != number or frame.rank != index:
        raise WireError(f"expected rollout {index} of put number {number}, got {frame}")
    if held and not held_allowed:
        raise WireError("a producer that did not say where it serves cannot hold what it puts")
    whole = frame.wire_bytes == frame.total_bytes or held
    if not (0 < frame.meta_bytes <= frame.wire_bytes <= room and whole) or frame.wire_bytes % 64:
        raise WireError(f"a put announces impossible sizes: {frame}")
    if frame.taken > Mode.NOWAIT or frame.dp_size < 1 or (frame.dp_size > 1 and frame.taken != Mode.GROUP):
        raise WireError(f"a put of an unknown sort: {frame}")


def _only(share: RankBatch) -> Rollout:
    """The one rollout, validated as if it had been made here: its counts are trained on."""
    if share.num_rollouts != 1:
        raise WireError("a put frame must hold one rollout")
    return checked(share.rollouts[0])
