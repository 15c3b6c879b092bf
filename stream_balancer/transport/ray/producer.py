"""Puts over Ray: what waits at the same time travels as one bundle, whose payload may stay in the object store.

::

    worker   ProducerPort                       actor   ProducerSession
             puts --PutBundle + description, or all of it---->  rollouts without a payload, or whole
             ray.put(payload) --reference------------------->  held while one of its rollouts is needed
             object let go <--DropPayloads-------------------

The rest of the conversation is that of every other transport.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby, islice
from typing import Any

from torch import Tensor

from stream_balancer.core.groups import closed
from stream_balancer.errors import RolloutError, WireError
from stream_balancer.transport.buffers import BufferPool
from stream_balancer.transport.channel import Channel, Outgoing, Source, either
from stream_balancer.transport.offers import Offer
from stream_balancer.transport.producer_port import ProducerPort
from stream_balancer.transport.producer_session import ProducerSession
from stream_balancer.transport.ray.bundles import (
    Stored,
    description_of,
    encode_bundle,
    header_of,
    read_bundle,
    read_stored_bundle,
    write_object,
)
from stream_balancer.transport.ray.caller import CallingChannel
from stream_balancer.transport.request_ledger import Limits, RequestLedger
from stream_balancer.transport.request_messages import message_of
from stream_balancer.transport.requests import Mode, PendingRequest, Request, RequestCancelled
from stream_balancer.types import Rollout
from stream_balancer.wire.messages import (
    BundledPut,
    Cancel,
    JoinProducer,
    Message,
    Owner,
    PutBundle,
    RolloutHeader,
    WelcomeProducer,
)
from stream_balancer.wire.rank_batch import Encoded

__all__ = ["INLINE_BYTES", "RayProducerPort", "RayProducerSession"]

INLINE_BYTES = 64 * 1024  # below that an object costs more than its bytes; Ray's own limit for arguments is 100 KiB
BUNDLE_BYTES = 2 * 2**20  # what is larger travels alone: the next one is written while this one is taken in
BUNDLE_PUTS = 1024


class _StoredRequest(PendingRequest):
    """A request whose rollouts are encoded with those that leave at the same time."""

    def __init__(self, request: Request, callback: Callable[[], object]) -> None:
        num_bytes = sum(rollout.nbytes for rollout in request.rollouts)
        super().__init__(request, callback, total_bytes=num_bytes, wire_bytes=num_bytes)


class _Objects(dict[int, object]):
    """Objects in the store that this process owns, by number, until nobody needs them any more."""

    def keep(self, key: int, payload: object) -> None:
        """Hold an object."""
        self[key] = payload

    def drop(self, keys: Iterable[int]) -> None:
        """They are not needed any more; unknown ones are fine."""
        for key in keys:
            self.pop(key, None)


class RayProducerPort(ProducerPort):
    """A worker's end. Any thread may use it."""

    def __init__(
        self, actor: Any, *, label: str, node: str, direct: bool = True, restarts: bool = False, linger_s: float = 5.0
    ) -> None:
        """``direct``: payloads stay in this node's store, owned by this process; else they travel with their puts.
        ``restarts``: should the actor die, it comes back and knows what it had accepted: puts wait for it."""
        super().__init__(
            linger_s=linger_s,
            kept=_Objects() if direct else None,
            hang_up=lambda: self._joining.abort(),
            reconnect=self._connect if restarts else None,
        )
        self._ledger = RequestLedger(bundle_bytes=BUNDLE_BYTES, bundle_puts=BUNDLE_PUTS)
        self._actor, self._label, self._node = actor, label, node
        self._pool = BufferPool(2)
        self._num_objects = 0
        self._connect()

    def _connect(self) -> None:
        owner = Owner(self._node, 0, secrets.token_hex(8), self._label) if self.direct else None
        self._joining = CallingChannel(
            self._actor,
            JoinProducer(self._label, owner, producer_id=self.producer_id),
            on_welcome=self._on_welcome,
            name="sb-ray-producer",
        )
        self._joining.start(self)

    def pending(self, request: Request, callback: Callable[[], object]) -> _StoredRequest:
        return _StoredRequest(request, callback)

    # in the channel's threads

    def _on_welcome(self, welcome: WelcomeProducer) -> None:
        self._channel = self._joining
        self._ledger.open(Limits(welcome.staged_bytes, welcome.max_put_bytes))
        self._flush()

    def _send(self, channel: Channel, pending: Sequence[_StoredRequest], cancelled: Sequence[int]) -> None:
        for columns, alike in groupby(pending, _columns):
            if columns:
                channel.send(partial(self._bundle, list(alike)))
            else:
                for one in alike:
                    channel.send(message_of(one))
        for number in cancelled:
            channel.send(partial(self._cancel, number))

    def _cancel(self, number: int, _: Channel) -> Outgoing | None:
        return Outgoing(Cancel(number)) if self._ledger.is_sent(number) else None  # the store was full

    def _bundle(self, puts: Sequence[_StoredRequest], _: Channel) -> Outgoing | None:
        """Called again, should the store be full."""
        found = self._encoded(puts)
        if found is None:
            return None
        puts, encoded = found
        bundled = tuple(
            BundledPut(
                put.number or 0,
                len(put.request.rollouts),
                group=put.request.mode is Mode.GROUP,
                wait=put.request.mode is not Mode.NOWAIT,
                complete=put.request.declared is not None,
                slot=None if put.request.slot is None else put.request.slot.number,
            )
            for put in puts
        )
        if self._kept is None or encoded.message.wire_bytes <= INLINE_BYTES:
            header = header_of(encoded, payload=None)
            return Outgoing(PutBundle(bundled, header), [Source(header.wire_bytes, encoded.fill)])
        import ray

        reference = ray.put(write_object(encoded, self._pool.lend))
        key, self._num_objects = self._num_objects, self._num_objects + 1
        self._kept.keep(key, reference)
        header = header_of(encoded, payload=key)
        description = description_of(encoded)
        return Outgoing(PutBundle(bundled, header), [description], [reference])

    def _encoded(self, puts: Sequence[_StoredRequest]) -> tuple[Sequence[_StoredRequest], Encoded] | None:
        """Those that are still wanted and can be written; None if there are none."""
        for put in puts:
            if put.cancelled or self._ledger.closed:
                self._done(put, RequestCancelled())
        puts = [put for put in puts if not put.done]
        try:
            return (
                (puts, encode_bundle([rollout for put in puts for rollout in put.request.rollouts])) if puts else None
            )
        except RolloutError:
            for put in puts:
                try:
                    encode_bundle(put.request.rollouts)
                except RolloutError as error:
                    self._done(put, error)
            if not any(put.done for put in puts):
                raise
            return self._encoded(puts)

    def _done(self, put: _StoredRequest, error: Exception) -> None:
        """Before it was sent."""
        with suppress(WireError):  # it is done already
            if put.number is not None:
                self._ledger.resolve(put.number, error)


