"""The producer's end, over any channel: its ledger of pending puts, and the payloads it keeps.

::

    put, cancel     --ledger--> Put, PutGroup, DeclareGroup, Reserve, EndInput, StatisticsRequest, Cancel
                                in the order of their numbers, as many as staged_bytes allows; before there is a channel
                                they wait in the ledger
    release         ReleaseSlot
    close           Cancel for all that is sent; once the replies are in, or after linger_s, Close
    ended           every put ends with BrokenResourceError: not sent, so not accepted; or outcome not known; or joining
                    once more: slots are reserved again, at their version, and what has no reply waits to be sent again

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

import msgspec
from torch import Tensor

from stream_balancer.core.groups import GroupSize
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
    Source,
    State,
    either,
    may_come_back,
    unexpected,
)
from stream_balancer.transport.event_loop import beside_the_loop
from stream_balancer.transport.put_ledger import HeldSlot, Limits, Mode, PendingPut, PutLedger, ended, error_of
from stream_balancer.types import Rollout
from stream_balancer.wire.messages import (
    Accepted,
    Admitted,
    Cancel,
    DeclareGroup,
    DropPayloads,
    End,
    EndInput,
    Message,
    PolicyVersion,
    Put,
    PutGroup,
    PutRefused,
    ReleaseSlot,
    Reserve,
    RolloutHeader,
    StatisticsReply,
    StatisticsRequest,
    WelcomeProducer,
)
from stream_balancer.wire.rollouts import encode_rollout
from stream_balancer.wire.statistics import read_reply

__all__ = ["EncodedPut", "KeptPayloads", "ProducerPort", "request_of"]

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


class EncodedPut(PendingPut):
    """A pending put as it travels: a buffer for each rollout."""

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        mode: Mode,
        callback: Callable[[], object],
        *,
        declared: GroupSize | None = None,
        slot: HeldSlot | None = None,
        kept: bool = False,
    ) -> None:
        """``kept``: only descriptions are sent, the producer keeps the payloads."""
        self._encoded = [encode_rollout(rollout, kept=kept) for rollout in rollouts]
        self._kept = kept
        headers = [one.header for one in self._encoded]
        super().__init__(
            rollouts,
            mode,
            callback,
            declared=declared,
            slot=slot,
            put_bytes=sum(header.total_bytes for header in headers),
            size=sum(header.wire_bytes for header in headers),
        )

    def outgoing(self) -> Outgoing:
        """Its message and buffers, once it has its number."""
        assert self.number is not None
        if not self.rollouts:
            return request_of(self)
        sources = [Source(one.header.wire_bytes, one.fill, one.pieces) for one in self._encoded]
        slot = None if self.slot is None else self.slot.number
        if self.mode is Mode.GROUP:
            return Outgoing(PutGroup(self.number, self._headers(), self.declared is not None, slot), sources)
        return Outgoing(Put(self.number, self._headers()[0], self.mode is Mode.PUT, slot), sources)

    def _headers(self) -> tuple[RolloutHeader, ...]:
        if not self._kept:
            return tuple(one.header for one in self._encoded)
        return tuple(
            msgspec.structs.replace(one.header, payload=key)
            for one, key in zip(self._encoded, self.payloads, strict=True)
        )


def request_of(put: PendingPut) -> Outgoing:
    """The message of a put without rollouts, once it has its number."""
    assert put.number is not None
    if put.mode is Mode.RESERVE:
        return Outgoing(_reserve(put, put.number))
    if put.mode is Mode.END:
        return Outgoing(EndInput(put.number))
    if put.mode is Mode.STATISTICS:
        return Outgoing(StatisticsRequest(put.number))
    assert put.declared is not None
    group_id, size = put.declared
    if put.mode is Mode.ABANDON:
        return Outgoing(DeclareGroup(put.number, group_id, "abandoned"))
    if size is None:
        return Outgoing(DeclareGroup(put.number, group_id, "closed"))
    return Outgoing(DeclareGroup(put.number, group_id, "expected", size))


def _reserve(put: PendingPut, number: int) -> Reserve:
    slot = put.slot
    if slot is None:
        return Reserve(number, put.places)
    slot.number = number  # for the puts in it, which are sent behind this
    return Reserve(number, slot.missing, slot.version)


class ProducerPort(Session):
    """One producer. What it is asked to put waits until there is a channel."""

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
        self._ledger: PutLedger[Any] = PutLedger()
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

    def pending(
        self,
        rollouts: Sequence[Rollout],
        mode: Mode,
        callback: Callable[[], object],
        declared: GroupSize | None = None,
        slot: HeldSlot | None = None,
    ) -> PendingPut:
        """A put, to be given to :meth:`put`. ``callback()`` is called, in any thread, once there is a reply."""
        return EncodedPut(rollouts, mode, callback, declared=declared, slot=slot, kept=self.direct)

    def put(self, put: PendingPut) -> None:
        """Have it sent when there is room. Never blocks."""
        self._ledger.add(put)
        self._flush()

    def cancel(self, put: PendingPut) -> None:
        """Ask for it back; its reply says whether that was in time. Never blocks."""
        problem = self._problem()
        self._ledger.cancel(put, f"not connected: {problem}" if problem else "")
        self._flush()

    def abandon(self, put: PendingPut) -> None:
        """Nobody waits for its reply any more. A slot that it has got, or still gets, is released."""
        put.abandoned = True
        if isinstance(put.result, HeldSlot):
            self.release(put.result)

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
        self._over(lambda put: put.lost("the connection was closed here"))

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
        while True:
            puts, numbers = self._ledger.take()
            self._send(channel, puts, numbers)
            if not puts and not numbers:
                break
        self._sending = False

    def _send(self, channel: Channel, puts: Sequence[Any], cancelled: Sequence[int]) -> None:
        for put in puts:
            if self._kept is not None:
                for key, rollout in zip(put.payloads, put.rollouts, strict=True):
                    self._kept.keep(key, rollout)
            channel.send(put.outgoing())
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
        put = self._ledger.sent(message.number)
        slot = put.slot or HeldSlot(message.number, message.version, put.places)
        with self._changed:
            self._slots.add(slot)
        self._ledger.resolve(message.number, None, slot)
        if put.abandoned or not slot.open:
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
            self._over(lambda put: refused_error(reason, f"{text}; {put.fate}"))
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

    def _again(self, slot: HeldSlot) -> PendingPut:
        """To have a slot again, which the controller has given back with the connection."""

        def check() -> None:
            if again.error is not None and slot.missing:
                logger.warning("a slot for %d rollouts was given back: %s", slot.missing, again.error)

        again = self.pending((), Mode.RESERVE, check, slot=slot)
        return again

    def _over(self, error: Callable[[PendingPut], Exception]) -> None:
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


def _lost(put: PendingPut, cause: str) -> Exception:
    return put.lost(cause)
