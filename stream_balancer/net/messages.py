"""All messages, one tag each. C controller, R rank, P producer, O owner of payloads.

::

    frame    12 bytes (magic, size, crc32) | envelope in msgpack | bytes, if they travel on the socket
    envelope [message, total, runs, via, where]

``total`` is the memory in bytes that the payload needs at the receiver, ``runs`` are its parts that come now (offset,
size, offset, size, ...; the receiver fetches the holes between them), ``via`` is the mover that brings them and
``where`` the mover's arguments. Pure: no socket, clock or thread.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

from stream_balancer.errors import RefusalReason, WireError
from stream_balancer.rollouts import Denominators, MiniBatchSize
from stream_balancer.wire.payload import reader

PROTOCOL = 5
MAX_MESSAGE_BYTES = 2**26
# lists of a message are bounded, so that decoding takes bounded memory
MAX_ENTRIES = 2**18
SMALL = 2**16
"""Most bytes that the asking thread sends itself if no other call is open. Grouped messages cost fewer wake-ups."""
CALL_BYTES = 512
"""Bytes that a call without payload counts for."""
SOCKET = 0
"""``via`` of bytes that follow their message."""
_MANY, _FEW = msgspec.Meta(max_length=65_536), msgspec.Meta(max_length=16)
Text: TypeAlias = Annotated[str, _MANY]
Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=1024)]
Small: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=4096)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
Texts: TypeAlias = Annotated[tuple[Text, ...], _MANY]
NIL = msgspec.Raw(b"\xc0")
Counts: TypeAlias = Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_ENTRIES)]


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A tag and its fields."""


class Hello(Message, frozen=True, tag=1):
    """Joiner: the first message. The acceptor reads nothing more before the proofs."""

    protocol: int
    nonce: Small


class Challenge(Message, frozen=True, tag=2):
    """Acceptor: its proof over both nonces."""

    nonce: Small
    proof: Small


class Join(Message, frozen=True, tag=3):
    """Joiner: its proof, kind, name and movers."""

    proof: Small
    kind: Name
    name: Name
    session: Small
    """Random, and the same at each join of this process."""
    movers: Annotated[tuple[Name, ...], _FEW] = ()
    about: msgspec.Raw = NIL
    """Facts of the joiner's kind: a rank's number, world size, room, and steps."""


