"""Every message between controller, rank and producer: one type each, one tag each, no field with two meanings.

::

    on a channel   msgpack of (sizes of the buffers behind it, message), then the buffers
    C controller   R rank   P producer   O owner of payloads (a producer, for the ranks that fetch from it)

A message is an array whose first entry is its tag (:class:`Message`), so a message is a few dozen bytes. Anything else
that a peer sends raises :class:`~stream_balancer.errors.WireError` in :func:`decode_message`. Texts and tuples are
bounded here; numbers are checked by the session that receives them, which knows what may come now. What a batch or a
put looks like inside its buffer is :mod:`stream_balancer.wire.rank_batch`.

Only definitions, and bytes to messages and back: no socket, thread, clock or torch. One list, however long: tags are
unique across all of it, and whoever changes one message compares it with its neighbours.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from stream_balancer.errors import RefusalReason, WireError, refused_error

__all__ = [
    "MAX_ENTRIES",
    "MAX_LATE_COLUMNS",
    "MAX_STATISTICS_BYTES",
    "MAX_TEXT",
    "PROTOCOL",
    "Accepted",
    "Admitted",
    "Batch",
    "BundledPut",
    "Cancel",
    "Challenge",
    "Close",
    "DeclareGroup",
    "Denominators",
    "DropPayloads",
    "End",
    "EndBalancer",
    "EndInput",
    "Hello",
    "Join",
    "JoinFetcher",
    "JoinPeer",
    "JoinProducer",
    "JoinRank",
    "LateColumn",
    "MapBuffer",
    "Message",
    "MiniBatchDenominators",
    "MissingRollout",
    "Owner",
    "PairAddress",
    "PairReady",
    "PartialBatch",
    "PartsDone",
    "Payloads",
    "PayloadsFetched",
    "PolicyVersion",
    "ProbeMemory",
    "ProbeResult",
    "Put",
    "PutBundle",
    "PutGroup",
    "PutRefused",
    "ReassignedPart",
    "Refused",
    "Release",
    "ReleaseBuffers",
    "ReleaseSlot",
    "Released",
    "Reserve",
    "ResizedExecution",
    "RolloutHeader",
    "SharedBuffers",
    "StatisticsReply",
    "StatisticsRequest",
    "StepColumns",
    "StepComplete",
    "StepHeld",
    "StepReport",
    "Taken",
    "WantPayloads",
    "Welcome",
    "WelcomePeer",
    "WelcomeProducer",
    "WelcomeRank",
    "decode_message",
    "encode_message",
]

PROTOCOL = 9
"""Version of everything that crosses a channel. Peers that differ refuse each other in the handshake."""
MAX_TEXT = 65_536
"""Characters of a text in a message."""
MAX_ENTRIES = 65_536
"""Entries of a tuple in a message; what is longer travels as several messages, or in a buffer."""
MAX_LATE_COLUMNS = 64
"""That a role computes."""
MAX_STATISTICS_BYTES = 2**20
"""Of a balancer's statistics in a message: thousands of ranks and strata."""

Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
"""A number of bytes, rollouts, steps. The upper bound is the session's."""
Numbers: TypeAlias = Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_ENTRIES)]
Seconds: TypeAlias = float


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A tag and its fields, as a msgpack array."""


# --- channel control: never reaches a session -------------------------------------------------------------------------


class Close(Message, frozen=True, tag=1):
    """Either end: I send nothing after this. An empty reason: all is well."""

    reason: Text = ""


class ProbeMemory(Message, frozen=True, tag=2):
    """C to R: can you open file ``fd`` of process ``pid``, and is ``nonce`` at its start?"""

    pid: Count
    fd: Count
    nonce: bytes


class ProbeResult(Message, frozen=True, tag=3):
    """R to C: yes or no. Without a yes, bytes go through the connection."""

    ok: bool


class MapBuffer(Message, frozen=True, tag=4):
    """C to R: shared buffer ``number`` is my file ``fd``, ``size`` bytes long; size 0: forget it."""

    number: Count
    fd: Count
    size: Count
    inode: Count = 0
    """Of that file: a descriptor that was closed may by now be another file."""


class SharedBuffers(Message, frozen=True, tag=5):
    """C to R: the buffers of the next message lie in these shared ones; no bytes follow it."""

    numbers: Numbers


class ReleaseBuffers(Message, frozen=True, tag=6):
    """R to C: the last tensor over each of these shared buffers has died."""

    numbers: Numbers


# --- handshake (:mod:`stream_balancer.transport.handshake`) -----------------------------------------------------------


class Owner(msgspec.Struct, frozen=True):
    """A producer that keeps payloads, and how a rank reaches it."""

    host: str
    port: int
    token: str
    label: str


class PairAddress(Message, frozen=True, tag=9):
    """Either end, once welcome: where my end of the gloo pair listens."""

    address: bytes
    """What gloo calls it."""
    nonce: bytes


class PairReady(Message, frozen=True, tag=8):
    """Either end, whenever it has done its next step of building the pair: connected its half, sent its proof, checked
    the other's. So the other end can wait for that here, where a wait can be ended, and not in gloo."""


