"""What a channel is: ordered messages with buffers behind them, and one notice when the other side is gone.

::

    RankSession, ProducerSession (controller)      RankPort (rank)      ProducerPort (producer)
            '--------- Channel: gloo pair | shared memory | TCP socket | Ray actor calls | memory ---------'

Above a channel there are sessions: state machines that decide what a message means and what may come now. They are
written once and run over every kind of channel. A channel decides nothing; whoever wants another transport writes one
of these and hands it to the acceptor.

Rules that every channel keeps, and that :func:`stream_balancer.testing.check_channel` checks: messages arrive in order;
``admit`` is asked before a byte is allocated; a message is delivered whole or not at all; a peer that is refused learns
why; ``ended`` is called once, and last; the memory of a source is held until the peer has it; no wait expires by
itself; ``abort`` joins all threads.

Only definitions: no socket, no thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import ClassVar, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from stream_balancer.errors import RefusedError, WireError
from stream_balancer.wire.messages import Message, Refused
from stream_balancer.wire.partial_batch import WantedPayload

__all__ = [
    "Actions",
    "Channel",
    "Outgoing",
    "PayloadSource",
    "PeerClosed",
    "PeerGone",
    "Receiver",
    "Sendable",
    "Session",
    "Source",
    "State",
    "either",
    "may_come_back",
    "refusal",
    "unexpected",
]


_MAX_REFUSAL = 1000  # characters


class Source(NamedTuple):
    """A buffer to be sent, written where the channel wants it when its turn comes."""

    size: int
    """Bytes."""
    fill: Callable[[Tensor], Iterator[int]]
    """Writes into ``[size]`` uint8; yields how many leading bytes are final, so that packing overlaps with sending."""
    pieces: Callable[[], Sequence[Tensor]] | None = None
    """The same bytes as they lie, ``[n]`` uint8 each, for a channel that can gather them without a copy."""
    sent: Callable[[], object] | None = None
    """Called in the channel's thread once it does not need that memory any more: the peer has it, or is gone."""


class Outgoing(NamedTuple):
    """A message, and the buffers behind it."""

    message: Message
    sources: Sequence[Source] = ()
    references: Sequence[object] = ()
    """Handles that only this kind of channel can carry (Ray's object references); sessions pass them through."""


class PeerClosed(Exception):  # noqa: N818 - not a fault
    """The peer closed the channel on purpose, and everything it had sent was delivered. ``str()`` is its reason. Who
    closed first gets it too, once the peer has answered."""


class PeerGone(ConnectionError):  # noqa: N818 - as PeerClosed
    """The connection is lost, and another one would find nobody: the peer has said so, or is known to be dead for good.
    Any other ``OSError`` may be a peer that is about to be started again."""


def may_come_back(error: Exception) -> bool:
    """Whether the peer of a channel that ended so may be there again: neither end has closed it, and nobody has said
    that nothing will come."""
    return isinstance(error, OSError) and not isinstance(error, PeerGone | ConnectionAbortedError)


def refusal(error: Exception) -> Refused | None:
    """What a channel sends last when its receiver has raised: the peer must know why, or it would come again with the
    same. None for an error that is the network's, or the peer's own refusal."""
    if isinstance(error, OSError | RefusedError):
        return None
    return Refused("protocol", str(error).encode(errors="replace").decode()[:_MAX_REFUSAL])


class Receiver(Protocol):
    """A session, as its channel sees it. Called in the channel's own thread, one call at a time (but for ``stalled``,
    which may come from another); what it raises ends the channel, and is told to the peer."""

    def admit(self, message: Message, sizes: Sequence[int]) -> Sequence[int]:
        """The bytes to allocate for each buffer, at least its size. Raises WireError unless this may come now."""
        ...

    def allocate(self, size: int) -> Tensor:
        """``[size]`` uint8 to receive into. Not called for bytes that are here already, as in shared memory."""
        ...

    def receive(self, message: Message, buffers: Sequence[Tensor], references: Sequence[object]) -> None:
        """A message and all its buffers have arrived."""
        ...

    def ended(self, error: Exception) -> None:
        """Nothing more comes: PeerClosed, RefusedError, WireError, or what the network says. Called once, and last."""
        ...

    def stalled(self, seconds: float) -> None:
        """The peer has given no sign of life for that long; 0.0: it answers again. Never a loss."""
        ...


