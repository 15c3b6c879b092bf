"""Requests of other processes to a balancer, of producers most of all: methods of a
:class:`~stream_balancer.net.service.Service`.

What has room goes in at once; the rest waits in the balancer's own first-come-first-served queue, one task each, so
backpressure is the reply that has not come yet. So do reservers. Every policy version is passed on as it is set.
``serve`` attends by itself; without it run :func:`attend` as a task.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple, TypeAlias

import anyio
import msgspec

from stream_balancer.core.groups import GroupSize
from stream_balancer.core.observer import Observer
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.core.throttle import check_reserve
from stream_balancer.errors import BrokenResourceError, RolloutError, WireError
from stream_balancer.host.balancer import StreamBalancer
from stream_balancer.host.puts import PendingPut
from stream_balancer.host.transport import Transport
from stream_balancer.net.errors import ConnectionEnd
from stream_balancer.net.messages import Counts, Join, Notify
from stream_balancer.net.service import Asked, Host, Peer, Service
from stream_balancer.rollouts import Rollout
from stream_balancer.slots import Slot
from stream_balancer.wire.codec import Leases, Owner, RemoteRollout, decode_rollouts
from stream_balancer.wire.payload import reader
from stream_balancer.wire.statistics import encode_statistics

_log = logging.getLogger("stream_balancer.net")

_KEEP_S = 60.0  # a producer that will join again may take so long

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**40)]
_Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=1024)]
_Version: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**62), lt=2**62)]


class _ProducerFacts(NamedTuple):
    """Facts that a producer tells of itself when it joins."""

    rejoin: bool
    slots: Annotated[list[tuple[_Count, _Count, _Version]], msgspec.Meta(max_length=2**16)]
    """Slots that are open: its number, rollouts still to come, version."""
    owner: Owner | None = None
    """Owner of the payloads that it keeps, if it was in before."""


_Put = tuple[_Count | None, bool | None, bool, msgspec.Raw]
"""Number of a slot, whether the group is complete (None: a rollout by itself), whether it may wait, the rollouts."""
_Declared = tuple[_Name, _Name, _Count | None]
_Reserve = tuple[_Count, _Count]
_READ: dict[Any, Callable[[msgspec.Raw], Any]] = {
    kind: reader(kind, "a producer's call")
    for kind in (_ProducerFacts, _Put, _Declared, _Reserve, Counts, _Count, _Version | None, tuple[_Version])
}


async def attend(balancer: StreamBalancer, transport: Transport) -> None:
    """Answer producers until cancelled. If the balancer has ended by then, they are notified; else their puts stay
    where they are, and the next who attends takes them."""
    producers = Producers(balancer, transport.service)
    await producers.attend(producers)


class _ProducerState:
    """A producer, and its slots."""

    def __init__(self) -> None:
        self.slots: dict[int, Slot] = {}
        """By its own numbers."""
        self.given_back: dict[int, int] = {}
        """Rollouts still to come of slots that it had when its connection was lost."""
        self.owner: Owner | None = None
        self.leases: list[Leases] = []
        """Tables of all balancers that may need what it keeps, this one's last: a lease dies unheard with its table."""
        self.waiting: set[Asked] = set()
        """Puts and reservers that wait."""
        self.settled = anyio.Event()


