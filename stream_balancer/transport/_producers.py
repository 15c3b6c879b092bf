"""Both ends of a producer's link: rollouts towards the balancer, verdicts back.

::

    Producer --offer--> Ledger --PUTS--> Intake --take--> attend() --put--> balancer
    Producer <-verdict- Ledger <-ACCEPTED/REFUSED- Intake <-answer-'

A put's bytes count against the producer's ``staged_bytes`` from the moment they are sent until its verdict comes, so
what the controller stages per producer is bounded; what does not fit waits where it was made. A put larger than that
travels alone, up to ``max_put_bytes``. Every put that was sent gets exactly one verdict, a cancelled one too.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import anyio
import torch
from torch import Tensor

from stream_balancer.errors import (
    BrokenResourceError,
    ClosedResourceError,
    DuplicateRolloutError,
    EndOfStream,
    RolloutError,
    WireError,
    WouldBlock,
)
from stream_balancer.transport._endpoint import Endpoint, Pair
from stream_balancer.transport._links import chunks, short
from stream_balancer.types import MicroBatch, RankBatch, Rollout
from stream_balancer.wire import FRAME_BYTES, FRAME_WORDS, Encoded, Frame, Kind, decode, encode, read_frame

__all__ = ["GlooIntake", "Mode", "Offer", "OutletBase", "PutLedger", "Ticket", "Withdrawal", "Withdrawn"]

CHUNK_BYTES = 16 * 2**20
BUNDLE_BYTES = 256 * 1024  # small puts that wait at the same time travel together up to this size
BUNDLE_PUTS = 64
DEFAULT_STAGED_BYTES = 64 * 2**20  # per producer, on the controller: hundreds of long text rollouts
DEFAULT_MAX_PUT_BYTES = 2**30
_MAX_TEXT_BYTES = 2**16
_MASK_BITS = 62  # of a non-negative int64
ENDED = "put() after end(): the balancer takes no more rollouts. Put before calling end()"

logger = logging.getLogger("stream_balancer.transport")


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


class Withdrawal(NamedTuple):
    """The put of this number is not wanted any more."""

    number: int


class Withdrawn(Exception):  # noqa: N818 - a verdict, not a fault
    """The verdict on a put that was withdrawn before it was accepted."""


_REASONS: tuple[type[Exception], ...] = (
    Withdrawn, RolloutError, DuplicateRolloutError, ClosedResourceError, WouldBlock, TypeError, ValueError
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

    def __init__(self, rollouts: Sequence[Rollout], mode: Mode, callback: Callable[[], object]) -> None:
        self.rollouts = tuple(rollouts)
        self.mode = mode
        self.parts: list[Encoded] = [
            encode(_lone(rollout, index, len(rollouts)), narrow=False) for index, rollout in enumerate(rollouts)
        ]
        self.size = sum(FRAME_BYTES + part.frame.wire_bytes for part in self.parts)
        self.number: int | None = None
        """Set once sent."""
        self.withdrawn = False
        self.done = False
        self.error: Exception | None = None
        """None = accepted, once ``done``."""
        self._callback = callback

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


class PutLedger:
    """The producer's book: which puts wait here, which are on their way. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Ticket, None] = {}
        self._on_way: dict[int, Ticket] = {}
        self._staged = 0
        self._limit = self._max_put = 0
        self._next = 0
        self._end: Callable[[Ticket], Exception] | None = None

    @property
    def num_on_way(self) -> int:
        """Puts sent and without a verdict."""
        return len(self._on_way)

    @property
    def closed(self) -> bool:
        """No more puts are taken."""
        return self._end is not None

    def open(self, staged_bytes: int, max_put_bytes: int) -> None:
        """The controller has said how much it takes."""
        with self._lock:
            self._limit, self._max_put = staged_bytes, max_put_bytes

    def offer(self, ticket: Ticket) -> None:
        """Enter a put. It may have its verdict at once."""
        with self._lock:
            end = self._end
            if end is None:
                self._waiting[ticket] = None
        if end is not None:
            ticket.settle(end(ticket))

    def take(self) -> list[Ticket]:
        """The next puts to send, in order: what the limit allows, small ones together."""
        taken: list[Ticket] = []
        refused: list[Ticket] = []
        size = 0
        with self._lock:
            while self._waiting and self._limit:
                ticket = next(iter(self._waiting))
                if ticket.size > self._max_put:
                    refused.append(ticket)
                    del self._waiting[ticket]
                    continue
                if self._staged and self._staged + ticket.size > self._limit:
                    break
                if taken and (size + ticket.size > BUNDLE_BYTES or len(taken) == BUNDLE_PUTS):
                    break
                del self._waiting[ticket]
                ticket.number, self._next = self._next, self._next + 1
                self._on_way[ticket.number] = ticket
                self._staged += ticket.size
                size += ticket.size
                taken.append(ticket)
        for ticket in refused:
            ticket.settle(
                RolloutError(
                    f"put of rollout {ticket.rollouts[0].rollout_id!r} takes {ticket.size} bytes, more than the "
                    f"controller's max_put_bytes ({self._max_put}). Raise max_put_bytes of the transport, or put less "
                    "at once"
                )
            )
        return taken

    def withdraw(self, ticket: Ticket) -> int | None:
        """Take a put back. The number to cancel if it is on its way; else it is settled now."""
        with self._lock:
            ticket.withdrawn = True
            here = self._waiting.pop(ticket, self) is None
            number = ticket.number
        if here:
            ticket.settle(Withdrawn())
        return None if ticket.done else number

    def settle(self, number: int, error: Exception | None) -> None:
        """A verdict came. Raises WireError if there is no such put."""
        with self._lock:
            ticket = self._on_way.pop(number, None)
            if ticket is None:
                raise WireError(f"the controller answered put number {number}, which is not on its way")
            self._staged -= ticket.size
        if isinstance(error, Withdrawn) and not ticket.withdrawn:
            error = ClosedResourceError("the producer was closed while put() waited; the rollout was not accepted")
        ticket.settle(error)

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

    def end(self, error: Callable[[Ticket], Exception]) -> None:
        """The link is over: every put ends with ``error(put)``, later ones too."""
        with self._lock:
            if self._end is None:
                self._end = error
            tickets = [*self._on_way.values(), *self._waiting]
            self._on_way, self._waiting = {}, {}
            self._staged = 0
        for ticket in tickets:
            ticket.settle(error(ticket))


