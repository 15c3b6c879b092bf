"""Payloads that stay with who made them: how they are kept there, and how a rank fetches them into its batch.

::

    PayloadOwner (a producer's process)   <--Call fetch-- Fetcher (a rank)
                                           --bytes-->     into the holes of what was decoded

An owner answers in its I/O thread, from where the tensors lie. A rank asks all owners at once, in its own. What an
owner has not any more, or what is gone with it, is *missing*: no rank trains on it, and the step goes on.
"""

from __future__ import annotations

import itertools
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Annotated, Any, Protocol, TypeAlias

import msgspec

from stream_balancer.errors import WireError
from stream_balancer.net.line import Dialer
from stream_balancer.net.listener import Listen, Listener
from stream_balancer.net.loops import Signal
from stream_balancer.net.service import Asked, Peer, Service
from stream_balancer.net.session import Pending, Session
from stream_balancer.rollouts import Rollout
from stream_balancer.wire.codec import Decoded, Handle, Owner, Wanted, payload_of
from stream_balancer.wire.payload import Encoded, Payload, reader

_CALL_BYTES = 2**26
"""Asked for at once, unless one rollout is larger: replies are copied into their places one by one."""

_LEASE_S = 60.0
"""Seconds for which a rank waits for an owner that does not answer. The balancer keeps a lost producer's session for
as long; then its rollouts are lost."""

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_Part: TypeAlias = tuple[_Count, _Count]
"""Key, and bytes that are expected."""
_Done: TypeAlias = Callable[[Mapping[str, str]], object]
"""Takes why some payloads could not be fetched, by id."""
_parts_of = reader(Annotated[list[_Part], msgspec.Meta(max_length=2**18)], "a fetch")
_missing_of = reader(list[_Count], "its answer")


class KeepsPayloads(ABC):
    """Payloads that stay where they were made until ranks need them no more, by number, and the wait for that. Safe to
    use from any thread. :meth:`keep` is what differs: in this process, or in an object store."""

    owner: Owner
    least_bytes = 0
    """Smaller puts bring their tokens along."""
    blocks = False
    """:meth:`keep` copies, and may wait: no event loop should."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}
        # of those, what the balancer has, as far as is known
        self._accepted: set[int] = set()
        self._keys = itertools.count()
        self._waiting: list[Signal] = []

    def __len__(self) -> int:
        return len(self._kept)

    @abstractmethod
    def keep(self, rollouts: Sequence[Rollout]) -> list[Handle]:
        """Handles for the rollouts of one put. Raises WouldBlock while there is no room."""

    def answered(self, keys: Sequence[int], *, accepted: bool) -> None:
        """The put of these has its reply, or is lost; then it may have been accepted."""
        if accepted:
            # it may be through with some by now
            self._accepted.update(self._kept.keys() & keys)
        else:
            self.drop(keys)

    def drop(self, keys: Sequence[int]) -> None:
        """Payloads are not needed any more; unknown ones are fine."""
        for key in keys:
            self._kept.pop(key, None)
            self._accepted.discard(key)
        if not self._kept:
            waiting, self._waiting = self._waiting, []
            for signal in waiting:
                signal.set()

    def retain(self, keys: AbstractSet[int]) -> None:
        """Drop all others, but for those whose put has no reply."""
        self.drop(list(self._accepted - keys))

    async def released(self) -> None:
        """Wait until nothing is needed here any more."""
        while self._kept:
            signal = Signal()
            self._waiting.append(signal)
            # again: the last one may have gone before the signal was in the list
            if self._kept:
                await signal.wait()

    def close(self) -> None:
        """End of fetching. Idempotent."""
        self.drop(list(self._kept))


class PayloadOwner(KeepsPayloads):
    """Payloads that are kept in this process."""

    def __init__(self, listen: Listen, token: bytes, label: str) -> None:
        """``label``: for errors and logs."""
        super().__init__()
        self._service = Service(listen)
        # in the I/O thread: the event loop of a producer may be busy generating
        self._service.answer_here({"fetch": self._fetch})
        self.owner = Owner(self._service.address, token, label)

    @classmethod
    def over_tcp(cls, label: str, host: str = "127.0.0.1") -> PayloadOwner:
        """Listens on a port of this address, with a token of its own. Raises OSError if that is not possible."""
        token = secrets.token_hex(16).encode()
        return cls(lambda arrived: Listener(host, 0, token, arrived), token, label)

    def keep(self, rollouts: Sequence[Rollout]) -> list[Handle]:
        """Hold rollouts' tensors until :meth:`drop`. Nothing is copied."""
        # never used twice: a late drop must not hit another payload
        keys = [next(self._keys) for _ in rollouts]
        self._kept.update(zip(keys, rollouts, strict=True))
        return [Handle(self.owner, key) for key in keys]

    def close(self) -> None:
        """End of fetching. Idempotent."""
        self._service.io.do(self._service.close)
        super().close()

    def _fetch(self, peer: Peer, asked: Asked) -> Encoded:
        missing: list[int] = []
        pieces: list[memoryview] = []
        for number, (key, size) in enumerate(_parts_of(asked.args)):
            rollout = self._kept.get(key)
            views = [] if rollout is None else payload_of(rollout)
            # another rollout under the same key, after a restart: better missing than wrong
            if rollout is None or sum(view.nbytes for view in views) != size:
                missing.append(number)
            else:
                pieces += views
        return Encoded(missing, Payload.of(*pieces))


