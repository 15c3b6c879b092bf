"""The producer's end, over any channel: its ledger of requests, and the payloads it keeps.

::

    ask, cancel     --ledger--> Put, PutGroup, DeclareGroup, Reserve, EndInput, StatisticsRequest, Cancel
                                in the order of their numbers, as many as staged_bytes allows; before there is a channel
                                they wait in the ledger
    release         ReleaseSlot
    close           Cancel for all that is sent; once the replies are in, or after linger_s, Close
    ended           every request ends with BrokenResourceError (not sent, so not accepted; or outcome not known); or
                    joining once more: slots are reserved again, at their version, and what has no reply waits to be
                    sent again

Public methods may be called from any thread, unless the channel lives in one event loop. ``receive`` runs in the
channel's thread; :attr:`ProducerPort.actions` is the table of what may come.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from stream_balancer.errors import (
    BrokenResourceError,
    ClosedResourceError,
    ConfigError,
    RefusedError,
    refused_error,
)
from stream_balancer.transport.channel import (
    Channel,
    Outgoing,
    PeerClosed,
    Session,
    State,
    either,
    may_come_back,
    unexpected,
)
from stream_balancer.transport.event_loop import beside_the_loop
from stream_balancer.transport.replies import error_of
from stream_balancer.transport.request_ledger import Limits, RequestLedger, ended
from stream_balancer.transport.request_messages import EncodedRequest
from stream_balancer.transport.requests import HeldSlot, Mode, PendingRequest, Request
from stream_balancer.types import Rollout
from stream_balancer.wire.messages import (
    Accepted,
    Admitted,
    Cancel,
    DropPayloads,
    End,
    Message,
    PolicyVersion,
    PutRefused,
    ReleaseSlot,
    StatisticsReply,
    WelcomeProducer,
)
from stream_balancer.wire.statistics import read_reply

__all__ = ["KeptPayloads", "ProducerPort"]

logger = logging.getLogger("stream_balancer.transport")


class KeptPayloads(Protocol):
    """Where payloads stay until a rank fetches them."""

    def __len__(self) -> int: ...

    def keep(self, key: int, rollout: Rollout) -> None:
        """Hold a rollout's tokens and tensors until :meth:`drop`."""
        ...

    def drop(self, keys: Iterable[int]) -> None:
        """They are not needed any more; unknown ones are fine."""
        ...

    def clear(self) -> None:
        """Nothing is needed any more."""
        ...