# --- the format ------------------------------------------------------------------------------------------------------


def write_puts(tickets: Sequence[Ticket]) -> Tensor:
    """``[bytes]`` uint8: for each rollout a PUT frame and its slab. Copies every token once."""
    slab = torch.empty(sum(ticket.size for ticket in tickets), dtype=torch.uint8)
    at = 0
    for ticket in tickets:
        for part in ticket.parts:
            frame = part.frame._replace(
                kind=Kind.PUT, step=-1 if ticket.number is None else ticket.number, taken=int(ticket.mode)
            )
            slab[at : at + FRAME_BYTES] = frame.pack().view(torch.uint8)
            at += FRAME_BYTES
            for _ in part.fill(slab[at : at + frame.wire_bytes]):
                pass
            at += frame.wire_bytes
    return slab


def read_puts(slab: Tensor, next_number: int) -> list[tuple[Offer, int]]:
    """Offers and their sizes in bytes. Raises WireError for anything :func:`write_puts` would not have made."""
    offers: list[tuple[Offer, int]] = []
    at, total = 0, slab.numel()
    group: list[Rollout] = []
    size = 0
    while at < total:
        if at + FRAME_BYTES > total:
            raise WireError("puts end in the middle of a frame")
        frame = read_frame(slab[at : at + FRAME_BYTES].view(torch.int64))
        at += FRAME_BYTES
        if frame.kind is not Kind.PUT or frame.step != next_number or frame.rank != len(group):
            raise WireError(f"expected rollout {len(group)} of put number {next_number}, got {frame}")
        if not 0 < frame.meta_bytes <= frame.wire_bytes == frame.total_bytes <= total - at or frame.wire_bytes % 64:
            raise WireError(f"a put announces impossible sizes: {frame}")
        if frame.taken > Mode.NOWAIT or frame.dp_size < 1 or (frame.dp_size > 1 and frame.taken != Mode.GROUP):
            raise WireError(f"a put of an unknown sort: {frame}")
        body = slab[at : at + frame.wire_bytes]
        alone = FRAME_BYTES + frame.wire_bytes == total
        group.append(_checked(decode(frame, body if alone else body.clone())))  # so that each can be freed by itself
        at += frame.wire_bytes
        size += FRAME_BYTES + frame.wire_bytes
        if len(group) == frame.dp_size:
            offers.append((Offer(next_number, Mode(frame.taken), tuple(group)), size))
            group, size, next_number = [], 0, next_number + 1
    if group or not offers:
        raise WireError("puts end in the middle of a group")
    return offers


