"""Who may join: both ends prove that they know one token, before anything else is read. Pure: bytes in, bytes out.

::

    joiner     Hello(protocol, nonce)           --->
               <---  Challenge(nonce, proof)         acceptor   proof over "acceptor" and both nonces
    joiner     JoinRank(rank, ..., proof)       --->            proof over "peer" and both nonces
               <---  WelcomeRank()                   acceptor   or Refused(reason, text)

A proof is HMAC-SHA256 of the token. The nonces are fresh, so a recorded proof is worth nothing later; the two ends
prove different texts, so a proof sent back proves nothing. Without a token the same messages run with an empty one.
A message is 12 bytes of header and at most ``MAX_BYTES`` of msgpack, checked before anything is allocated.
"""

from __future__ import annotations

import hmac
import os
import secrets
import struct
from typing import Literal, TypeAlias

import msgspec

from stream_balancer.errors import WireError, refused_error
from stream_balancer.wire.messages import (
    PROTOCOL,
    Challenge,
    Hello,
    Join,
    PairAddress,
    PairReady,
    Refused,
    Welcome,
)

__all__ = [
    "MAX_BYTES",
    "Accepting",
    "Incoming",
    "Joining",
    "Message",
    "pack",
    "proof_of",
    "token_bytes",
]

MAX_BYTES = 4096
"""Bytes of one message."""
TOKEN_VARIABLE = "STREAM_BALANCER_TOKEN"
_MAGIC = b"strmbal\x02"
_HEADER = struct.Struct("<8sI")
_NONCE_BYTES = 16  # 128 bits: no two handshakes have the same
_LEAST_TOKEN_BYTES = 16  # what is shorter can be guessed


Message: TypeAlias = Hello | Challenge | Join | Welcome | Refused | PairAddress | PairReady

_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> bytes:
    """Header and body."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_BYTES:
        raise ValueError(f"a {type(message).__name__} message of {len(body)} bytes is too long: give shorter names")
    return _HEADER.pack(_MAGIC, len(body)) + body


class Incoming:
    """One message after the other out of a stream, and never a byte beyond."""

    def __init__(self) -> None:
        self._bytes = b""
        self._size = _HEADER.size

    @property
    def wanted(self) -> int:
        """Bytes that may be given now."""
        return self._size - len(self._bytes)

    def feed(self, data: bytes) -> Message | None:
        """Up to ``wanted`` more bytes -> the message they complete. Raises WireError if it is none of ours."""
        self._bytes += data
        start = self._bytes[: len(_MAGIC)]
        if not _MAGIC.startswith(start):
            raise WireError(f"no stream_balancer message, it begins with {self._bytes[:12]!r}")
        if self.wanted:
            return None
        if self._size == _HEADER.size:
            size = _HEADER.unpack(self._bytes)[1]
            if not 0 < size <= MAX_BYTES:
                raise WireError(f"a message of {size} bytes, where at most {MAX_BYTES} may come")
            self._size += size
            return None
        body, self._bytes, self._size = self._bytes[_HEADER.size :], b"", _HEADER.size
        try:
            return _decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise WireError(f"a message that cannot be read: {error}") from None


def proof_of(token: bytes, who: Literal[b"acceptor", b"peer", b"pair"], *nonces: bytes) -> bytes:
    """A proof that only a peer with the token can make."""
    return hmac.digest(token, who + b"".join(nonces), "sha256")


class Accepting:
    """The acceptor's side of one handshake."""

    def __init__(self, token: bytes, joins: tuple[type[Join], ...]) -> None:
        """``joins``: what may be asked for here."""
        self._token, self._joins = token, joins
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._theirs: bytes | None = None

    def receive(self, message: Message) -> Challenge | Refused | Join:
        """What to answer; or, once it has proven itself, what the joiner asks for. Raises WireError if ``message`` may
        not come now."""
        if isinstance(message, Hello) and self._theirs is None:
            if message.protocol != PROTOCOL:
                return Refused(
                    "protocol",
                    f"this side speaks protocol {message.protocol}, but the controller speaks {PROTOCOL}. Install one "
                    "version of stream_balancer everywhere",
                )
            self._theirs = _checked(message.nonce)
            return Challenge(self._nonce, proof_of(self._token, b"acceptor", self._theirs, self._nonce))
        if isinstance(message, self._joins) and self._theirs is not None:
            if hmac.compare_digest(message.proof, proof_of(self._token, b"peer", self._nonce, self._theirs)):
                return message
            return Refused("authentication", _OTHER_TOKEN)
        if isinstance(message, Refused):
            raise WireError(f"it refuses us: {message.text[:200]}")
        raise WireError(f"a {type(message).__name__} message may not come now")


class Joining:
    """The joiner's side of one handshake."""

    def __init__(self, token: bytes, request: Join) -> None:
        self._token, self._request = token, request
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self.challenged = False
        """Whether the acceptor has proven itself."""

    @property
    def hello(self) -> Hello:
        """The first message."""
        return Hello(PROTOCOL, self._nonce)

    def receive(self, message: Message) -> Join | Refused | Welcome:
        """What to answer; or, in the end, the welcome. ``Refused`` is for the acceptor, and the end. Raises what a
        refusal says; WireError if ``message`` may not come now."""
        if isinstance(message, Refused):
            raise refused_error(message.reason, message.text)
        if isinstance(message, Challenge) and not self.challenged:
            theirs = _checked(message.nonce)
            if not hmac.compare_digest(message.proof, proof_of(self._token, b"acceptor", self._nonce, theirs)):
                return Refused("authentication", _OTHER_TOKEN)
            self.challenged = True
            return msgspec.structs.replace(self._request, proof=proof_of(self._token, b"peer", theirs, self._nonce))
        if isinstance(message, Welcome) and self.challenged:
            return message
        raise WireError(f"a {type(message).__name__} message may not come now")


_OTHER_TOKEN = (
    f"the two ends do not have the same token. Give both the same token=, or set {TOKEN_VARIABLE} to the same in both; "
    "see docs/security.md"
)


def _checked(nonce: bytes) -> bytes:
    if len(nonce) != _NONCE_BYTES:
        raise WireError(f"a nonce has {_NONCE_BYTES} bytes, not {len(nonce)}")
    return nonce


def token_bytes(token: str | None) -> bytes:
    """``token``, else the environment's, else empty. Raises ValueError for one that can be guessed."""
    given = os.environ.get(TOKEN_VARIABLE, "") if token is None else token
    raw = given.encode()
    if raw and len(raw) < _LEAST_TOKEN_BYTES:
        raise ValueError(
            f"a token has at least {_LEAST_TOKEN_BYTES} characters, not {len(raw)}: who connects may try guesses at "
            "home. Make one with: python -c 'import secrets; print(secrets.token_hex(16))'"
        )
    return raw