class Hello(Message, frozen=True, tag=10):
    """The joiner's first message; nothing else is read before the proof."""

    protocol: int
    nonce: bytes


class Challenge(Message, frozen=True, tag=11):
    """The acceptor's proof that it knows the token."""

    nonce: bytes
    proof: bytes


class JoinRank(Message, frozen=True, tag=12):
    """R to C: a rank asks for its batches."""

    rank: int
    dp_size: int
    incarnation: int
    depth: int
    """Batches it has room for: its credits."""
    max_batch_bytes: int
    proof: bytes = b""
    feed_id: bytes = b""
    """Random, and the same whenever this feed joins: it may take the place of its own connection, which the controller
    may not know to be lost yet."""
    role: Text = ""
    """Which columns it computes for the trainer; empty: it is the trainer's."""


class JoinProducer(Message, frozen=True, tag=13):
    """P to C: a producer asks to put rollouts."""

    label: Text
    owner: Owner | None = None
    """Where ranks fetch what it keeps; None: everything travels to the controller."""
    proof: bytes = b""
    producer_id: bytes = b""
    """Random, and the same whenever this producer joins: it may take the place of its own connection, which the
    controller may not know to be lost yet."""


class WelcomeRank(Message, frozen=True, tag=14):
    """C to R: its credits are ``depth`` from now on."""


class WelcomeProducer(Message, frozen=True, tag=15):
    """C to P: what may be on its way without a reply. O to a fetching rank: zeros."""

    staged_bytes: Count
    max_put_bytes: Count


class Refused(Message, frozen=True, tag=16):
    """Either end, instead of a welcome or at any time later: no, and why; the connection ends."""

    reason: RefusalReason
    text: Text


class JoinFetcher(Message, frozen=True, tag=17):
    """R to O: a rank asks to fetch payloads."""

    proof: bytes = b""


class JoinPeer(Message, frozen=True, tag=18):
    """One of two processes of a DP rank, which look for each other under one key."""

    key: Text
    side: Literal[0, 1]
    proof: bytes = b""


class WelcomePeer(Message, frozen=True, tag=19):
    """To each of the two: the other one is here."""


# --- controller and rank ----------------------------------------------------------------------------------------------


class Batch(Message, frozen=True, tag=20):
    """C to R: a rank batch. One buffer: its description and its columns. Uses a credit."""

    step: Count
    rank: Count
    dp_size: Count
    meta_bytes: Count
    """Bytes of msgpack at the start of the buffer."""
    meta_crc: Count
    wire_bytes: Count
    """Bytes that are sent."""
    total_bytes: Count
    """Bytes the receiver allocates: the buffer, and room for columns that travel narrowed."""
    wire_crc: Count = 0
    """Of all bytes sent, where a rank passes its batch on to its model-parallel peers; 0: not computed."""