class About(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Facts about a process of a rank when it joins."""

    rank: Count
    dp_size: int
    incarnation: Count
    depth: Annotated[int, msgspec.Meta(ge=1)]
    seat: Count = 0
    seats: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    max_batch_bytes: Count = 2**32
    weights: tuple[Count, Count] = (0, 0)
    """The weights contain all steps before the first number; the second is the attempt of the last step (0:
    unknown)."""
    acked: Annotated[int, msgspec.Meta(ge=-1)] = -1
    """Saved weights contain all steps up to this one."""
    holds: Annotated[dict[Count, tuple[Count, Annotated[int, msgspec.Meta(ge=0, le=5)]]], _MANY] = {}
    """Attempt and phase of each step that the process holds; see :class:`stream_balancer.steps.state.Phase`."""
    is_start: bool = True
    """The process joins for the first time."""


class Admitted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The controller's answer to a rank that joins."""

    incarnation: Count
    """Number under which the process joins again after a broken connection."""
    term: Count
    """Number of the controller. A rank obeys no controller of a lower term."""
    has_barrier: bool
    """Ranks meet through ``step.finish()``."""


class Welcome(Message, frozen=True, tag=4):
    """Acceptor: you are admitted. The limits of calls, and the movers that both ends know."""

    staged_bytes: Count = 64 * 2**20
    max_call_bytes: Count = 2**30
    max_calls: Count = 1024
    known: bool = False
    """True if this session's earlier calls are remembered here."""
    movers: Annotated[tuple[Name, ...], _FEW] = ()
    about: msgspec.Raw = NIL


class Refused(Message, frozen=True, tag=5):
    """Either end, at any time: refusal and its reason. The connection ends."""

    reason: RefusalReason
    text: Text


class Close(Message, frozen=True, tag=6):
    """Either end: I send nothing after this."""

    reason: Text = ""


class MoverNote(Message, frozen=True, tag=7):
    """Either end: a note from one end of a mover to its other end (addresses, a probe, free memory)."""

    mover: Count
    body: Annotated[bytes, _MANY]


class Work(Message, frozen=True, tag=10):
    """C to R: a rank's part of one attempt of a step, and the bytes of it that the controller has."""

    step: Count
    attempt: Count
    ranks: Counts
    """Ranks of the attempt, ascending."""
    place: Count
    """Place of this rank among ``ranks``."""
    needs_commit: bool
    """Report READY, and meet after Commit."""
    load: float
    """Predicted work of this rank."""
    sizes: Denominators
    """Numbers that all ranks divide by."""
    mini_batches: Annotated[tuple[MiniBatchSize, ...], _MANY] = ()
    header: msgspec.Raw = NIL
    """Header as :mod:`stream_balancer.wire.codec` writes it: a block for each micro-batch."""


class Commit(Message, frozen=True, tag=12):
    """C to R: all ranks are READY, so they meet."""

    step: Count
    attempt: Count
    masked: Texts = ()
    """Ids of rollouts whose payloads were lost after the plan: they count with weight 0."""


class Notify(Message, frozen=True, tag=13):
    """C to R, C to P: a policy version is in force; the end; payloads that no rank needs any more."""

    version: int | None = None
    end: bool = False
    dropped: Counts = ()


class Report(Message, frozen=True, tag=14):
    """R to C: a fact about a step: ready, failed, missing, finished, acked, loaded, forgot."""

    fact: Name
    step: Count = 0
    attempt: Count = 0
    about: msgspec.Raw = NIL
    """Details of the fact: times of a finished step, causes by id of missing rollouts."""


class Behind(Message, frozen=True, tag=15):
    """C to R: other weights contain this step, yours lack it: discard all steps and load newer weights."""

    step: Count
    text: Text


class Drop(Message, frozen=True, tag=17):
    """C to R: discard this step. ``lacking``: as after Behind."""

    step: Count
    attempt: Count
    lacking: bool
    text: Text = ""


class Call(Message, frozen=True, tag=20):
    """P or R to C, R to O: a request. Numbered from 0, without gaps; bytes may follow."""

    number: Count
    seen: Count
    """Replies to calls below this one have arrived and may be forgotten."""
    method: Name
    args: msgspec.Raw


class Cancel(Message, frozen=True, tag=21):
    """The caller withdraws its call. The call still gets its one reply."""

    number: Count


class Reply(Message, frozen=True, tag=22):
    """The one reply to a call. ``error`` is empty, or the kind of error and ``value`` its text. Bytes may follow."""

    number: Count
    value: msgspec.Raw = NIL
    error: Name = ""


AnyMessage: TypeAlias = (
    Hello | Challenge | Join | Welcome | Refused | Close | MoverNote | Work | Commit | Notify | Report | Behind
    | Drop | Call | Cancel | Reply
)  # fmt: skip


class Envelope(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A message, and the location of its bytes."""

    message: AnyMessage
    total: Count = 0
    runs: Counts = ()
    via: Count = SOCKET
    where: Annotated[tuple[Count, ...], _FEW] = ()


# little-endian on every machine, and fixed, since the receiver reads this first
_HEADER = struct.Struct("<4sII")
_MAGIC = b"sbn\x01"
HEADER_BYTES = _HEADER.size
_encoder, _read = msgspec.msgpack.Encoder(), reader(Envelope, "a message")


def frame(message: Message, total: int = 0, runs: Sequence[int] = (), via: int = 0, where: Sequence[int] = ()) -> bytes:
    """Header and envelope."""
    body = _encoder.encode((message, total, runs, via, where))
    # raised here, where the caller is known: the receiver would end the connection
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a {type(message).__name__} message of {len(body)} bytes; at most {MAX_MESSAGE_BYTES}")
    return _HEADER.pack(_MAGIC, len(body), zlib.crc32(body)) + body


def read_header(raw: memoryview | bytes, most: int = MAX_MESSAGE_BYTES) -> tuple[int, int]:
    """Size of the envelope in bytes, and its checksum."""
    # the magic first: it tells other programs' bytes apart
    magic, size, crc = _HEADER.unpack(raw)
    if magic != _MAGIC:
        raise WireError("not a message of this protocol")
    # before the body is allocated
    if not 0 < size <= most:
        raise WireError(f"a message of {size} bytes; at most {most} are taken")
    return size, crc


def read_envelope(body: memoryview | bytes, crc: int) -> Envelope:
    """The message, and the location of its bytes. Raises WireError for any other content."""
    # a checksum against faults of programs or memory, not attacks: the handshake has authenticated the sender
    if zlib.crc32(body) != crc:
        raise WireError("the checksum of a message is wrong")
    envelope: Envelope = _read(body)
    # nearly all payloads are one run, which needs no loop
    if envelope.runs and envelope.runs != (0, envelope.total):
        check_runs(envelope.total, envelope.runs)
    return envelope


def check_runs(total: int, runs: Sequence[int]) -> None:
    """Raise WireError unless the runs are ascending parts of ``total`` bytes."""
    if len(runs) % 2:
        raise WireError("half a run")
    at = 0
    for offset, size in zip(runs[::2], runs[1::2], strict=True):
        # ascending and disjoint, so that no byte is written twice or beyond the memory
        if offset < at or size < 1 or offset + size > total:
            raise WireError(f"a run of {size} bytes at {offset} of {total}")
        at = offset + size