class Channel(Protocol):
    """One connection. Methods may be called from any thread unless ``threads`` is False."""

    @property
    def threads(self) -> bool:
        """False: lives in one event loop, and every call is made there, but for :meth:`send` to a producer that keeps
        payloads. That comes from any thread: a finalizer calls it, wherever the last reference to a rollout dies,
        perhaps inside a garbage collection in the middle of another :meth:`send`."""
        ...

    @property
    def narrow(self) -> bool:
        """Whether fewer bytes are cheaper here: not in shared memory."""
        ...

    def start(self, receiver: Receiver) -> None:
        """Begin to receive. Called once."""
        ...

    def send(self, item: Sendable) -> None:
        """Queue a message, or what makes one, or none after all, when its turn comes: packing a batch takes
        milliseconds, which belong to the channel's thread. Such a callable may itself send. Ordered, never blocks. What
        is sent after :meth:`close` or the end is dropped; a callable that raises ends the channel with its own
        error."""
        ...

    def close(self, reason: str = "") -> None:
        """Let what was sent arrive, then the peer's ``ended(PeerClosed(reason))``. Never blocks. Idempotent."""
        ...

    def wait_closed(self, timeout_s: float) -> None:
        """Wait until the peer has closed too, or is gone. Blocks, unless ``threads`` is False."""
        ...

    def abort(self) -> None:
        """Release everything, threads included, in milliseconds. The peer sees a loss unless both have closed; its own
        receiver hears nothing after this, but perhaps ``ended``. Idempotent."""
        ...


Sendable: TypeAlias = Outgoing | Callable[[Channel], Outgoing | None]


class PayloadSource(Protocol):
    """Where payloads lie that did not come with their batch, and how to read them: a producer's socket, the memory of
    this process, an object store. Used by one thread, but for :meth:`close`."""

    def read(self, wanted: Sequence[WantedPayload]) -> Mapping[int, str]:
        """Read all payloads of a batch into their places, whoever keeps them: it is called once a batch, so that no
        owner has to wait for another.

        Blocks for as long as the slowest owner takes. Returns why, by index into ``wanted``, for each payload that is
        gone. Raises WireError if an owner answers something else, ClosedResourceError once closed.
        """
        ...

    def close(self) -> None:
        """Release everything, and wake a thread that reads. From any thread, idempotent."""
        ...


class State(Enum):
    """Of a session: what may come depends on it. The text is for the error of what may not."""

    OPEN = "now"
    ENDING = "after the end"
    """End was sent, or has come."""
    OVER = "any more"
    """Lost or closed: what still comes changes nothing."""

    __hash__ = object.__hash__  # Enum's own is Python code, which would run for every message


Actions: TypeAlias = dict[tuple[State, type[Message]], Callable[..., object]]
"""``(state, message) -> action(session, message, buffers, references)``."""


class Session(Receiver):
    """What sessions have in common: a table of what may come when; and buffers are allocated as they are."""

    actions: ClassVar[Actions] = {}
    """What each message does in each state. What is not in the table is refused, by name."""

    @property
    def state(self) -> State:
        """Where the conversation stands."""
        return State.OPEN

    def admit(self, message: Message, sizes: Sequence[int]) -> Sequence[int]:
        if sizes:
            raise WireError(f"a {type(message).__name__} message has no buffers behind it, not {len(sizes)}")
        return ()

    def allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def receive(self, message: Message, buffers: Sequence[Tensor], references: Sequence[object]) -> None:
        state = self.state
        if state is not State.OVER:
            self.action(state, message)(self, message, buffers, references)

    def action(self, state: State, message: Message) -> Callable[..., object]:
        """The table's. Raises WireError if the message may not come in this state."""
        action = self.actions.get((state, type(message)))
        if action is None:
            raise unexpected(message, state.value)
        return action

    def stalled(self, seconds: float) -> None:
        pass


def either(
    *rows: tuple[type[Message], Callable[..., object]],
) -> dict[tuple[State, type[Message]], Callable[..., object]]:
    """Rows of a table, for messages that do the same before the end and after it."""
    return {(state, message): action for message, action in rows for state in (State.OPEN, State.ENDING)}


def unexpected(message: Message, when: str) -> WireError:
    """A message that may not come ``when``."""
    return WireError(f"a {type(message).__name__} message may not come {when}. Install one stream_balancer everywhere")
