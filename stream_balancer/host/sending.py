"""Orders of the ledger of steps, carried out: messages to ranks, acknowledgements to the balancer, plans made anew."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from stream_balancer.core.steps.orders import (
    Ack,
    Behind,
    Note,
    Order,
    SendDrop,
    SendEnd,
    SendGo,
    SendRewind,
    SendSeal,
    SendWork,
)
from stream_balancer.errors import refused_error
from stream_balancer.host.in_flight import InFlight
from stream_balancer.host.plans import StepPlan, seal_of
from stream_balancer.host.ranks import different_weights
from stream_balancer.net import messages
from stream_balancer.net.messages import Message, Notify, StepHead, Work, WorkItem
from stream_balancer.net.service import Peer
from stream_balancer.wire.codec import Encoded, encode
from stream_balancer.wire.payload import NOTHING, Payload

logger = logging.getLogger("stream_balancer.dispatch")


class Sender(InFlight):
    """Steps in flight, and what is sent of them. Belongs to the event loop."""

    _encoded: dict[tuple[int, tuple[int, ...]], Encoded]
    _behind_disk: list[tuple[Any, Peer | None, Message]]
    _slow: tuple[int, int] | None = None  # rank and step of the straggler that was logged

    async def carry_out(self, orders: Iterable[Order]) -> None:
        """Carry out all of them. Raises what :func:`encode` does, for work that no rank can be sent; waits for the disk
        where a message must not leave before what was noted with it is there."""
        self._encoded, self._behind_disk = {}, []
        for order in orders:
            self._carry_out(order)
        if self._behind_disk:
            await self.handed.flush()
        for order, peer, message in self._behind_disk:
            # it may be another process by now, to which the ledger gives orders of its own
            if self._peer(order) is peer:
                self._tell(order, message)

    def _carry_out(self, order: Order) -> None:
        match order:
            case SendWork():
                self._send(order)
            case SendGo():
                self._tell(order, messages.Go(order.step, tuple(sorted(order.items)), tuple(sorted(order.gone))))
            case SendSeal():
                self._seal(order)
            case SendRewind():
                self._tell(order, messages.Rewind(order.step, order.attempt))
            case SendDrop():
                self._drop(order)
            case Behind():
                if (peer := self._peer(order)) is not None:
                    peer.fail(refused_error("value", different_weights(order.rank, order.weights, order.others)))
            case SendEnd():
                # It may be gone for good as soon as it knows: the next controller must not wait for it.
                self.handed.note(self.ranks[order.rank].came)
                self._behind_disk.append((order, self._peer(order), Notify(end=True)))
            case Note():
                # else it is acknowledged by all, which the journal is told by the balancer
                if order.step in self.ledger.steps:
                    self.note(self.plans[order.step])
            case Ack():
                self._ack(order)

    def _peer(self, order: Any) -> Peer | None:
        return self.ranks[order.rank].peers.get(order.seat)

    def _tell(self, order: Any, message: Message, payload: Payload = NOTHING) -> None:
        peer = self._peer(order)
        if peer is not None:
            peer.send(message, payload)

    # to ranks

    def _send(self, order: SendWork) -> None:
        plan, member = self.plans[order.step], self.ranks[order.rank]
        encoded = self._encode(order)
        work = Work(
            step=order.step,
            uid=order.uid,
            attempt=order.attempt,
            items=tuple(WorkItem(item.id, item.group, item.remote) for item in order.items),
            head=self._head(plan, order.rank) if order.opens else None,
            gone=tuple(sorted(order.gone)),
            header=encoded.header,
            # a lost payload changes them, so the seal brings those of a remote step
            sizes=None if plan.is_remote else plan.batch.ranks[0].denominators,
        )
        self._tell(order, work, encoded.payload)
        # for the error of its loss: what it may have begun with
        member.last_step = max(order.step, member.last_step or 0)

    def _encode(self, order: SendWork) -> Encoded:
        """The same for all processes of a rank. Copies no token."""
        peer = self._peer(order)
        if not order.items or peer is None:
            return Encoded(Work.__struct_defaults__[3], NOTHING)
        key = order.step, tuple(item.id for item in order.items)
        encoded = self._encoded.get(key)
        # all seats of a rank get the same bytes
        if encoded is None:
            its = [item.payload for item in order.items]
            encoded = self._encoded[key] = encode(its, max_bytes=peer.data.max_batch_bytes)
        return encoded

    def _head(self, plan: StepPlan, one: int) -> StepHead:
        place = plan.place_of(one)
        planned = None if place is None else plan.batch.ranks[place]
        return StepHead(
            dp_size=len(plan.ranks),
            load=0.0 if planned is None else planned.load,
            meets=self.ledger.meets,
            mini_batches=() if planned is None else planned.mini_batch_sizes,
            rank=None if place == one else place,
        )

    def _seal(self, order: SendSeal) -> None:
        seal, plan = order.seal, self.plans[order.seal.step]
        message = seal_of(plan, seal.number, seal.ranks, seal.gone)
        # What is masked must be known to the next controller, if some of the ranks have met by then.
        if seal.gone:
            self._behind_disk.append((order, self._peer(order), message))
        else:
            self._tell(order, message)

    def _drop(self, order: SendDrop) -> None:
        who, step = self.ranks[order.rank].name, order.step
        text = (
            f"step {step} is in the weights of the other ranks, which have met without {who}. Take another rank's "
            "weights, or start it again"
            if order.met
            else f"what {who} has of step {step} does not count any more: it was planned anew"
        )
        self._tell(order, messages.Drop(step, order.met, text))

    # to the balancer

    def _ack(self, order: Ack) -> None:
        # before the balancer is told, which may wake who plans the next step
        del self.plans[order.step]
        # with the acknowledgement, which counts them as lost
        self.core.mark_missing(order.step, order.gone)
        with suppress(ValueError):  # the user was first: acknowledge_through() at a checkpoint
            self.balancer.acknowledge(order.step)
        self.handed.forget(order.step)
        straggler = self.balancer.straggler()
        slow = None if straggler is None else (straggler.rank, straggler.since_step)
        # once for each
        if slow is not None and slow != self._slow:
            logger.warning("%s", straggler)
        self._slow = slow
