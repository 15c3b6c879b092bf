"""Producers' links over sockets: the controller's :class:`Intake`, the producer's :class:`Outlet`.

::

    producer     joins (``_joiner``, ``_handshake``): JoinProducer
    controller   makes an Intake of it; one thread for all of them
    producer     one thread: PUTS and CANCEL out, ACCEPTED, REFUSED and END in; BYE before it leaves

Nothing waits for a time-out: a closed socket tells of a dead process at once, TCP's keep-alive of a dead machine in
under a minute, and a peer that is merely slow is waited for.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import get_args

import anyio
import torch
from torch import Tensor

from stream_balancer.errors import BrokenResourceError, ClosedResourceError, EndOfStream, WireError, to_raise
from stream_balancer.transport.gloo.joiner import Joiner
from stream_balancer.transport.producer_session import Offer
from stream_balancer.transport.put_ledger import ENDED, Limits, Mode, PutLedger, Reason, error_of, reason_of
from stream_balancer.transport.puts import WireTicket, masks_of, numbers_in, read_puts, write_puts
from stream_balancer.transport.sockets.hub import Connection, Hub, unexpected
from stream_balancer.transport.sockets.payloads import Payloads
from stream_balancer.types import Rollout
from stream_balancer.wire.messages import Cancel, JoinProducer, WelcomeProducer
from stream_balancer.wire.partial_share import Lease, RemoteRollout, read_described
from stream_balancer.wire.share import Frame, Kind

__all__ = ["Intake", "Outlet"]

_MAX_TEXT_BYTES = 2**16

logger = logging.getLogger("stream_balancer.transport")


# --- the controller --------------------------------------------------------------------------------------------------


class Intake:
    """The controller's end of one producer. Its public methods belong to the event loop."""

    def __init__(
        self,
        hub: Hub,
        connection: Connection,
        request: JoinProducer,
        limits: Limits,
        in_loop: Callable[[Callable[[], object]], None],
        linger_s: float,
    ) -> None:
        self.name = request.label
        self.owner = request.owner
        """Where ranks fetch what this producer holds, if it hands over directly."""
        self._handler = connection.handler = _IntakeHandler(self, hub, connection, limits)
        self._hub = hub
        self._in_loop = in_loop
        self._linger_s = linger_s
        self._inbox: deque[Offer | Cancel] = deque()
        self._given: dict[int, Offer] = {}  # taken, without a verdict
        self._error: Exception | None = None
        self._gone = anyio.Event()
        self._ended = False
        self._callback: Callable[[], object] = lambda: None

    def subscribe(self, callback: Callable[[], object], at_once: Callable[[Offer], object]) -> None:
        """``callback()`` is called in the loop, in no task, when :meth:`take` has something new. Offers that a former
        subscriber left unanswered come again."""
        self._callback = callback
        self._inbox.extendleft(reversed(self._given.values()))
        self._given.clear()

    def take(self) -> Offer | Cancel | None:
        """The next event; None if there is none. Raises BrokenResourceError once the producer is lost, EndOfStream
        once it has left."""
        if self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Offer):
                self._given[item.number] = item
            return item
        if self._error is not None:
            raise to_raise(self._error)
        return None

    def answer(self, number: int, error: Exception | None) -> None:
        """The verdict on a put: accepted, or why not. Never blocks."""
        self._given.pop(number, None)
        verdicts = self._handler.verdicts
        verdicts.append((number, error))
        if len(verdicts) == 1:  # else the thread has been told already
            self._hub.do(self._handler.send_verdicts)

    def end(self) -> None:
        """Tell the producer that nothing is taken any more. Never blocks."""
        if not self._ended:
            self._ended = True
            self._hub.do(self._handler.send_end)

    @property
    def keeps_payloads(self) -> bool:
        """Whether this producer still holds tokens that are needed."""
        return bool(self._handler.leased)

    async def aclose(self) -> None:
        """Hang up; after :meth:`end`, wait a moment for the producer to do so."""
        with anyio.CancelScope(shield=True):
            if self._ended:
                with anyio.move_on_after(self._linger_s):
                    await self._gone.wait()
            self._hub.do(self._handler.hang_up)

    # in the loop, told by the thread

    def _arrive(self, items: Sequence[Offer | Cancel]) -> None:
        self._inbox.extend(items)
        self._callback()

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
            self._gone.set()
            self._callback()