class PartialBatch(Message, frozen=True, tag=21):
    """C to R: a rank batch some of whose payloads lie elsewhere. One buffer: the description, where each payload lies,
    and the payloads that came along. Uses a credit."""

    step: Count
    rank: Count
    dp_size: Count
    meta_bytes: Count
    meta_crc: Count
    wire_bytes: Count
    num_elsewhere: Count
    """Rollouts whose payload the rank fetches."""


class ReassignedPart(Batch, frozen=True, tag=30):
    """C to R: of a step that the rank has, a part that a lost rank owed. Uses no credit."""


class PartsDone(Message, frozen=True, tag=31):
    """R to C: the trainer has worked on all it was given of a step, and asks what it takes over of lost ranks before
    the ranks meet. The reply is a :class:`ReassignedPart` or :class:`StepComplete`."""

    step: Count
    parts: Count
    """Reassigned ones, so far."""


class StepComplete(Message, frozen=True, tag=32):
    """C to R: every rank that is left has worked on all it was given of the step."""

    step: Count
    ranks: Numbers
    """Those that are left."""


class Release(Message, frozen=True, tag=34):
    """C to R: so many ranks have nothing left to do in the step. Which of its micro-batches can this one spare?"""

    step: Count
    idle: Count


class Released(Message, frozen=True, tag=35):
    """R to C: its trainer will not begin the last ``moved`` of the micro-batches that are its own. The reply to
    :class:`Release`, and once more with the first micro-batch that it begins later than that."""

    step: Count
    moved: Count


class Taken(Message, frozen=True, tag=22):
    """R to C: ``total`` batches left the queue since the join; the credits are ``depth - (sent - total)``. Absolute, so
    the latest one says everything."""

    total: Count


class _StepTimes(Message, frozen=True):
    """What a rank says of a step that its trainer has worked through."""

    step: Count
    seconds: Seconds
    """From the trainer taking the batch to its asking for the next one."""
    compute_s: Seconds | None = None
    """Of these, what the trainer computed by itself, if it timed that."""
    waited_s: Seconds = 0.0
    """From the trainer asking for the batch to its taking it."""


class StepReport(_StepTimes, frozen=True, tag=23):
    """R to C: the step is done. Acknowledgement and timing."""


class LateColumn(msgspec.Struct, frozen=True, array_like=True):
    """A column that a role's rank has computed: a number for each token of its rank batch."""

    name: Text
    dtype: Count
    """Index into SUPPORTED_DTYPES."""


class StepColumns(_StepTimes, frozen=True, tag=33):
    """R to C, in place of :class:`StepReport` where the rank has a role: the step is done, and here are its columns.
    One buffer each, the micro-batches one after the other."""

    columns: Annotated[tuple[LateColumn, ...], msgspec.Meta(min_length=1, max_length=MAX_LATE_COLUMNS)] = ()


class StepHeld(_StepTimes, frozen=True, tag=29):
    """R to C: the trainer is through with the step and asks for more, but acknowledges it later
    (``auto_ack=False``)."""


class MissingRollout(msgspec.Struct, frozen=True, array_like=True):
    """A rollout whose payload is gone with its owner."""

    index: Count
    """Its place in the rank batch."""
    rollout_id: Text
    owner: Text
    cause: Text


class PayloadsFetched(Message, frozen=True, tag=24):
    """R to C: a :class:`PartialBatch` is complete but for these, which are padding copies of weight 0 now."""

    step: Count
    missing: Annotated[tuple[MissingRollout, ...], msgspec.Meta(max_length=MAX_ENTRIES)] = ()


class ResizedExecution(msgspec.Struct, frozen=True, array_like=True):
    """How much is left of an execution."""

    group_id: Text | None
    execution_id: Text
    samples: Count
    loss_tokens: Count


class MiniBatchDenominators(msgspec.Struct, frozen=True, array_like=True):
    """What every rank divides by in one mini-batch."""

    rollouts: Count
    tokens: Count
    loss_tokens: Count
    executions: Count


