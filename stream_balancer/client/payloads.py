"""Payloads that stay with who made them: how they are kept there, and how a rank fetches them into its batch.

::

    PayloadOwner (a producer's process)   <--Call fetch-- Fetcher (a rank)
                                           --bytes-->     into the holes of what was decoded

An owner answers in its I/O thread, from where the tensors lie. A rank asks all owners before it waits for the first.
What an owner has not any more, or what is gone with it, is *missing*: nobody trains on it, and the step goes on.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, NamedTuple, TypeAlias

import msgspec

from stream_balancer.errors import BrokenResourceError, ClosedResourceError, WireError
from stream_balancer.net.calls import Asked, Pending
from stream_balancer.net.connection import Base
from stream_balancer.net.listener import Listener
from stream_balancer.net.loops import Signal
from stream_balancer.net.messages import Join, Welcome
from stream_balancer.net.service import Bytes, Listen, Peer, Service
from stream_balancer.net.session import Dialer, Session
from stream_balancer.types import Rollout
from stream_balancer.wire.codec import Decoded, Handle, Owner, Wanted, payload_of
from stream_balancer.wire.payload import Memory, Payload

__all__ = ["Fetcher", "Missing", "PayloadOwner"]

_CONNECT_S = 10.0
_CALL_BYTES = 2**26
"""Asked for at once, unless one rollout is larger: replies are copied into their places one by one."""

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_Part: TypeAlias = tuple[_Count, Annotated[int, msgspec.Meta(ge=1, lt=2**20)], _Count, _Count]
"""Key, degree, place, and bytes that are expected."""
_parts_of = msgspec.msgpack.Decoder(Annotated[list[_Part], msgspec.Meta(max_length=2**18)]).decode
_missing_of = msgspec.msgpack.Decoder(list[_Count]).decode


class Missing(NamedTuple):
    """A rollout whose payload is gone."""

    rollout: int
    """Place among all rollouts of what was decoded."""
    rollout_id: str
    owner: str
    """Its label."""
    cause: str


class PayloadOwner:
    """Payloads that are kept here for ranks. Safe to use from any thread."""

    def __init__(self, listen: Listen, token: bytes, label: str) -> None:
        """``label``: for errors and logs."""
        self._kept: dict[int, Rollout] = {}
        self._keys = itertools.count()
        self._waiting: list[Signal] = []
        self._service = Service(listen)
        self._service.answer_here({"fetch": self._fetch})
        self.owner = Owner(self._service.address, token, label)

    @classmethod
    def over_tcp(cls, label: str, host: str = "127.0.0.1") -> PayloadOwner:
        """Listens on a port of this address, with a token of its own. Raises OSError if that is not possible."""
        token = secrets.token_hex(16).encode()
        return cls(lambda arrived: Listener(host, 0, token, arrived), token, label)

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, rollout: Rollout) -> Handle:
        """Hold a rollout's tensors until :meth:`drop`. Nothing is copied."""
        key = next(self._keys)
        self._kept[key] = rollout
        return Handle(self.owner, key)

    def drop(self, keys: Iterable[int]) -> None:
        """They are not needed any more; unknown ones are fine."""
        for key in keys:
            self._kept.pop(key, None)
        if not self._kept:
            waiting, self._waiting = self._waiting, []
            for signal in waiting:
                signal.set()

    async def released(self) -> None:
        """Wait until nothing is needed here any more."""
        while self._kept:
            signal = Signal()
            self._waiting.append(signal)
            if self._kept:
                await signal.wait()

    def close(self) -> None:
        """Nobody can fetch any more. Idempotent."""
        self._service.io.do(self._service.close)
        self.drop(list(self._kept))

    def _fetch(self, peer: Peer, asked: Asked) -> Bytes:
        try:
            parts = _parts_of(asked.args)
        except (msgspec.DecodeError, ValueError) as error:
            raise WireError(f"a fetch that cannot be read: {error}") from None
        missing: list[int] = []
        pieces: list[memoryview] = []
        for number, (key, degree, place, size) in enumerate(parts):
            if place >= degree:
                raise WireError(f"place {place} of {degree} ranks is wanted, which there cannot be")
            rollout = self._kept.get(key)
            views = [] if rollout is None else payload_of(rollout, degree, place)
            if rollout is None or sum(view.nbytes for view in views) != size:
                missing.append(number)
            else:
                pieces += views
        return Bytes(missing, Payload.of(*pieces))