class ProducerPort(Session):
    """The connection of one producer. What it asks waits here until there is a channel."""

    def __init__(
        self,
        *,
        threads: bool = True,
        linger_s: float = 5.0,
        kept: KeptPayloads | None = None,
        problem: Callable[[], str | None] = lambda: None,
        hang_up: Callable[[], object] = lambda: None,
        reconnect: Callable[[], object] | None = None,
    ) -> None:
        """``threads``: as the channel's. ``linger_s``: how long :meth:`close` waits for replies, and for the
        controller to close too. ``kept``: where payloads stay; None: they travel with their puts. ``problem``: why
        there is no channel yet. ``hang_up``: stop connecting, and release what connected. ``reconnect``: a controller
        that is lost comes back and knows what it had accepted: begin to connect again. None: its loss ends this
        port."""
        self.threads, self.linger_s = threads, linger_s
        self.producer_id = secrets.token_bytes(8)
        """The same for every connection of this producer."""
        self._kept, self._problem, self._hang_up, self._reconnect = kept, problem, hang_up, reconnect
        self._ledger: RequestLedger[Any] = RequestLedger()
        self._channel: Channel | None = None
        self._changed = threading.Condition()
        self._sending = self._leaving = False
        self._when_released: list[Callable[[], object]] = []
        self._slots: set[HeldSlot] = set()

    @property
    def version(self) -> int | None:
        """The policy version that the controller has passed on last; None before the first."""
        return self._ledger.version

    @property
    def direct(self) -> bool:
        """Whether payloads stay here until a rank fetches them."""
        return self._kept is not None

    # the producer's side

    def pending(self, request: Request, callback: Callable[[], object]) -> PendingRequest:
        """A request, to be given to :meth:`ask`. ``callback()`` is called, in any thread, once there is a reply.
        Raises RolloutError for what cannot be sent."""
        return EncodedRequest(request, callback, kept=self.direct)

    def ask(self, pending: PendingRequest) -> None:
        """Have it sent when there is room. Never blocks."""
        self._ledger.add(pending)
        self._flush()

    def cancel(self, pending: PendingRequest) -> None:
        """Ask for it back; its reply says whether that was in time. Never blocks."""
        problem = self._problem()
        self._ledger.cancel(pending, f"not connected: {problem}" if problem else "")
        self._flush()

    def abandon(self, pending: PendingRequest) -> None:
        """Nobody waits for its reply any more. A slot that it has got, or still gets, is released."""
        pending.abandoned = True
        if isinstance(pending.result, HeldSlot):
            self.release(pending.result)

    def release(self, slot: HeldSlot) -> None:
        """Give back the places of what will not be put, once the puts on their way have their replies: to be called
        again then. Never blocks, idempotent."""
        slot.close()
        if slot.missing:
            return
        with self._changed:
            self._slots.discard(slot)
            channel = self._channel
        if channel is not None:
            channel.send(Outgoing(ReleaseSlot(slot.number)))

    def when_released(self, callback: Callable[[], object]) -> None:
        """Call ``callback()``, in any thread, once no payload is kept here any more."""
        with self._changed:
            self._when_released.append(callback)
        self._notify_released()

    def close(self) -> None:
        """Cancel what has no reply, close the channel, end its threads. Blocks for a moment. Idempotent."""
        with self._changed:
            self._leaving = True  # from now on it does not connect again
        self._ledger.close()
        self._flush()
        self._notify()
        if not self.threads:
            return  # the replies close it
        with self._changed:
            self._changed.wait_for(lambda: self._channel is None or not self._ledger.num_sent, self.linger_s)
        channel = self._channel
        if channel is not None:
            channel.close()
            channel.wait_closed(self.linger_s)
            channel.abort()
        self._hang_up()
        self._over(lambda pending: pending.lost("the connection was closed here"))

    async def aclose(self) -> None:
        """:meth:`close`, without blocking the event loop."""
        await beside_the_loop(self.close, threads=self.threads)

    def opened(self, channel: Channel, welcome: WelcomeProducer) -> None:
        """The controller has let it in."""
        self._channel = channel
        self._ledger.open(Limits(welcome.staged_bytes, welcome.max_put_bytes))
        channel.start(self)
        self._flush()

    def _flush(self) -> None:
        """Have all sent for which there is room. In the channel's thread: an interrupt (Ctrl-C) in a calling thread
        must not fall between a put's getting its number and its being sent."""
        channel = self._channel
        if channel is not None:
            channel.send(self._send_pending)

    # in the channel's thread

    def _send_pending(self, channel: Channel) -> None:
        if self._sending:
            return  # from within ``send`` below, in memory: sent next, not in between
        self._sending = True
        while self._ledger.has_news:  # often not: an earlier call has sent all
            pending, cancelled = self._ledger.take()
            if not pending and not cancelled:
                break
            self._send(channel, pending, cancelled)
        self._sending = False

    def _send(self, channel: Channel, pending: Sequence[Any], cancelled: Sequence[int]) -> None:
        for one in pending:
            if self._kept is not None:
                for key, rollout in zip(one.payloads, one.request.rollouts, strict=True):
                    self._kept.keep(key, rollout)
            channel.send(one.outgoing())
        for number in cancelled:
            channel.send(Outgoing(Cancel(number)))

    @property
    def state(self) -> State:
        return State.ENDING if self._leaving else State.OPEN

    def receive(self, message: Message, buffers: Sequence[Tensor], references: Sequence[object]) -> None:
        super().receive(message, buffers, references)
        self._flush()
        self._notify()

    def _on_accepted(self, message: Accepted, *_: object) -> None:
        for number in message.numbers:
            self._ledger.resolve(number, None)

    def _on_refused(self, message: PutRefused, *_: object) -> None:
        self._ledger.resolve(message.number, error_of(message.reason, message.text))

    def _on_admitted(self, message: Admitted, *_: object) -> None:
        pending = self._ledger.sent(message.number)
        slot = pending.request.slot or HeldSlot(message.number, message.version, pending.request.places)
        with self._changed:
            self._slots.add(slot)
        self._ledger.resolve(message.number, None, slot)
        if pending.abandoned or not slot.open:
            self.release(slot)

    def _on_statistics(self, message: StatisticsReply, *_: object) -> None:
        answer = read_reply(message)
        if isinstance(answer, Exception):
            self._ledger.resolve(message.number, answer)
        else:
            self._ledger.resolve(message.number, None, answer)

    def _on_version(self, message: PolicyVersion, *_: object) -> None:
        self._ledger.version_is(message.version)

    def _on_dropped(self, message: DropPayloads, *_: object) -> None:
        if self._kept is None:
            raise unexpected(message, "to a producer that keeps nothing")
        self._kept.drop(message.keys)
        self._notify_released()

    def _on_end(self, *_: object) -> None:
        self._leaving = True
        self._ledger.end(ended)

    # An End and a close() may cross.
    actions = either(
        (Accepted, _on_accepted),
        (PutRefused, _on_refused),
        (Admitted, _on_admitted),
        (StatisticsReply, _on_statistics),
        (PolicyVersion, _on_version),
        (DropPayloads, _on_dropped),
        (End, _on_end),
    )

    def ended(self, error: Exception) -> None:
        """Or there will be no channel."""
        if self._rejoin(error):
            return
        if isinstance(error, RefusedError):
            reason, text = error.reason, str(error)
            self._over(lambda pending: refused_error(reason, f"{text}; {pending.fate}"))
            return
        if isinstance(error, (ConfigError, BrokenResourceError, ClosedResourceError)):
            self._over(lambda _: error)
            return
        cause = str(error) or ("the controller closed the connection" if isinstance(error, PeerClosed) else repr(error))
        self._over(partial(_lost, cause=cause.split("\n", 1)[0][:200]))

    def _rejoin(self, error: Exception) -> bool:
        """Go on with the controller once it is there again, if it will be."""
        with self._changed:
            if self._reconnect is None or self._leaving or not may_come_back(error):
                return False
            self._channel = None
            self._ledger.resend([self._again(slot) for slot in self._slots if slot.missing])
            self._reconnect()
        logger.warning("puts wait for the controller to be there again: %s", error)
        return True

    def _again(self, slot: HeldSlot) -> PendingRequest:
        """To have a slot again, which the controller has given back with the connection."""

        def check() -> None:
            if again.error is not None and slot.missing:
                logger.warning("a slot for %d rollouts was given back: %s", slot.missing, again.error)

        again = self.pending(Request(Mode.RESERVE, slot=slot), check)
        return again

    def _over(self, error: Callable[[PendingRequest], Exception]) -> None:
        self._channel = None
        self._ledger.end(error)
        if self._kept is not None:
            self._kept.clear()  # who needed them is gone
            self._notify_released()
        self._notify()

    def _notify(self) -> None:
        """Replies have come, or there is no channel any more: :meth:`close` may go on."""
        with self._changed:
            self._changed.notify_all()
        channel = self._channel
        if self._leaving and channel is not None and not self._ledger.num_sent and not self._kept:
            channel.close()

    def _notify_released(self) -> None:
        if self._kept:  # and not empty
            return
        with self._changed:
            callbacks, self._when_released = self._when_released, []
        for callback in callbacks:
            callback()


def _lost(pending: PendingRequest, cause: str) -> Exception:
    return pending.lost(cause)
