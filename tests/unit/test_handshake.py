"""Nothing that a stranger says, in whatever order, makes either end take it for somebody who knows the token."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_balancer.errors import AlreadyInUseError, ClosedResourceError, WireError
from stream_balancer.transport.handshake import (
    MAX_BYTES,
    Accepting,
    Incoming,
    Joining,
    Message,
    pack,
    proof_of,
    token_bytes,
)
from stream_balancer.wire.messages import (
    PROTOCOL,
    Challenge,
    Hello,
    Join,
    JoinFetcher,
    JoinPeer,
    JoinProducer,
    JoinRank,
    Owner,
    PairAddress,
    PairReady,
    Refused,
    WelcomePeer,
    WelcomeProducer,
    WelcomeRank,
)

TOKEN = b"a token of sixteen or more"
RANK = JoinRank(0, 1, 10**9, 2, 2**30)
ALL_JOINS: tuple[type[Join], ...] = (JoinRank, JoinProducer, JoinFetcher, JoinPeer)
MESSAGES: list[Message] = [
    PairAddress(b"address", b"nonce"),
    PairReady(),
    Hello(PROTOCOL, bytes(16)),
    Challenge(bytes(16), bytes(32)),
    RANK,
    JoinProducer("label", Owner("host", 1, "secret", "label"), b"proof"),
    JoinProducer("label"),
    JoinFetcher(b"proof"),
    JoinPeer("0/0/1", 1, b"proof"),
    WelcomeRank(),
    WelcomeProducer(1, 2),
    WelcomePeer(),
    Refused("busy", "text"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
@pytest.mark.parametrize("piece", [1, 5, MAX_BYTES])
def test_messages_arrive_whole_and_nothing_beyond_is_read(message: Message, piece: int) -> None:
    stream = pack(message) + pack(Refused("closed", "the next")) + b"and what comes behind"
    incoming, got = Incoming(), []
    while len(got) < 2:
        size = min(incoming.wanted, piece)
        part, stream = stream[:size], stream[size:]
        if (received := incoming.feed(part)) is not None:
            got.append(received)
    assert got == [message, Refused("closed", "the next")]
    assert stream == b"and what comes behind"


def handshake(mine: bytes, theirs: bytes, request: Join, joins: tuple[type[Join], ...] = ALL_JOINS) -> tuple[Any, Any]:
    """What the acceptor and the joiner end with."""
    accepting, joining = Accepting(mine, joins), Joining(theirs, request)
    challenge = accepting.receive(joining.hello)
    assert isinstance(challenge, Challenge)
    join = joining.receive(challenge)
    if isinstance(join, Refused):
        with pytest.raises(WireError, match="it refuses us"):
            accepting.receive(join)
        return None, join
    assert not isinstance(join, (WelcomeRank, WelcomeProducer, WelcomePeer))
    return accepting.receive(join), joining.receive(WelcomeRank())


@pytest.mark.parametrize("token", [TOKEN, b""])
@pytest.mark.parametrize("request_", [RANK, JoinProducer("p"), JoinFetcher(), JoinPeer("key", 0)])
def test_who_knows_the_token_comes_in(token: bytes, request_: Join) -> None:
    admitted, welcome = handshake(token, token, request_)
    assert msgspec.structs.replace(admitted, proof=b"") == request_
    assert welcome == WelcomeRank()


@pytest.mark.parametrize(("mine", "theirs"), [(TOKEN, b""), (b"", TOKEN), (TOKEN, TOKEN + b"!")])
def test_with_another_token_neither_trusts_the_other(mine: bytes, theirs: bytes) -> None:
    admitted, refused = handshake(mine, theirs, RANK)
    assert admitted is None
    assert "same token" in refused.text
    accepting, joining = Accepting(mine, ALL_JOINS), Joining(theirs, RANK)  # who does not look at the challenge
    challenge = accepting.receive(joining.hello)
    assert isinstance(challenge, Challenge)
    forged = msgspec.structs.replace(RANK, proof=proof_of(theirs, b"peer", challenge.nonce, joining.hello.nonce))
    answer = accepting.receive(forged)
    assert isinstance(answer, Refused)
    assert answer.reason == "authentication"


def test_a_recorded_handshake_is_worth_nothing() -> None:
    accepting, joining = Accepting(TOKEN, ALL_JOINS), Joining(TOKEN, RANK)
    hello = joining.hello
    challenge = accepting.receive(hello)
    assert isinstance(challenge, Challenge)
    join = joining.receive(challenge)
    assert isinstance(accepting.receive(join), JoinRank)  # type: ignore[arg-type]
    again = Accepting(TOKEN, ALL_JOINS)  # played back to the acceptor
    again.receive(hello)
    assert isinstance(again.receive(join), Refused)  # type: ignore[arg-type]
    assert isinstance(Joining(TOKEN, RANK).receive(challenge), Refused)  # and to a joiner


def test_a_proof_sent_back_proves_nothing() -> None:
    """A stranger in the acceptor's place uses the acceptor itself to answer, and the other way round."""
    joining, accepting = Joining(TOKEN, RANK), Accepting(TOKEN, ALL_JOINS)
    challenge = accepting.receive(Hello(PROTOCOL, joining.hello.nonce))
    assert isinstance(challenge, Challenge)
    assert isinstance(accepting.receive(msgspec.structs.replace(RANK, proof=challenge.proof)), Refused)
    join = joining.receive(challenge)
    assert isinstance(join, JoinRank)
    fresh = Joining(TOKEN, RANK)
    assert isinstance(fresh.receive(Challenge(joining.hello.nonce, join.proof)), Refused)