class Source(Protocol):
    """A rank's way to one owner. In the I/O thread."""

    def fetch(self, wanted: Sequence[Wanted], done: _Done) -> None:
        """Fill the places of what is wanted; then, once, ``done`` with why some could not be filled, by id."""

    def close(self) -> None:
        """Not needed any more. Idempotent."""


SOURCES: dict[str, Callable[[Owner], Source]] = {}
"""Ways to owners that are not dialled, by what their addresses begin with: "ray" of "ray://actor"."""


class Fetcher:
    """Ways of one rank to owners of payloads, which stay open."""

    def __init__(self, dialer_of: Callable[[Owner], Dialer]) -> None:
        """``dialer_of``: how an owner that listens is reached."""
        self._dialer_of = dialer_of
        self._sources: dict[Owner, Source] = {}
        self._closed = False

    def fetch(self, decoded: Decoded, done: _Done) -> None:
        """Fill all holes but those that are masked; then, once, ``done`` with why some could not be filled, by id. In
        the I/O thread, at once where there is nothing to fetch; never after :meth:`close`."""
        if self._closed:
            return
        by_owner: dict[Owner, list[Wanted]] = {}
        for one in decoded.holes():
            by_owner.setdefault(one.owner, []).append(one)
        # one more, so that done is not called before all were asked
        answered = _after(len(by_owner) + 1, lambda causes: None if self._closed else done(causes))
        for owner, wanted in by_owner.items():
            self._source(owner).fetch(wanted, answered)
        answered({})

    def close(self) -> None:
        """Fetch nothing more. From any thread. Idempotent."""
        self._closed = True
        for source in list(self._sources.values()):
            source.close()

    def _source(self, owner: Owner) -> Source:
        found = self._sources.get(owner)
        if found is None:
            make = SOURCES.get(owner.address.partition("://")[0])
            found = _Dialled(owner, self._dialer_of) if make is None else make(owner)
            self._sources[owner] = found
        return found


class _Dialled:
    """The way to an owner that listens: a session, made anew after it was lost."""

    def __init__(self, owner: Owner, dialer_of: Callable[[Owner], Dialer]) -> None:
        self._owner, self._dialer_of = owner, dialer_of
        self._session: Session | None = None

    def fetch(self, wanted: Sequence[Wanted], done: _Done) -> None:
        shares = list(_shares(wanted))
        answered = _after(len(shares), done)
        for share in shares:
            self._ask(share, answered)

    def _ask(self, share: Sequence[Wanted], answered: _Done) -> None:
        parts = [(one.key, one.num_bytes) for one in share]
        pending = Pending("fetch", parts, reply_bytes=sum(size for *_, size in parts))
        self._open().submit(pending)
        # after it was handed in: a session that is closed answers at once
        pending.signal.then(lambda: answered(_filled(share, pending)))

    def close(self) -> None:
        if self._session is not None:
            self._session.close()

    def _open(self) -> Session:
        if self._session is None:
            self._session = Session(
                # an owner listens for as long as it has payloads; a paused one answers when it goes on
                self._dialer_of(self._owner), "fetcher", once=True, rejoin=True, connect_timeout_s=_LEASE_S,
                whom=f"owner {self._owner.label}", on_end=self._on_end,
            )  # fmt: skip
            self._session.begin()
        return self._session

    def _on_end(self, _: Exception) -> None:
        self._session = None


def _shares(wanted: Sequence[Wanted]) -> Iterator[list[Wanted]]:
    """Payloads that are asked for in one call."""
    share: list[Wanted] = []
    size = 0
    for one in wanted:
        # one that is larger goes alone
        if share and size + one.num_bytes > _CALL_BYTES:
            yield share
            share, size = [], 0
        share.append(one)
        size += one.num_bytes
    yield share


def _after(count: int, done: _Done) -> _Done:
    """A function for each of so many answers; the last one calls ``done`` with the causes of all."""
    causes: dict[str, str] = {}

    def answered(more: Mapping[str, str]) -> None:
        nonlocal count
        count -= 1
        causes.update(more)
        if not count:
            done(causes)

    return answered


def _filled(wanted: Sequence[Wanted], pending: Pending) -> dict[str, str]:
    """Copies what has come to its places; why the rest has not come, by id."""
    if pending.error is not None:
        return {one.rollout_id: str(pending.error) for one in wanted}
    value, memory = pending.answer
    try:
        missing = set(_missing_of(value))
    except WireError as error:
        return {one.rollout_id: str(error) for one in wanted}
    size = 0 if memory is None else memory.size
    # checked in all before anything is written
    if sum(one.num_bytes for number, one in enumerate(wanted) if number not in missing) != size:
        return {one.rollout_id: f"it sent {size} bytes, other than it has described" for one in wanted}
    at, causes = 0, dict[str, str]()
    for number, one in enumerate(wanted):
        if number in missing:
            causes[one.rollout_id] = f"it does not have payload {one.key}"
        elif memory is not None:
            one.fill([memory[at : at + one.num_bytes].data])
            at += one.num_bytes
    return causes