class Denominators(Message, frozen=True, tag=25):
    """C to R: what every rank divides by in this step. Final, and the same on all ranks."""

    step: Count
    rollouts: Count
    tokens: Count
    loss_tokens: Count
    executions: Count
    resized: Annotated[tuple[ResizedExecution, ...], msgspec.Meta(max_length=MAX_ENTRIES)] = ()
    """Executions of which some rollouts are gone, and some are not."""
    mini_batches: Annotated[tuple[MiniBatchDenominators, ...], msgspec.Meta(max_length=MAX_ENTRIES)] = ()
    """The same of each mini-batch; empty where the step is in one piece."""
    gone: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_ENTRIES)] = ()
    """Ids of shared rollouts that some rank has no part of: no other rank is to train on its part."""


class End(Message, frozen=True, tag=27):
    """C to R: no more batches. C to P: no more puts are taken."""


class EndBalancer(Message, frozen=True, tag=28):
    """R to C: no more rollouts are wanted: drain what waits, then end."""


# --- controller, and ranks as well as producers -----------------------------------------------------------------------


class PolicyVersion(Message, frozen=True, tag=26):
    """C to P, C to R: the policy version in force. R to C: the policy moved on to it."""

    version: int


class StatisticsRequest(Message, frozen=True, tag=51):
    """P to C, numbered like a put; R to C, numbered by itself: what does the balancer report of itself?"""

    number: Count


class StatisticsReply(Message, frozen=True, tag=53):
    """C to P, C to R: the answer, as :mod:`stream_balancer.wire.statistics` writes it."""

    number: Count
    values: Annotated[bytes, msgspec.Meta(max_length=MAX_STATISTICS_BYTES)]
    problem: Text = ""
    """Why there are no values."""


# --- controller and producer ------------------------------------------------------------------------------------------