class _IntakeHandler:
    """The part of an :class:`Intake` that lives in the thread."""

    def __init__(self, intake: Intake, hub: Hub, connection: Connection, limits: Limits) -> None:
        self._intake, self._hub, self._connection, self._limits = intake, hub, connection, limits
        self.leased: set[int] = set()  # payloads the producer must keep
        self._dropped: deque[int] = deque()
        self._sizes: dict[int, int] = {}  # bytes of puts without a verdict
        self._staged = 0
        self._next = 0
        self.verdicts: deque[tuple[int, Exception | None]] = deque()

    def admit(self, frame: Frame) -> None:
        """See :class:`Handler`."""
        if frame.kind is Kind.PUTS:
            staged_bytes, max_put_bytes = self._limits
            bound = staged_bytes - self._staged if self._staged else max(staged_bytes, max_put_bytes)
            if not 0 < frame.wire_bytes <= bound:
                raise WireError(
                    f"it announces {frame.wire_bytes} bytes, but may stage {bound} now. Install one stream_balancer "
                    "everywhere"
                )
        elif frame.kind not in (Kind.CANCEL, Kind.BYE) or frame.wire_bytes:
            raise unexpected(frame)

    def handle(self, frame: Frame, body: Tensor) -> None:
        """See :class:`Handler`."""
        intake = self._intake
        if frame.kind is Kind.PUTS:
            offers = read_puts(body, self._next, None if intake.owner is None else self._remote)
            self._next += len(offers)
            self._sizes.update({offer.number: size for offer, size in offers})
            self._staged += frame.wire_bytes
            intake._in_loop(lambda: intake._arrive([offer for offer, _ in offers]))
        elif frame.kind is Kind.CANCEL:
            if not 0 <= frame.step < self._next:
                raise WireError(f"it cancels put number {frame.step}, which it has not sent")
            intake._in_loop(lambda: intake._arrive([Cancel(frame.step)]))
        else:
            intake._in_loop(lambda: intake._fail(EndOfStream()))
            self._connection.part()

    def lost(self, error: Exception) -> None:
        """See :class:`Handler`."""
        intake = self._intake
        if isinstance(error, WireError):
            logger.warning("the link to producer %s was closed: %s", intake.name, error)
        lost = BrokenResourceError(f"producer {intake.name} was lost: {error}")
        intake._in_loop(lambda: intake._fail(lost))

    def send_verdicts(self) -> None:
        """Tell the producer what was answered since."""
        accepted = []
        while self.verdicts:
            number, error = self.verdicts.popleft()
            size = self._sizes.pop(number, None)
            if size is None:
                continue
            self._staged -= size
            if error is None:
                accepted.append(number)
            else:
                self._refuse(number, error)
        for mask, first in masks_of(accepted):
            self._connection.send(Frame(Kind.ACCEPTED, step=first, nanoseconds=mask))

    def _refuse(self, number: int, error: Exception) -> None:
        name, text = reason_of(error)
        reason = get_args(Reason).index(name)
        raw = torch.frombuffer(bytearray(text.encode(errors="replace")[:_MAX_TEXT_BYTES] + b"\n"), dtype=torch.uint8)
        self._connection.send(Frame(Kind.REFUSED, step=number, rank=reason, wire_bytes=raw.numel()), [raw])

    def _remote(self, frame: Frame, body: Tensor) -> RemoteRollout:
        holder, key = self._intake.owner, frame.slab
        if holder is None or key in self.leased or frame.total_bytes > self._limits.max_put_bytes:
            raise WireError(f"it offers to hold payload {key} of {frame.total_bytes} bytes, which it may not")
        lease = Lease()
        self.leased.add(key)
        weakref.finalize(lease, self._on_released, key).atexit = False
        return read_described(frame, body, holder, lease)

    def _on_released(self, key: int) -> None:
        """Runs wherever the last reference to a rollout dies, perhaps inside a garbage collection: takes no lock."""
        self.leased.discard(key)
        self._dropped.append(key)
        if len(self._dropped) == 1:
            self._hub.do(self._send_drops)

    def _send_drops(self) -> None:
        keys = [self._dropped.popleft() for _ in range(len(self._dropped))]
        for mask, first in masks_of(keys):
            self._connection.send(Frame(Kind.DROP, step=first, nanoseconds=mask))

    def send_end(self) -> None:
        """Tell the producer that nothing is taken any more."""
        self._connection.send(Frame(Kind.END))

    def hang_up(self) -> None:
        """Close the connection, once all is sent."""
        self._connection.part()