class Fetcher:
    """Sessions of one rank with owners of payloads, which stay open."""

    def __init__(self, dialer_of: Callable[[Owner], Dialer]) -> None:
        """``dialer_of``: the way to an owner."""
        self._dialer_of = dialer_of
        self._sessions: dict[Owner, Session] = {}
        self._closed = False

    async def fetch_holes(self, decoded: Decoded) -> list[Missing]:
        """Fill all holes but those that are masked; what could not be filled, to be masked everywhere. Raises
        ClosedResourceError after :meth:`close`."""
        asked = [
            (few, self._ask(owner, few))
            for owner, wanted in _by_owner(decoded.holes())
            for few in _shares(wanted, _CALL_BYTES)
        ]
        missing: list[Missing] = []
        try:
            for few, pending in asked:
                await pending.signal.wait()
                missing += self._fill(few, pending)
        except BaseException:
            for few, pending in asked:
                session = self._sessions.get(few[0].owner)
                if session is not None and not pending.signal.is_set():
                    session.caller.cancel(pending)
            raise
        return missing

    def close(self) -> None:
        """Wakes who fetches. Idempotent."""
        self._closed = True
        for session in list(self._sessions.values()):
            session.close()

    def _ask(self, owner: Owner, wanted: Sequence[Wanted]) -> Pending:
        if self._closed:
            raise ClosedResourceError
        session = self._sessions.get(owner)
        if session is None:
            session = self._sessions[owner] = Session(
                _Once(self._dialer_of(owner)), "fetcher", connect_timeout_s=_CONNECT_S, whom=f"owner {owner.label}",
                on_end=lambda _: self._forget(owner, session),
            )  # fmt: skip
        parts = [(one.key, one.degree, one.place, one.num_bytes) for one in wanted]
        pending = Pending("fetch", parts, reply_bytes=sum(size for *_, size in parts))
        session.caller.submit(pending)
        return pending

    def _forget(self, owner: Owner, session: Session | None) -> None:
        """The next fetch connects again."""
        if self._sessions.get(owner) is session:
            del self._sessions[owner]

    def _fill(self, wanted: Sequence[Wanted], pending: Pending) -> Iterator[Missing]:
        if self._closed:
            raise ClosedResourceError
        error: Exception | None = pending.error
        lacks: set[int] = set()
        if error is None:
            value, memory = pending.answer
            try:
                lacks = set(_missing_of(value))
                _copy([one for number, one in enumerate(wanted) if number not in lacks], memory)
            except (msgspec.DecodeError, WireError) as other:
                error = other
        for number, one in enumerate(wanted):
            if error is not None or number in lacks:
                cause = f"it does not have payload {one.key}" if error is None else str(error)
                yield Missing(one.rollout, one.rollout_id, one.owner.label, cause)


class _Once:
    """A dialer whose first failure is final: an owner listens for as long as it has payloads."""

    def __init__(self, dialer: Dialer) -> None:
        self._dialer, self.io = dialer, dialer.io

    def dial(
        self, join: Join, welcomed: Callable[[Base, Welcome], None], failed: Callable[[BaseException], None]
    ) -> None:
        self._dialer.dial(join, welcomed, lambda error: failed(BrokenResourceError(str(error))))


def _by_owner(wanted: Sequence[Wanted]) -> Iterable[tuple[Owner, list[Wanted]]]:
    found: dict[Owner, list[Wanted]] = {}
    for one in wanted:
        found.setdefault(one.owner, []).append(one)
    return found.items()


def _shares(wanted: Sequence[Wanted], most_bytes: int) -> Iterator[list[Wanted]]:
    share: list[Wanted] = []
    size = 0
    for one in wanted:
        if share and size + one.num_bytes > most_bytes:
            yield share
            share, size = [], 0
        share.append(one)
        size += one.num_bytes
    yield share


def _copy(wanted: Sequence[Wanted], memory: Memory | None) -> None:
    size = 0 if memory is None else memory.size
    if sum(one.num_bytes for one in wanted) != size:
        raise WireError(f"it sends {size} bytes, other than it has described")
    at = 0
    for place in itertools.chain.from_iterable(one.places for one in wanted):
        assert memory is not None
        place[:] = memory[at : at + len(place)].data
        at += len(place)