def _checked(share: RankBatch) -> Rollout:
    """The one rollout, validated as if it had been made here: its counts are trained on."""
    if share.num_rollouts != 1:
        raise WireError("a put frame must hold one rollout")
    r = share.rollouts[0]
    try:
        return Rollout(
            tokens=r.tokens,
            scalars=r.scalars,
            tensors=r.tensors,
            metadata=r.metadata,
            rollout_id=r.rollout_id,
            group_id=r.group_id,
            version=r.version,
            cost=r.cost,
            is_padding=r.is_padding,
        )
    except RolloutError as error:
        raise WireError(f"a rollout that no Rollout could be: {error}") from None


# --- the producer's end ----------------------------------------------------------------------------------------------

_FLUSH = object()


class OutletBase(Endpoint):
    """The producer's end over a pair. Methods without an underscore may be called from any thread."""

    threads = True

    def __init__(self, name: str, keepalive_s: float, linger_s: float) -> None:
        super().__init__(f"sb-producer-{name}", keepalive_s, linger_s)
        self._book = PutLedger()
        self._sending_size = 0

    @property
    def linger_s(self) -> float:
        """Seconds a farewell, or the verdict on a cancelled put, is waited for."""
        return self._linger_s

    def offer(self, ticket: Ticket) -> None:
        """Have it sent when there is room. Never blocks."""
        self._book.offer(ticket)
        self._put(_FLUSH)

    def withdraw(self, ticket: Ticket) -> None:
        """Ask for it back; its verdict says whether that was in time. Never blocks."""
        number = self._book.withdraw(ticket)
        if number is not None:
            self._put(Frame(Kind.CANCEL, step=number))

    def close(self) -> None:
        """Withdraw what has no verdict, say good-bye, end the threads. Blocks for a moment. Idempotent."""
        for number in self._book.close():
            self._put(Frame(Kind.CANCEL, step=number))
        if self._pair is not None and not self._over and not self._closing:
            with self._changed:
                self._changed.wait_for(lambda: self._over or not self._book.num_on_way, self._linger_s)
            self._put(Frame(Kind.BYE))
            with self._changed:
                self._changed.wait_for(lambda: self._over, self._linger_s)
        self._shut()

    async def aclose(self) -> None:
        """:meth:`close`, without blocking the event loop."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.close, limiter=anyio.CapacityLimiter(1))

    def _shut(self) -> None:
        super()._shut()
        self._book.end(lambda ticket: ticket.lost("the link was closed"))

    # in the threads

    def _write(self, item: object) -> None:
        if isinstance(item, Frame):
            self._send_frame(item)
            return
        while tickets := self._book.take():
            slab = write_puts(tickets)
            _send_bulk(self, Frame(Kind.PUTS, wire_bytes=slab.numel(), total_bytes=slab.numel()), slab)

    def _handle(self, frame: Frame) -> bool:
        if frame.kind is Kind.ACCEPTED:
            for bit in range(_MASK_BITS):
                if frame.nanoseconds >> bit & 1:
                    self._settled(frame.step + bit, None)
        elif frame.kind is Kind.REFUSED:
            if frame.wire_bytes > _MAX_TEXT_BYTES:
                raise WireError(f"a refusal announces {frame.wire_bytes} bytes of text")
            text = bytes(_receive_bulk(self, frame).numpy()).decode(errors="replace") if frame.wire_bytes else ""
            self._settled(frame.step, error_of(frame.rank, text))
        elif frame.kind is Kind.END:
            self._book.end(lambda _: ClosedResourceError(ENDED))
            self._put(Frame(Kind.BYE))
        elif frame.kind is Kind.FIN:
            self._break()
            return False
        elif frame.kind is not Kind.ALIVE:
            raise WireError(f"the controller sent a {frame.kind.name} frame to a producer")
        return True

    def _settled(self, number: int, error: Exception | None) -> None:
        self._book.settle(number, error)
        with self._changed:
            self._outbox.append(_FLUSH)  # there is room for more
            self._changed.notify_all()

    def _lost(self, error: Exception) -> None:
        if isinstance(error, (ValueError, WireError)) or type(error) is ClosedResourceError:
            self._book.end(lambda _: error)
        else:
            cause = short(error)
            self._book.end(lambda ticket: ticket.lost(cause))


def _send_bulk(end: Endpoint, frame: Frame, slab: Tensor) -> None:
    pair = end._pair
    if pair is None:
        return
    end._send_frame(frame._replace(chunk_bytes=CHUNK_BYTES))
    works = [pair.send(piece) for piece in chunks(slab, CHUNK_BYTES, slab.numel())]
    end._send_frame(Frame(Kind.TRAILER, step=frame.step), works, slab)


def _receive_bulk(end: Endpoint, frame: Frame) -> Tensor:
    pair = end._pair
    if pair is None:
        raise ClosedResourceError
    if frame.chunk_bytes != CHUNK_BYTES:
        raise WireError(f"chunks of {frame.chunk_bytes} bytes, expected {CHUNK_BYTES}")
    slab = torch.empty(frame.wire_bytes, dtype=torch.uint8)
    posted = [pair.receive(piece) for piece in chunks(slab, CHUNK_BYTES, frame.wire_bytes)]
    words = torch.zeros(FRAME_WORDS, dtype=torch.int64)
    pair.receive(words).wait()  # behind the slab: once it is here, so is the slab
    for piece in posted:
        piece.wait()
    if end._note(words).kind is not Kind.TRAILER:
        raise WireError("bulk was not followed by its trailer")
    return slab


# --- the controller's end --------------------------------------------------------------------------------------------


class GlooIntake(Endpoint):
    """The controller's end. Methods without an underscore belong to the event loop it was made in."""

    def __init__(
        self,
        *,
        name: str,
        staged_bytes: int,
        max_put_bytes: int,
        connect: Callable[[], Pair],
        cancel_connect: Callable[[], None],
        settled: Callable[[GlooIntake], None],
        in_loop: Callable[[Callable[[], object]], None],
        keepalive_s: float,
        linger_s: float,
    ) -> None:
        super().__init__(f"sb-intake-{name}", keepalive_s, linger_s)
        self.name = name
        self._limit, self._max_put = staged_bytes, max_put_bytes
        self._make_pair, self._unmake_pair = connect, cancel_connect
        self._on_settled: Callable[[GlooIntake], None] = settled
        self._in_loop = in_loop
        self._mutex = threading.Lock()
        self._sizes: dict[int, int] = {}  # bytes of puts without a verdict
        self._next = 0
        self._inbox: deque[Offer | Withdrawal] = deque()
        self._given: dict[int, Offer] = {}  # taken, without a verdict
        self._accepted: deque[int] = deque()
        self._error: Exception | None = None
        self._ended = False
        self._callback: Callable[[], object] = lambda: None

    def subscribe(self, callback: Callable[[], object], at_once: Callable[[Offer], object]) -> None:
        """``callback()`` is called in the loop, in no task, when :meth:`take` has something new. Offers that a former
        subscriber left unanswered come again."""
        self._callback = callback
        self._inbox.extendleft(reversed(self._given.values()))
        self._given.clear()

    def take(self) -> Offer | Withdrawal | None:
        """The next event; None if there is none. Raises BrokenResourceError once the producer is lost, EndOfStream
        once it has left."""
        if self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Offer):
                self._given[item.number] = item
            return item
        if self._error is not None:
            raise self._error
        return None

    def answer(self, number: int, error: Exception | None) -> None:
        """The verdict on a put: accepted, or why not. Never blocks."""
        self._given.pop(number, None)
        with self._mutex:
            if self._sizes.pop(number, None) is None:
                return
        if error is None:
            self._accepted.append(number)
            self._put(_FLUSH)
        else:
            self._put((number, *reason_of(error)))

    def end(self) -> None:
        """Tell the producer that nothing is taken any more. Never blocks."""
        if not self._ended:
            self._ended = True
            self._put(Frame(Kind.END))

    async def aclose(self) -> None:
        """Release everything; after :meth:`end`, wait a moment for the producer's good-bye."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._leave, limiter=anyio.CapacityLimiter(1))

    def _leave(self) -> None:
        if self._ended and self._pair is not None:
            with self._changed:
                self._changed.wait_for(lambda: self._over, self._linger_s)
        self._shut()

    # in the loop

    def _arrive(self, items: Sequence[Offer | Withdrawal]) -> None:
        self._inbox.extend(items)
        self._callback()

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
            self._callback()

    # in the threads

    def _connect(self) -> Pair:
        pair = self._make_pair()
        self._in_loop(lambda: self._on_settled(self))
        return pair

    def _cancel_connect(self) -> None:
        self._unmake_pair()

    def _handle(self, frame: Frame) -> bool:
        if frame.kind is Kind.PUTS:
            self._receive(frame)
        elif frame.kind is Kind.CANCEL:
            if not 0 <= frame.step < self._next:
                raise WireError(f"producer {self.name} cancels put number {frame.step}, which it has not sent")
            self._in_loop(lambda: self._arrive([Withdrawal(frame.step)]))
        elif frame.kind is Kind.BYE:
            self._in_loop(lambda: self._fail(EndOfStream()))
            self._put(Frame(Kind.FIN))
            self._await_hangup()
            return False
        elif frame.kind is not Kind.ALIVE:
            raise WireError(f"producer {self.name} sent a {frame.kind.name} frame")
        return True

    def _receive(self, frame: Frame) -> None:
        with self._mutex:
            staged = sum(self._sizes.values())
        bound = self._limit - staged if staged else max(self._limit, self._max_put)
        if not 0 < frame.wire_bytes <= bound:
            raise WireError(
                f"producer {self.name} announces {frame.wire_bytes} bytes, but may stage {bound} now. Give both sides "
                "one stream_balancer"
            )
        offers = read_puts(_receive_bulk(self, frame), self._next)
        with self._mutex:
            self._sizes.update({offer.number: size for offer, size in offers})
        self._next += len(offers)
        if frame.wire_bytes > BUNDLE_BYTES:
            self._put(Frame(Kind.ALIVE))  # tells the producer that it need not keep the bytes
        self._in_loop(lambda: self._arrive([offer for offer, _ in offers]))

    def _await_hangup(self) -> None:
        pair = self._pair
        if pair is None:
            return
        timer = threading.Timer(self._linger_s, self._break)
        timer.daemon = True
        timer.start()
        try:
            pair.receive(torch.zeros(FRAME_WORDS, dtype=torch.int64)).wait()
        except RuntimeError:
            pass
        finally:
            timer.cancel()

    def _write(self, item: object) -> None:
        if isinstance(item, Frame):
            self._send_frame(item)
        elif isinstance(item, tuple):
            number, reason, text = item
            raw = text.encode(errors="replace")[:_MAX_TEXT_BYTES]
            frame = Frame(Kind.REFUSED, step=number, rank=reason, wire_bytes=len(raw), total_bytes=len(raw))
            if raw:
                _send_bulk(self, frame, torch.frombuffer(bytearray(raw), dtype=torch.uint8))
            else:
                self._send_frame(frame)
        else:
            numbers = sorted(self._accepted.popleft() for _ in range(len(self._accepted)))
            while numbers:
                first = numbers[0]
                mask = sum(1 << n - first for n in numbers if n - first < _MASK_BITS)
                numbers = [n for n in numbers if n - first >= _MASK_BITS]
                self._send_frame(Frame(Kind.ACCEPTED, step=first, nanoseconds=mask))

    def _lost(self, error: Exception) -> None:
        if isinstance(error, WireError):
            logger.warning("the link to producer %s was closed: %s", self.name, error)
        lost = BrokenResourceError(f"producer {self.name} was lost: {short(error)}")
        self._in_loop(lambda: self._fail(lost))