# --- the producer ----------------------------------------------------------------------------------------------------


class Outlet:
    """The producer's end. Public methods may be called from any thread."""

    threads = True

    def __init__(
        self,
        label: str,
        *,
        joiner: Joiner,
        linger_s: float,
        direct: bool = False,
        host: str | None = None,
    ) -> None:
        """``joiner`` waits, in the outlet's thread, for a controller. ``direct``: tokens stay here until a rank fetches
        them, from ``host`` (default: this machine's address on the way to the controller)."""
        self._label, self._joiner, self._host = label, joiner, host
        self._payloads = Payloads() if direct else None
        self._when_released: list[Callable[[], object]] = []
        self.linger_s = linger_s
        self._book: PutLedger[WireTicket] = PutLedger(bundle_bytes=256 * 1024, bundle_puts=64)
        self._changed = threading.Condition()
        self._connection: Connection | None = None
        self._flushes: deque[None] = deque()
        self._hub = Hub(f"sb-producer-{label}", self._enter, joiner.cancel)
        self._hub.start()

    @property
    def direct(self) -> bool:
        """Whether tokens stay here until a rank fetches them."""
        return self._payloads is not None

    def when_released(self, callback: Callable[[], object]) -> None:
        """Call ``callback()``, in the outlet's thread, once nothing is held here any more that somebody needs."""

        def later() -> None:
            self._when_released.append(callback)
            self._tell_released()

        self._hub.do(later)

    def pending(self, rollouts: Sequence[Rollout], mode: Mode, callback: Callable[[], object]) -> WireTicket:
        """See :class:`~stream_balancer.producer.client.Outlet`."""
        return WireTicket(rollouts, mode, callback, held=self.direct)

    def put(self, ticket: WireTicket) -> None:
        """Have it sent when there is room. Never blocks."""
        self._book.add(ticket)
        self._flushes.append(None)
        if len(self._flushes) == 1:
            self._hub.do(self._flush)

    def cancel(self, ticket: WireTicket) -> None:
        """Ask for it back; its verdict says whether that was in time. Never blocks."""
        problem = self._joiner.problem
        self._book.cancel(ticket, f"not connected: {problem}" if problem else "")
        self._hub.do(self._flush)

    def close(self) -> None:
        """Withdraw what has no verdict, say good-bye, end the thread. Blocks for a moment. Idempotent."""
        self._book.close()
        self._hub.do(self._flush)
        with self._changed:
            self._changed.wait_for(lambda: not (self._connection and self._book.num_sent), self.linger_s)
            self._hub.do(self._leave)
            self._changed.wait_for(lambda: self._connection is None, self.linger_s)
        self._hub.close()
        self._book.end(lambda ticket: ticket.lost("the link was closed"))

    async def aclose(self) -> None:
        """:meth:`close`, without blocking the event loop."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.close, limiter=anyio.CapacityLimiter(1))

    # in the thread

    def _enter(self) -> bool:
        try:
            sock, welcome = self._joiner.join(self._request)
            if not isinstance(welcome, WelcomeProducer):
                raise WireError(f"the controller welcomes a producer with a {type(welcome).__name__} message")
        except Exception as error:  # noqa: BLE001 - stores raise RuntimeErrors of many kinds
            if self._payloads is not None:
                self._payloads.close()
            self.lost(error)
            return False
        self._connection = Connection(self._hub, sock)
        self._connection.handler = self
        if self._payloads is not None:
            self._payloads.serve(self._hub)
        self._book.open(Limits(welcome.staged_bytes, welcome.max_put_bytes))
        self._flush()
        return True

    def _request(self, own_host: str) -> JoinProducer:
        if self._payloads is None:
            return JoinProducer(self._label)
        return JoinProducer(self._label, self._payloads.listen(self._host or own_host, self._label))

    def _send(self, frame: Frame, *bodies: Tensor) -> None:
        if self._connection is not None:
            self._connection.send(frame, bodies)

    def _flush(self) -> None:
        self._flushes.clear()
        while True:
            tickets, cancelled = self._book.take()
            if self._payloads is not None:
                for ticket in tickets:
                    for key, rollout in zip(ticket.payloads, ticket.rollouts, strict=True):
                        self._payloads.keep(key, rollout)
            if tickets:
                size = sum(ticket.size for ticket in tickets)
                self._send(Frame(Kind.PUTS, wire_bytes=size), *write_puts(tickets))
            for number in cancelled:
                self._send(Frame(Kind.CANCEL, step=number))
            if not tickets:
                return

    def _drop(self, keys: Iterable[int] | None) -> None:
        """These payloads are not needed any more; None = none is."""
        if self._payloads is not None:
            if keys is None:
                self._payloads.clear()
            else:
                self._payloads.drop(keys)
        self._tell_released()

    def _tell_released(self) -> None:
        if not self._payloads:  # none, or empty
            callbacks, self._when_released = self._when_released, []
            for callback in callbacks:
                callback()

    def _leave(self) -> None:
        self._send(Frame(Kind.BYE))
        if self._connection is not None:
            self._connection.part()

    def admit(self, frame: Frame) -> None:
        """See :class:`Handler`."""
        limit = _MAX_TEXT_BYTES + 1 if frame.kind is Kind.REFUSED else 0
        if frame.kind not in (Kind.ACCEPTED, Kind.REFUSED, Kind.DROP, Kind.END) or frame.wire_bytes > limit:
            raise unexpected(frame)

    def handle(self, frame: Frame, body: Tensor) -> None:
        """See :class:`Handler`."""
        if frame.kind is Kind.ACCEPTED:
            for number in numbers_in(frame.nanoseconds, frame.step):
                self._book.resolve(number, None)
        elif frame.kind is Kind.REFUSED:
            text = body.numpy().tobytes().decode(errors="replace").removesuffix("\n")
            self._book.resolve(frame.step, error_of(get_args(Reason)[frame.rank], text))
        elif frame.kind is Kind.DROP:
            self._drop(numbers_in(frame.nanoseconds, frame.step))
        else:
            self._book.end(lambda _: ClosedResourceError(ENDED))
            self._leave()
        with self._changed:
            self._changed.notify_all()
        self._flush()  # there may be room for more

    def lost(self, error: Exception) -> None:
        """See :class:`Handler`."""
        if isinstance(error, (ValueError, BrokenResourceError, ClosedResourceError)):
            self._book.end(lambda _: error)
        else:
            cause = (str(error) or type(error).__name__).split("\n", 1)[0][:200]
            self._book.end(lambda ticket: ticket.lost(cause))
        self._drop(None)  # who needed them is gone
        with self._changed:
            self._connection = None
            self._changed.notify_all()