class Producers(Host, Observer):
    """The producers of one balancer, while its service is attended to."""

    def __init__(self, balancer: StreamBalancer, service: Service) -> None:
        self._balancer, self._service = balancer, service
        self._parts = balancer.parts
        self._parts.producers.attended = True
        self.methods = {
            "put": self._put, "declare": self._declare, "reserve": self._reserve, "release": self._release,
            "stale": self._stale, "drop": self._drop, "version_after": self._version_after, "end": self._end,
            "statistics": self._statistics, "set_version": self._set_version,
        }  # fmt: skip

    # who is there

    def admit(self, peer: Peer, join: Join) -> tuple[list[int], list[int]]:
        """Let a producer in. -> numbers of slots that it had, and has no more; and keys of payloads that are needed."""
        # before it is in: the answer to its join names the slots that it has lost
        producer = peer.data = peer.data or _ProducerState()
        about = _READ[_ProducerFacts](join.about)
        # it drops what this balancer does not need: those before it have no say any more
        producer.leases = []
        keys = [] if about.owner is None else self._attach(peer, about.owner)
        return list(self._lost_slots(producer, about.slots)), keys

    def on_peer(self, peer: Peer) -> None:
        """A producer has come in, perhaps again."""
        # who will not join again is gone at once, with its slots
        peer.keep_s = _KEEP_S if _READ[_ProducerFacts](peer.join.about).rejoin else 0.0
        self._parts.producers.joined(peer.session, peer.name)
        self.tell_version(peer)
        if self._balancer.ended:
            self._say_end(peer)

    async def attend(self, host: Host) -> None:
        """Have it attend until cancelled, and pass every version on to all peers, ranks too. If the balancer has ended
        by then, producers are told."""
        self._balancer.observers.append(self)
        try:
            # those that were in before have heard nothing since
            self._pass_on()
            for peer in self._peers():
                if peer.data.owner is not None:
                    self._attach(peer, peer.data.owner)
            await self._service.attend(host)
        finally:
            self._balancer.observers.remove(self)
            if self._balancer.ended:
                for peer in self._peers():
                    self._say_end(peer)

    def version_set(self, version: int) -> None:
        self._pass_on()

    def restored(self, snapshot: Snapshot) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        for peer in self._service.peers.values():
            self.tell_version(peer)

    def tell_version(self, peer: Peer) -> None:
        """The version now, if there is one."""
        if self._balancer.version is not None:
            peer.send(Notify(self._balancer.version))

    def _peers(self) -> list[Peer]:
        return [peer for peer in self._service.peers.values() if peer.kind == "producer"]

    def _say_end(self, peer: Peer) -> None:
        """And what it has reserved is given back, since nothing can be put in it any more."""
        slots = peer.data.slots
        while slots:
            slots.popitem()[1].release()
        peer.ending = True
        peer.send(Notify(end=True))

    def on_end(self, peer: Peer, end: ConnectionEnd) -> None:
        """The connection of a producer is over: others may begin in its place."""
        producer: _ProducerState = peer.data
        slots, producer.slots = producer.slots, {}
        # it may come again and ask for them, until then others may begin
        producer.given_back |= {number: slot.left for number, slot in slots.items()}
        for slot in slots.values():
            slot.release()
        left = sum(producer.given_back.values())
        # who closes knows what it did not put
        if left and end.kind != "closed":
            _log.warning(
                "producer %s was lost; others may begin in the place of what it had reserved and not put. Rollouts: %d",
                peer.name,
                left,
            )

    def _lost_slots(self, producer: _ProducerState, asked: Sequence[tuple[int, int, int]]) -> Iterator[int]:
        """Give a producer that is back its slots again. -> numbers of those in whose place others have begun."""
        given_back, producer.given_back = producer.given_back, {}
        for number, missing, version in asked:
            # What a former connection has brought is on its way, or accepted: the rest is still to come.
            count = given_back.get(number, missing)
            slot = self._parts.try_admit(count, version) if count and not self._balancer.ended else None
            if slot is not None:
                producer.slots[number] = slot
            elif count:
                _log.warning("%d rollouts begun at version %d: others have begun in their place", count, version)
                yield number

    def on_gone(self, peer: Peer, end: ConnectionEnd) -> None:
        """The producer does not come back."""
        owner = peer.data.owner
        if owner is not None:
            lost = self._parts.evict_lost(lambda one: _owner_of(one) == owner)
            if lost:
                names = ", ".join(lost[:5]) + (", ..." if len(lost) > 5 else "")
                _log.warning("producer %s took %d waiting rollouts with it: %s", peer.name, len(lost), names)
        self._parts.producers.left(peer.session, lost=end.kind != "closed")

    # what they ask

    def _put(self, peer: Peer, asked: Asked) -> Any:
        number, complete, may_wait, header = _READ[_Put](asked.args)
        # until the reply: who attends next may begin with it anew, and its owner must have the payload then
        asked.keeps = rollouts = decode_rollouts(header, asked.memory, partial(self._leases_of, peer))
        # the producer keeps all of a put, or none
        if isinstance(rollouts[0], RemoteRollout) and self._parts.taker != "serve":
            raise RolloutError(
                f"rollout {rollouts[0].rollout_id!r} stays with its producer (hand_over='direct'), but nobody here "
                "could fetch it: only serve() delivers such rollouts. Connect without hand_over='direct'"
            )
        if number is None:
            return self._begin(peer, asked, rollouts, complete=complete, may_wait=may_wait)
        slot = peer.data.slots.get(number)
        if slot is None:
            # perhaps it was accepted before the connection was lost, and only its reply was not
            self._parts.core.check(rollouts)
            raise BrokenResourceError(
                "its slot was given back when the connection was lost, and others have begun in its place. It was not "
                "accepted; reserve again before generating, or put it without a slot, where it may be evicted as stale"
            )
        return self._begin(peer, asked, slot.take(rollouts), slot, complete=complete)

    def _declare(self, peer: Peer, asked: Asked) -> Any:
        what, group_id, size = _READ[_Declared](asked.args)
        if what == "abandon":
            return self._balancer.abandon_group(group_id)
        return self._begin(peer, asked, [], size=GroupSize(group_id, size if what == "expect" else None))

    def _begin(
        self, peer: Peer, asked: Asked, rollouts: Sequence[Rollout], slot: Slot | None = None, *,
        complete: bool | None = None, size: GroupSize | None = None, may_wait: bool = True,
    ) -> Any:  # fmt: skip
        """A put that finds no room, or goes to a journal, takes its place in the balancer's queue now, and waits
        there."""
        pending = PendingPut(self._parts, rollouts, complete=complete, size=size)
        try:
            rest = pending.begin(anyio.current_time(), may_wait=may_wait)
        except BaseException:
            if slot is not None:
                # what was not accepted may be put again in the same slot
                slot.done(len(rollouts), accepted=False)
            raise
        if rest is not None:
            return self._waiting(peer, asked, rest, slot, len(rollouts))
        if slot is not None:
            slot.done(len(rollouts), accepted=True)
        return None

    async def _waiting(
        self, peer: Peer, asked: Asked, rest: Coroutine[Any, Any, Any], slot: Slot | None = None, count: int = 0
    ) -> Any:
        producer, accepted = peer.data, False
        producer.waiting.add(asked)
        try:
            result = await rest
            accepted = True
            return result
        finally:
            if slot is not None:
                slot.done(count, accepted=accepted)
            producer.waiting.discard(asked)
            if not producer.waiting:
                # replaced, not cleared: who waits for this end must see it, though another put begins at once
                producer.settled.set()
                producer.settled = anyio.Event()

    def _leases_of(self, peer: Peer, owner: Owner) -> Leases:
        """Leases of what a producer keeps, which has one owner of payloads."""
        producer: _ProducerState = peer.data
        if producer.owner not in (None, owner):
            raise WireError("a put names payloads of another owner")
        if not producer.leases:
            self._attach(peer, owner)
        return producer.leases[-1]

    def _attach(self, peer: Peer, owner: Owner) -> list[int]:
        """Keys of this owner that this balancer needs; from now on it hears of those that are not needed."""
        producer, session = peer.data, peer.session
        leases, producer.owner = self._parts.handed.leases[owner], owner
        producer.leases = [one for one in producer.leases if one is not leases and one.keys] + [leases]

        def tell(keys: tuple[int, ...]) -> None:
            peer = self._service.peers.get(session)
            if peer is not None:
                tables = peer.data.leases
                peer.send(Notify(dropped=tuple(key for key in keys if not any(one.needs(key) for one in tables))))

        for one in producer.leases:
            # This balancer lives on in its tell() until the next is attached: a journal may give that one the same
            # rollouts. What only the balancers before have may go from here on.
            one.attach(tell, self._service.io.do)
        return sorted(leases.keys)

    def _drop(self, peer: Peer, asked: Asked) -> None:
        """Drop payloads of a put that is accepted, unless they are needed."""
        keys, tables = _READ[Counts](asked.args), peer.data.leases
        if not tables:
            raise WireError("payloads are dropped that nobody keeps")
        for key in keys:
            # a lease that dies at once: where it is the only one, the owner hears of it
            tables[-1].hold(key)

    def _reserve(self, peer: Peer, asked: Asked) -> Any:
        number, count = _READ[_Reserve](asked.args)
        # here, in the order of calls: an error is the reply, and nothing was reserved
        check_reserve(self._balancer.config, count)
        begun = self._parts.begin(count)
        if isinstance(begun, Slot):
            return self._admitted(peer, number, begun)
        return self._waiting(peer, asked, self._finish_reserve(peer, number, begun))

    async def _finish_reserve(self, peer: Peer, number: int, begun: Coroutine[Any, Any, Slot]) -> int:
        return self._admitted(peer, number, await begun)

    def _admitted(self, peer: Peer, number: int, slot: Slot) -> int:
        # It may have gone while it waited for its turn: others begin in its place, as in that of slots which it had.
        if peer.connection is not None:
            peer.data.slots[number] = slot
        else:
            slot.release()
        return slot.version

    def _release(self, peer: Peer, asked: Asked) -> None:
        slot = peer.data.slots.pop(_READ[_Count](asked.args), None)
        if slot is not None:
            slot.release()

    def _stale(self, peer: Peer, asked: Asked) -> Any:
        slot = peer.data.slots.get(_READ[_Count](asked.args))
        # one that was lost is not waited for: others have begun in its place
        return None if slot is None else slot.stale()

    def _version_after(self, peer: Peer, asked: Asked) -> Any:
        return self._balancer.version_after(_READ[_Version | None](asked.args))

    def _set_version(self, peer: Peer, asked: Asked) -> None:
        self._balancer.set_version(*_READ[tuple[_Version]](asked.args))

    def _end(self, peer: Peer, asked: Asked) -> Any:
        """A rank ends the balancer; a producer ends for itself."""
        return self._balancer.end() if peer.kind == "rank" else self._end_producer(peer)

    async def _end_producer(self, peer: Peer) -> None:
        """Once all that was asked before has its reply."""
        producer: _ProducerState = peer.data
        for asked in producer.waiting:
            # it puts no more: what it waits to reserve would only keep others from beginning
            if asked.method == "reserve":
                self._service.cancel(asked)
        while producer.waiting:
            await producer.settled.wait()
        self._parts.producers.ended(peer.session)
        # Whoever has been told so does not say it again, to a controller that is started again.
        await self._parts.handed.flush()

    def _statistics(self, peer: Peer, asked: Asked) -> msgspec.Raw:
        return msgspec.Raw(encode_statistics(self._balancer.statistics()))


def _owner_of(rollout: Rollout) -> Owner | None:
    return rollout.handle.owner if isinstance(rollout, RemoteRollout) else None
