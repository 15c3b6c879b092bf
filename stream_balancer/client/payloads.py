"""Payloads that stay with their producers: storage there, and fetches into a rank's batch.

::

    PayloadOwner (a producer's process)   <--Call fetch-- Fetcher (a rank)
                                           --bytes-->     into the holes of the decoded batch

An owner answers in its I/O thread, from the tensors in place. A rank asks all owners together, in its I/O thread. A
payload that its owner dropped, or that is lost with its owner, is *missing*: the step is trained without it.
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
"""Most bytes of one call, unless one rollout is larger: replies are copied into their places one by one."""

_LEASE_S = 60.0
"""Seconds that a rank waits for an owner that does not answer. After the same time the balancer ends a lost producer's
session, and its rollouts are lost."""

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_Part: TypeAlias = tuple[_Count, _Count]
"""Key, and expected bytes."""
_Done: TypeAlias = Callable[[Mapping[str, str]], object]
"""Takes the causes of failed fetches, by rollout id."""
_parts_of = reader(Annotated[list[_Part], msgspec.Meta(max_length=2**18)], "a fetch")
_missing_of = reader(list[_Count], "its answer")


class KeepsPayloads(ABC):
    """Payloads that stay where they were made until no rank needs them, by number. Safe to use from any thread.
    Subclasses differ in :meth:`keep`: in this process, or in an object store."""

    owner: Owner
    least_bytes = 0
    """Least bytes of a put whose payloads are kept; a smaller put carries its tokens."""
    blocks = False
    """:meth:`keep` copies and may block, so no event loop should call it."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}
        # kept payloads that the balancer has, as far as is known
        self._accepted: set[int] = set()
        self._keys = itertools.count()
        self._waiting: list[Signal] = []

    def __len__(self) -> int:
        return len(self._kept)

    @abstractmethod
    def keep(self, rollouts: Sequence[Rollout]) -> list[Handle]:
        """Handles for the rollouts of one put. Raises WouldBlock while there is no room."""

    def answered(self, keys: Sequence[int], *, accepted: bool) -> None:
        """Note the reply to the put of these payloads. A lost put counts as accepted, since it may have been."""
        if accepted:
            # the balancer may have dropped some already
            self._accepted.update(self._kept.keys() & keys)
        else:
            self.drop(keys)

    def drop(self, keys: Sequence[int]) -> None:
        """Remove payloads; unknown keys are fine."""
        for key in keys:
            self._kept.pop(key, None)
            self._accepted.discard(key)
        if not self._kept:
            waiting, self._waiting = self._waiting, []
            for signal in waiting:
                signal.set()

    def retain(self, keys: AbstractSet[int]) -> None:
        """Drop all payloads except ``keys`` and those whose put has no reply."""
        self.drop(list(self._accepted - keys))

    async def released(self) -> None:
        """Wait until no payload is needed here."""
        while self._kept:
            signal = Signal()
            self._waiting.append(signal)
            # tested again: the last payload may have gone before the signal was in the list
            if self._kept:
                await signal.wait()

    def close(self) -> None:
        """Drop all payloads. Idempotent."""
        self.drop(list(self._kept))


class PayloadOwner(KeepsPayloads):
    """Payloads kept in this process."""

    def __init__(self, listen: Listen, token: bytes, label: str) -> None:
        """``label``: for errors and logs."""
        super().__init__()
        self._service = Service(listen)
        # in the I/O thread: the event loop of a producer may be busy generating
        self._service.answer_here({"fetch": self._fetch})
        self.owner = Owner(self._service.address, token, label)

    @classmethod
    def over_tcp(cls, label: str, host: str = "127.0.0.1") -> PayloadOwner:
        """Listen on a port of this address, with a new token. Raises OSError if that is not possible."""
        token = secrets.token_hex(16).encode()
        return cls(lambda arrived: Listener(host, 0, token, arrived), token, label)

    def keep(self, rollouts: Sequence[Rollout]) -> list[Handle]:
        """Hold rollouts' tensors until :meth:`drop`. Nothing is copied."""
        # a key is never used twice: a late drop must not hit another payload
        keys = [next(self._keys) for _ in rollouts]
        self._kept.update(zip(keys, rollouts, strict=True))
        return [Handle(self.owner, key) for key in keys]

    def close(self) -> None:
        """Stop answering, and drop all payloads. Idempotent."""
        self._service.io.do(self._service.close)
        super().close()

    def _fetch(self, peer: Peer, asked: Asked) -> Encoded:
        missing: list[int] = []
        pieces: list[memoryview] = []
        for number, (key, size) in enumerate(_parts_of(asked.args)):
            rollout = self._kept.get(key)
            views = [] if rollout is None else payload_of(rollout)
            # after a restart, another rollout may have the same key: better missing than wrong
            if rollout is None or sum(view.nbytes for view in views) != size:
                missing.append(number)
            else:
                pieces += views
        return Encoded(missing, Payload.of(*pieces))


