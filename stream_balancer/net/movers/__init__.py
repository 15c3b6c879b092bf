"""Ways for bulk bytes beside the socket, all optional.

A joiner names those it has, the acceptor answers with those that both have, and each is set up while messages flow
already. Until it is ready, or if it never is, bytes go by the socket.

A mover belongs to one connection and brings bytes both ways. In the I/O thread:

* ``send(payload, sent, go)``: calls ``go(where)`` when the message may leave, and ``sent`` when nobody needs the pieces
  any more. Messages behind it wait for ``go``, so the order of messages does not depend on movers. False: not now, use
  the socket.
* ``receive(envelope, ready)``: calls ``ready(memory)`` once all its runs are there. Messages behind it wait for that.
* ``note(body)``: the other end's mover says something. ``close()``: the connection is over.

A mover that breaks ends its connection; on the next one both ends may do without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stream_balancer.net.movers import shared_memory, torch_dist
from stream_balancer.net.movers.common import NUMBERS

if TYPE_CHECKING:
    from stream_balancer.net.connection import Connection
    from stream_balancer.net.handler import Mover

__all__ = ["attach", "available"]


def available(wanted: Sequence[str], *, again: bool = False) -> tuple[str, ...]:
    """Movers of ``wanted`` that this system has. Raises ValueError for one that there is not. ``again``: a rank that
    was there before goes by the socket, because torch's pairs are built once and may have broken."""
    # a misspelt one would go by the socket for ever, and nobody would notice
    unknown = [name for name in wanted if name not in NUMBERS]
    if unknown:
        raise ValueError(f"no mover is called {unknown[0]!r}; there are {', '.join(NUMBERS)}")
    return tuple(name for name in wanted if _has(name) and not (again and name == "torch_dist"))


def attach(connection: Connection, names: Sequence[str]) -> None:
    """Set up what both ends have agreed on. In the I/O thread, when the handshake is over, at both ends."""
    # in the acceptor's order of preference, the same at both ends
    connection.movers = {NUMBERS[name]: _make(name, connection) for name in names}
    for mover in connection.movers.values():
        mover.begin()


def _has(name: str) -> bool:
    return shared_memory.available() if name == "shared_memory" else torch_dist.available()


def _make(name: str, connection: Connection) -> Mover:
    if name == "shared_memory":
        return shared_memory.SharedMemory(connection)
    return torch_dist.TorchDist(connection)