def _columns(pending: _StoredRequest) -> tuple[Any, ...]:
    """Empty where there are no rollouts."""
    rollouts = pending.request.rollouts
    if not rollouts:
        return ()
    return tuple((name, column.dtype, column.shape[1:]) for name, column in rollouts[0].tokens.items())


class RayProducerSession(ProducerSession):
    """The actor's end. Belongs to the actor's event loop."""

    def admit(self, message: Message, sizes: Sequence[int]) -> Sequence[int]:
        if not isinstance(message, PutBundle):
            return super().admit(message, sizes)
        numbers = [put.number for put in message.puts]
        header = message.rollouts
        expected = self._unanswered.next_number
        if numbers[0] < expected or sorted(set(numbers)) != numbers or tuple(sizes) != (header.wire_bytes,):
            raise WireError(f"expected puts from number {expected} on and one buffer, got {message}"[:500])
        return sizes if header.payload is not None else (header.total_bytes,)

    def _on_bundle(self, message: PutBundle, buffers: Sequence[Tensor], references: Sequence[object]) -> None:
        rollouts = self._bundled(message.rollouts, buffers[0], references)
        if sum(put.count for put in message.puts) != len(rollouts):
            raise WireError(f"producer {self.name} put {len(rollouts)} rollouts, and announced another number")
        each = iter(rollouts)
        for put in message.puts:
            mode = Mode.GROUP if put.group else Mode.PUT if put.wait else Mode.NOWAIT
            self._unanswered.add(message, put.number)  # staged in the store, which the producer bounds
            its = tuple(islice(each, put.count))
            declared = closed(its[0].group_id) if its and put.complete else None
            self._deliver(Offer(put.number, mode, its, declared=declared, slot=put.slot))

    actions = ProducerSession.actions | either((PutBundle, _on_bundle))

    def _bundled(self, header: RolloutHeader, buffer: Tensor, references: Sequence[object]) -> list[Rollout]:
        key = header.payload
        if key is None:
            return read_bundle(header, buffer)
        if self.owner is None or len(references) != 1:
            raise WireError(f"producer {self.name} keeps what it puts, which it may not")
        stored = Stored(references[0])
        self._leases.hold(stored, key)
        return read_stored_bundle(header, buffer, stored, self.owner)