def test_what_must_not_come_now_is_refused() -> None:
    for message in MESSAGES:
        if not isinstance(message, Hello):
            with pytest.raises(WireError):
                Accepting(TOKEN, ALL_JOINS).receive(message)
        if not isinstance(message, (Challenge, Refused)):
            with pytest.raises(WireError):
                Joining(TOKEN, RANK).receive(message)
    twice = Accepting(TOKEN, ALL_JOINS)
    twice.receive(Hello(PROTOCOL, bytes(16)))
    with pytest.raises(WireError, match="Hello message may not come now"):
        twice.receive(Hello(PROTOCOL, bytes(16)))
    for nonce in (b"", bytes(15), bytes(17)):  # bytes must not move from one nonce to the other
        with pytest.raises(WireError, match="nonce"):
            Accepting(TOKEN, ALL_JOINS).receive(Hello(PROTOCOL, nonce))
        with pytest.raises(WireError, match="nonce"):
            Joining(TOKEN, RANK).receive(Challenge(nonce, bytes(32)))
    payloads = Accepting(TOKEN, (JoinFetcher,))  # only what this listener is for
    challenge = payloads.receive(Hello(PROTOCOL, bytes(16)))
    assert isinstance(challenge, Challenge)
    with pytest.raises(WireError):
        payloads.receive(msgspec.structs.replace(RANK, proof=proof_of(TOKEN, b"peer", challenge.nonce, bytes(16))))


def test_refusals_say_what_they_are() -> None:
    other = Accepting(TOKEN, ALL_JOINS).receive(Hello(PROTOCOL + 1, bytes(16)))
    assert isinstance(other, Refused)
    with pytest.raises(ValueError, match=rf"speaks protocol {PROTOCOL + 1}, but the controller speaks {PROTOCOL}"):
        Joining(TOKEN, RANK).receive(other)
    with pytest.raises(AlreadyInUseError, match="taken"):
        Joining(TOKEN, RANK).receive(Refused("busy", "taken"))


@given(st.lists(st.one_of(st.binary(max_size=64), st.sampled_from(MESSAGES).map(pack)), max_size=8), st.data())
def test_no_bytes_without_the_token_open_the_door(parts: list[bytes], data: st.DataObject) -> None:
    stream = bytearray(b"".join(parts))
    if stream and data.draw(st.booleans()):
        stream[data.draw(st.integers(0, len(stream) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    for side in (Accepting(TOKEN, ALL_JOINS), Joining(TOKEN, RANK)):
        incoming, rest = Incoming(), bytes(stream)
        try:
            while rest:
                size = incoming.wanted
                assert 0 < size <= MAX_BYTES + 12  # what is kept of a stranger's bytes
                message = incoming.feed(rest[:size])
                rest = rest[size:]
                if message is not None:
                    answer = side.receive(message)
                    assert isinstance(answer, (Challenge, Refused))
                    if isinstance(answer, Refused):
                        break
        except (WireError, ValueError, AlreadyInUseError, ClosedResourceError):  # among them what a refusal says
            pass


@given(st.binary(min_size=1, max_size=200))
def test_something_else_is_recognised_by_its_first_bytes(data: bytes) -> None:
    incoming = Incoming()
    if not pack(WelcomeRank()).startswith(data[:8]):
        with pytest.raises(WireError, match="no stream_balancer message, it begins with"):
            incoming.feed(data[: incoming.wanted])


def test_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STREAM_BALANCER_TOKEN", raising=False)
    assert token_bytes(None) == b""
    monkeypatch.setenv("STREAM_BALANCER_TOKEN", "from the environment")
    assert token_bytes(None) == b"from the environment"
    assert token_bytes("given, and long enough") == b"given, and long enough"
    assert token_bytes("") == b""
    with pytest.raises(ValueError, match="at least 16 characters, not 5"):
        token_bytes("short")
