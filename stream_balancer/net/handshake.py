"""How two ends of a connection prove themselves. Pure: told a message, it says what to answer.

::

    joiner    Hello(protocol, nonce)               --->
              <---  Challenge(nonce, proof)             acceptor    HMAC-SHA256 over "acceptor" and both nonces
    joiner    Join(proof, kind, name, session)     --->             HMAC-SHA256 over "joiner", both nonces and who it is
              <---  Welcome(limits, movers)             acceptor    or Refused(reason, text)
"""

from __future__ import annotations

import hmac
import secrets

import msgspec

from stream_balancer.errors import WireError, refused_error
from stream_balancer.net.messages import PROTOCOL, Challenge, Hello, Join, Message

_NONCE_BYTES = 16


class Handshake:
    """An end of the handshake, up to both proofs. Welcome is the connection's."""

    def __init__(self, token: bytes, join: Join | None = None) -> None:
        """``join``: who joins, at that end."""
        self.token, self.join, self.joins = token, join, join is not None
        self.proven = False
        """The other end knows the token."""
        # fresh for each connection: a proof that somebody recorded is of no use on another
        self._mine = secrets.token_bytes(_NONCE_BYTES)
        self._theirs = b""

    def hello(self) -> Hello:
        """The joiner's first message."""
        return Hello(PROTOCOL, self._mine)

    def hear(self, message: Message) -> Message | None:
        """The answer, if it needs one. Raises WireError, or RefusedError for who may not come in."""
        match message:
            # once: a second Hello would let a stranger choose the nonce anew
            case Hello() if not self.joins and not self._theirs:
                return self._challenge(message)
            case Challenge() if self.join is not None and not self._theirs:
                self._take_nonce(message.nonce)
                # the acceptor proves itself first: a joiner tells a stranger nothing of itself
                if not hmac.compare_digest(message.proof, self._proof(b"acceptor")):
                    raise refused_error("authentication", "the other end has another token. Give both the same one")
                self.proven = True
                self.join = msgspec.structs.replace(self.join, proof=self._proof(b"joiner", _who(self.join)))
                return self.join
            case Join() if self._theirs and self.join is None:
                # compare_digest takes as long wherever the first wrong byte is
                if not hmac.compare_digest(message.proof, self._proof(b"joiner", _who(message))):
                    raise refused_error("authentication", "this end has another token. Give both the same one")
                self.join, self.proven = message, True
                return None
        raise WireError(f"a {type(message).__name__} message in the handshake")

    def _challenge(self, hello: Hello) -> Challenge:
        # before any proof: another version may compute it in another way
        if hello.protocol != PROTOCOL:
            raise refused_error(
                "protocol",
                f"this end speaks version {PROTOCOL} of the protocol, the other one version {hello.protocol}. Install "
                "the same version of stream_balancer everywhere",
            )
        self._take_nonce(hello.nonce)
        return Challenge(self._mine, self._proof(b"acceptor"))

    def _take_nonce(self, nonce: bytes) -> None:
        if len(nonce) != _NONCE_BYTES:
            raise WireError(f"a nonce of {len(nonce)} bytes; {_NONCE_BYTES} are asked for")
        self._theirs = nonce

    def _proof(self, side: bytes, about: bytes = b"") -> bytes:
        # the same order at both ends
        nonces = (self._mine, self._theirs) if self.joins else (self._theirs, self._mine)
        # the side is part of it, or an acceptor's proof could be sent back as a joiner's
        text = b"|".join((b"stream_balancer", side, bytes([PROTOCOL]), *nonces, about))
        return hmac.digest(self.token, text, "sha256")


def _who(join: Join) -> bytes:
    # all that it says of itself is proven, so nobody in between can change it
    return msgspec.msgpack.encode(msgspec.structs.replace(join, proof=b""))
