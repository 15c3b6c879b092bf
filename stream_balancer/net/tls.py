"""A socket with TLS that has the calls of a connection's."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence

from stream_balancer.errors import WireError

_WAITS = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


def check_tls(tls: object) -> None:
    """Raise TypeError for what is neither a context nor None: at once, not at each connection."""
    if not isinstance(tls, ssl.SSLContext | None):
        raise TypeError(f"tls must be an ssl.SSLContext, with certificates, or None, not {tls!r}. See docs/security.md")


class TlsSocket:
    """The first call runs the handshake. Raises BlockingIOError where a socket would."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, host: str | None) -> None:
        """``host``: of the acceptor, at the joining end; its certificate must be of that name."""
        # the handshake runs with the first bytes: here it would block the I/O thread
        self._sock = context.wrap_socket(
            sock, server_side=host is None, server_hostname=host, do_handshake_on_connect=False
        )
        self.shaken = False
        """Nothing can be sent before."""

    def _shake(self) -> None:
        if self.shaken:
            return
        try:
            self._sock.do_handshake()
        except (*_WAITS, ssl.SSLEOFError):
            raise
        except ssl.SSLError as error:
            raise WireError(
                f"no TLS with the other end: {error}. Give both ends an ssl.SSLContext, or neither"
            ) from None
        self.shaken = True

    def sendmsg(self, views: Sequence[memoryview]) -> int:
        """Bytes that were taken."""
        done = 0
        try:
            self._shake()
            for view in views:
                at = 0
                # a record at a time
                while at < len(view):
                    # an SSL socket has no sendmsg; a record takes 16 KiB at most
                    count = self._sock.send(view[at:])
                    at, done = at + count, done + count
        except _WAITS:
            # what was taken before is sent, and counts
            if not done:
                raise BlockingIOError from None
        return done

    def recvmsg_into(self, views: Sequence[memoryview]) -> tuple[int]:
        """Into the first of them."""
        try:
            self._shake()
            # not into the second: a record that is cut in two is kept by TLS until it is asked for
            return (self._sock.recv_into(views[0]),)
        except _WAITS:
            raise BlockingIOError from None
        # a peer that is killed says no goodbye, and is over all the same
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return (0,)

    def shutdown(self, how: int) -> None:
        """Does nothing: the peer need not answer."""

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()