class RolloutHeader(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is in a rollout's buffer."""

    meta_bytes: Count
    meta_crc: Count
    wire_bytes: Count
    """Bytes of the buffer behind the message."""
    total_bytes: Count
    """Bytes of the rollout, wherever its payload lies."""
    payload: Count | None = None
    """The producer keeps the payload under this number, and the buffer holds the description only. None: all is in
    the buffer."""


class Put(Message, frozen=True, tag=40):
    """P to C: one rollout. All that a producer asks for is numbered from 0, without gaps."""

    number: Count
    rollout: RolloutHeader
    wait: bool = True
    """False: ``put_nowait``, refused if there is no room."""
    slot: Count | None = None
    """Number of the :class:`Reserve` in whose place it is put."""


class PutGroup(Message, frozen=True, tag=41):
    """P to C: several rollouts, all or none. One buffer for each."""

    number: Count
    rollouts: Annotated[tuple[RolloutHeader, ...], msgspec.Meta(min_length=1, max_length=MAX_ENTRIES)]
    complete: bool = False
    """No more of their group will come."""
    slot: Count | None = None
    """As in :class:`Put`."""


class DeclareGroup(Message, frozen=True, tag=42):
    """P to C: what is known of a group of rollouts. Numbered like a put, and answered like one."""

    number: Count
    group_id: Text
    fate: Literal["expected", "closed", "abandoned"]
    """It has ``size`` rollouts; what has come is all; nothing of it is wanted any more."""
    size: Count = 0
    """Of an expected one."""


class BundledPut(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One of the puts in a :class:`PutBundle`, in the order of their rollouts."""

    number: Count
    count: Count
    """Its rollouts."""
    group: bool
    wait: bool
    """As in :class:`Put`."""
    complete: bool = False
    """As in :class:`PutGroup`."""
    slot: Count | None = None
    """As in :class:`Put`."""


class PutBundle(Message, frozen=True, tag=52):
    """P to C, over Ray: puts that wait at the same time, as one buffer. Their numbers go up; one that is left out was
    cancelled before it was sent. Where the payload stays, the buffer is the description, and a reference to the object
    comes with it."""

    puts: Annotated[tuple[BundledPut, ...], msgspec.Meta(min_length=1, max_length=MAX_ENTRIES)]
    rollouts: RolloutHeader


class Cancel(Message, frozen=True, tag=43):
    """P to C: the put is not wanted any more. Its reply comes all the same."""

    number: Count


class Accepted(Message, frozen=True, tag=44):
    """C to P: the balancer holds these puts."""

    numbers: Numbers


class PutRefused(Message, frozen=True, tag=45):
    """C to P: the put was not accepted."""

    number: Count
    reason: Literal[
        "cancelled", "rollout", "duplicate", "ended", "full", "type", "value", "knobs", "journal", "lost", "other"
    ]
    text: Text


class Reserve(Message, frozen=True, tag=46):
    """P to C: may so many rollouts be begun? Numbered like a put; answered by Admitted or PutRefused, once they may."""

    number: Count
    count: Count
    version: int | None = None
    """They were begun at this version, under a slot of a connection that was lost: answered at once."""


class Admitted(Message, frozen=True, tag=47):
    """C to P: they may. The slot has the number of its :class:`Reserve`."""

    number: Count
    version: int
    """Policy version at which they begin."""


class ReleaseSlot(Message, frozen=True, tag=49):
    """P to C: what was not put in this slot will not be. One that is not known needs no release."""

    slot: Count


class EndInput(Message, frozen=True, tag=50):
    """P to C: this producer will put no more. Numbered like a put; accepted once the puts before it have their
    reply."""

    number: Count


class DropPayloads(Message, frozen=True, tag=48):
    """C to P: nobody needs these payloads any more."""

    keys: Numbers


# --- rank and owner of payloads ---------------------------------------------------------------------------------------


class WantPayloads(Message, frozen=True, tag=60):
    """R to O: send these payloads."""

    number: Count
    keys: Numbers
    parts: Annotated[tuple[tuple[Count, Count], ...], msgspec.Meta(max_length=MAX_ENTRIES)] = ()
    """Of each, by how many ranks it is shared and the place of this one among them; 1 and 0: all of it is wanted. Empty
    where that is so for all."""


class Payloads(Message, frozen=True, tag=61):
    """O to R: those of :class:`WantPayloads`, but for the missing ones. One buffer a payload, in the order asked."""

    number: Count
    missing: Numbers = ()


Join: TypeAlias = JoinRank | JoinProducer | JoinFetcher | JoinPeer
Welcome: TypeAlias = WelcomeRank | WelcomeProducer | WelcomePeer
Control: TypeAlias = Close | Refused | ProbeMemory | ProbeResult | MapBuffer | SharedBuffers | ReleaseBuffers
Conversation: TypeAlias = (
    Batch
    | PartialBatch
    | ReassignedPart
    | PartsDone
    | StepComplete
    | Release
    | Released
    | Taken
    | StepReport
    | StepColumns
    | StepHeld
    | PayloadsFetched
    | Denominators
    | End
    | EndBalancer
    | PolicyVersion
    | StatisticsRequest
    | StatisticsReply
    | Put
    | PutGroup
    | DeclareGroup
    | PutBundle
    | Cancel
    | Accepted
    | PutRefused
    | Reserve
    | Admitted
    | ReleaseSlot
    | EndInput
    | DropPayloads
    | WantPayloads
    | Payloads
)

_decoder: msgspec.msgpack.Decoder[tuple[tuple[int, ...], Any]] = msgspec.msgpack.Decoder(
    tuple[Numbers, Control | Conversation]
)
_encoder = msgspec.msgpack.Encoder()


def encode_message(message: Message, sizes: tuple[int, ...] = ()) -> bytes:
    """The message and the sizes in bytes of the buffers behind it, as msgpack.

    Examples:
        >>> decode_message(encode_message(Taken(7)))
        ((), Taken(total=7))
    """
    return _encoder.encode((sizes, message))


def decode_message(raw: bytes | memoryview) -> tuple[tuple[int, ...], Message]:
    """What :func:`encode_message` made. Raises WireError for anything else; RefusedError if the peer has refused what
    it was sent."""
    try:
        sizes, message = _decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise WireError(f"a message that cannot be read: {error}. Install one stream_balancer everywhere") from None
    if isinstance(message, Refused):
        raise refused_error(message.reason, message.text)
    return sizes, message
