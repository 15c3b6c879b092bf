"""What a put is on its way: the producer's book, and the format. No sockets, no event loop.

::

    Producer --offer--> PutLedger --PUTS--> Intake --take--> attend() --put--> balancer
    Producer <-verdict- PutLedger <-ACCEPTED, REFUSED- Intake <-answer-'

A put's bytes count against the producer's ``staged_bytes`` from the moment they are sent until its verdict comes, so
what the controller stages per producer is bounded; what does not fit waits where it was made. A put larger than that
travels alone, up to ``max_put_bytes``. Every put that was sent gets exactly one verdict, a cancelled one too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from stream_balancer.errors import (
    BrokenResourceError,
    ClosedResourceError,
    DuplicateRolloutError,
    JournalError,
    RolloutError,
    WireError,
    WouldBlock,
)
from stream_balancer.types import MicroBatch, RankBatch, Rollout
from stream_balancer.wire.partial_share import describe
from stream_balancer.wire.share import FRAME_BYTES, Encoded, Frame, Kind, checked, decode, encode, read_frame

__all__ = ["Limits", "Mode", "Offer", "PutLedger", "Ticket", "WireTicket", "Withdrawal", "Withdrawn"]

BUNDLE_BYTES = 256 * 1024
BUNDLE_PUTS = 64
_MASK_BITS = 62  # of a non-negative int64
T = TypeVar("T", bound="Ticket")
ENDED = "put() after end(): the balancer takes no more rollouts. Put before calling end()"


class Limits(NamedTuple):
    """What the controller takes from one producer."""

    staged_bytes: int = 64 * 2**20  # hundreds of long text rollouts
    """Bytes of puts without a verdict that may be on their way, or lie at the controller. One larger put travels
    alone."""
    max_put_bytes: int = 2**30
    """Bytes of one put."""

    def check(self) -> Limits:
        """Itself. Raises ValueError if a knob makes no sense."""
        for name, value in self._asdict().items():
            if value < 1:
                raise ValueError(f"{name} must be >= 1, not {value}: no put could ever be sent")
        return self


class Mode(IntEnum):
    """How rollouts were put."""

    PUT = 0
    GROUP = 1
    NOWAIT = 2


class Offer(NamedTuple):
    """A put that has arrived at the controller."""

    number: int
    mode: Mode
    rollouts: tuple[Rollout, ...]
    refusal: str | None = None
    """Why it cannot be put: one of its rollouts is none. The link is in order. (Text: an error would keep the frames it
    went through alive.)"""


class Withdrawal(NamedTuple):
    """The put of this number is not wanted any more."""

    number: int


class Withdrawn(Exception):  # noqa: N818 - a verdict, not a fault
    """The verdict on a put that was withdrawn before it was accepted."""


_REASONS: tuple[type[Exception], ...] = (
    Withdrawn, RolloutError, DuplicateRolloutError, ClosedResourceError, WouldBlock, TypeError, ValueError, JournalError
)  # fmt: skip
"""What a refusal may be; the index travels. Anything else arrives as BrokenResourceError."""


def reason_of(error: Exception) -> tuple[int, str]:
    """(index, text) of an error, for the wire."""
    exact = [index for index, kind in enumerate(_REASONS) if type(error) is kind]
    if exact:
        return exact[0], str(error)
    return len(_REASONS), f"the controller's put failed: {type(error).__name__}: {error}"


def error_of(reason: int, text: str) -> Exception:
    """The error of a refusal, as the balancer raised it."""
    if reason > len(_REASONS):
        raise WireError(f"the controller refused a put for an unknown reason: {reason}")
    kind = BrokenResourceError if reason == len(_REASONS) else _REASONS[reason]
    return kind(text) if text else kind()


class Ticket:
    """A put on its way."""

    def __init__(
        self, rollouts: Sequence[Rollout], mode: Mode, callback: Callable[[], object], *, put_bytes: int, size: int
    ) -> None:
        self.rollouts = tuple(rollouts)
        self.mode = mode
        self.put_bytes = put_bytes
        """Bytes of the whole put, wherever its tokens are."""
        self.size = size
        """Bytes that travel to the controller."""
        self.first_payload = 0
        """Number of its first rollout among all this producer sent; the others follow. Set once sent."""
        self.number: int | None = None
        """Set once sent."""
        self.withdrawn = False
        self.sent_before = False
        """To a controller that died before it answered."""
        self.done = False
        self.error: Exception | None = None
        """None = accepted, once ``done``."""
        self._callback = callback

    @property
    def payloads(self) -> range:
        """Numbers of its rollouts among all this producer sent."""
        return range(self.first_payload, self.first_payload + len(self.rollouts))

    def settle(self, error: Exception | None) -> None:
        """The verdict; the first one counts. From any thread."""
        if not self.done:
            self.error = error
            self.done = True
            self._callback()

    def lost(self, cause: str) -> BrokenResourceError:
        """What to raise when the controller is gone."""
        names = ", ".join(repr(r.rollout_id) for r in self.rollouts[:3])
        fate = (
            "it had not been sent, so it was not accepted"
            if self.number is None
            else "whether it was accepted is not known"
        )
        return BrokenResourceError(
            f"the controller was lost while put() of rollout {names} waited: {cause}; {fate}. Connect again and put "
            "it again: a DuplicateRolloutError then means that the first put was accepted"
        )


class WireTicket(Ticket):
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


class PutLedger(Generic[T]):
    """The producer's book: which puts wait here, which are on their way. Safe to use from any thread."""

    def __init__(self, *, bundle_bytes: int = BUNDLE_BYTES, bundle_puts: int = BUNDLE_PUTS) -> None:
        """Small puts that wait at the same time travel together, up to this size and number."""
        self._bundle_bytes, self._bundle_puts = bundle_bytes, bundle_puts
        self._lock = threading.Lock()
        self._waiting: dict[T, None] = {}
        self._on_way: dict[int, T] = {}
        self._staged = 0
        self._limits: Limits | None = None
        self._next = self._next_payload = 0
        self._end: Callable[[T], Exception] | None = None

    @property
    def num_on_way(self) -> int:
        """Puts sent and without a verdict."""
        return len(self._on_way)

    @property
    def num_sent(self) -> int:
        """Puts that were ever sent: the number of the next."""
        return self._next

    @property
    def closed(self) -> bool:
        """No more puts are taken."""
        return self._end is not None

    def open(self, limits: Limits) -> None:
        """The controller has said how much it takes."""
        self._limits = limits

    def offer(self, ticket: T) -> None:
        """Enter a put. It may have its verdict at once."""
        with self._lock:
            end = self._end
            if end is None:
                self._waiting[ticket] = None
        if end is not None:
            ticket.settle(end(ticket))

    def take(self) -> list[T]:
        """The next puts to send, in order: what the limit allows, small ones together."""
        taken: list[T] = []
        refused: list[T] = []
        size = 0
        limits = self._limits
        if limits is None:
            return []
        with self._lock:
            while self._waiting:
                ticket = next(iter(self._waiting))
                if ticket.put_bytes > limits.max_put_bytes:
                    refused.append(ticket)
                    del self._waiting[ticket]
                    continue
                if self._staged and self._staged + ticket.size > limits.staged_bytes:
                    break
                if taken and (size + ticket.size > self._bundle_bytes or len(taken) == self._bundle_puts):
                    break
                del self._waiting[ticket]
                ticket.number, self._next = self._next, self._next + 1
                ticket.first_payload = self._next_payload
                self._next_payload += len(ticket.rollouts)
                self._on_way[ticket.number] = ticket
                self._staged += ticket.size
                size += ticket.size
                taken.append(ticket)
        for ticket in refused:
            ticket.settle(
                RolloutError(
                    f"put of rollout {ticket.rollouts[0].rollout_id!r} takes {ticket.put_bytes} bytes, more than the "
                    f"controller's max_put_bytes ({limits.max_put_bytes}). Raise max_put_bytes of the transport, or "
                    "put less at once"
                )
            )
        return taken

    def withdraw(self, ticket: T, why: str = "") -> int | None:
        """Take a put back. The number to cancel if it is on its way; else it is settled now. ``why``: what it has
        waited for here, if not for room."""
        with self._lock:
            ticket.withdrawn = True
            here = self._waiting.pop(ticket, self) is None
            number = ticket.number
        if here:
            ticket.settle(Withdrawn(why))
        return None if ticket.done else number

    def settle(self, number: int, error: Exception | None) -> None:
        """A verdict came. Raises WireError if there is no such put."""
        with self._lock:
            ticket = self._on_way.pop(number, None)
            if ticket is None:
                raise WireError(f"the controller answered put number {number}, which is not on its way")
            self._staged -= ticket.size
        if isinstance(error, DuplicateRolloutError) and ticket.sent_before:
            error = None  # the first time it was accepted, and the answer lost
        if isinstance(error, Withdrawn) and not ticket.withdrawn:
            error = ClosedResourceError("the producer was closed while put() waited; the rollout was not accepted")
        ticket.settle(error)

    def again(self) -> list[int]:
        """The controller was started again and knows only what it had accepted: what is on its way is to be sent
        again, first. The numbers that those will have whose withdrawal must be sent again."""
        with self._lock:
            tickets = list(self._on_way.values())
            for ticket in tickets:
                ticket.sent_before = True
            self._waiting = dict.fromkeys(tickets) | self._waiting
            self._on_way, self._staged, self._limits = {}, 0, None
            return [self._next + index for index, ticket in enumerate(tickets) if ticket.withdrawn]

    def close(self) -> list[int]:
        """No more puts. Those that wait here end; the numbers of those to be cancelled."""
        with self._lock:
            if self._end is None:
                self._end = lambda _: ClosedResourceError(
                    "put() on a closed producer: close() was called, or its 'with' block was left"
                )
            end = self._end
            waiting, self._waiting = list(self._waiting), {}
            on_way = list(self._on_way)
        for ticket in waiting:
            ticket.settle(end(ticket))
        return on_way

    def end(self, error: Callable[[T], Exception]) -> None:
        """The link is over: every put ends with ``error(put)``, later ones too."""
        with self._lock:
            if self._end is None:
                self._end = error
            tickets = [*self._on_way.values(), *self._waiting]
            self._on_way, self._waiting = {}, {}
            self._staged = 0
        for ticket in tickets:
            ticket.settle(error(ticket))


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