class Source(Protocol):
    """A rank's way to one owner. Belongs to the I/O thread."""

    def fetch(self, wanted: Sequence[Wanted], done: _Done) -> None:
        """Fill the places of ``wanted``; then call ``done`` once, with the causes of failures by id."""

    def close(self) -> None:
        """Release the way. Idempotent."""


SOURCES: dict[str, Callable[[Owner], Source]] = {}
"""Ways to owners that need no dialling, by the scheme of the address: "ray" of "ray://actor"."""


class Fetcher:
    """One rank's ways to owners of payloads. A way stays open."""

    def __init__(self, dialer_of: Callable[[Owner], Dialer]) -> None:
        """``dialer_of``: dialer of an owner that listens."""
        self._dialer_of = dialer_of
        self._sources: dict[Owner, Source] = {}
        self._closed = False

    def fetch(self, decoded: Decoded, done: _Done) -> None:
        """Fill all holes except masked ones; then call ``done`` once, with the causes of failures by id. In the I/O
        thread; immediately if there are no holes, never after :meth:`close`."""
        if self._closed:
            return
        by_owner: dict[Owner, list[Wanted]] = {}
        for one in decoded.holes():
            by_owner.setdefault(one.owner, []).append(one)
        # one more, so that `done` is called only after all owners were asked
        answered = _after(len(by_owner) + 1, lambda causes: None if self._closed else done(causes))
        for owner, wanted in by_owner.items():
            self._source(owner).fetch(wanted, answered)
        answered({})

    def close(self) -> None:
        """Stop fetching. From any thread. Idempotent."""
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
    """The way to an owner that listens: a session, and a new one after a loss."""

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
        # after submit(): a closed session answers immediately
        pending.signal.then(lambda: answered(_filled(share, pending)))

    def close(self) -> None:
        if self._session is not None:
            self._session.close()

    def _open(self) -> Session:
        if self._session is None:
            self._session = Session(
                # an owner listens while it has payloads; a paused owner answers when it goes on
                self._dialer_of(self._owner), "fetcher", once=True, rejoin=True, connect_timeout_s=_LEASE_S,
                whom=f"owner {self._owner.label}", on_end=self._on_end,
            )  # fmt: skip
            self._session.begin()
        return self._session

    def _on_end(self, _: Exception) -> None:
        self._session = None


def _shares(wanted: Sequence[Wanted]) -> Iterator[list[Wanted]]:
    """Split payloads into calls of at most ``_CALL_BYTES``."""
    share: list[Wanted] = []
    size = 0
    for one in wanted:
        # a larger payload goes alone
        if share and size + one.num_bytes > _CALL_BYTES:
            yield share
            share, size = [], 0
        share.append(one)
        size += one.num_bytes
    yield share


def _after(count: int, done: _Done) -> _Done:
    """A function to be called with each of ``count`` answers; the last call runs ``done`` with the causes of all."""
    causes: dict[str, str] = {}

    def answered(more: Mapping[str, str]) -> None:
        nonlocal count
        count -= 1
        causes.update(more)
        if not count:
            done(causes)

    return answered


def _filled(wanted: Sequence[Wanted], pending: Pending) -> dict[str, str]:
    """Copy arrived bytes to their places. -> causes of the missing ones, by rollout id."""
    if pending.error is not None:
        return {one.rollout_id: str(pending.error) for one in wanted}
    value, memory = pending.answer
    try:
        missing = set(_missing_of(value))
    except WireError as error:
        return {one.rollout_id: str(error) for one in wanted}
    size = 0 if memory is None else memory.size
    # check the total before any write
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
