"""Ways for bulk bytes beside the socket, all optional.

A joiner names those it has, the acceptor answers with those that both have, and each is set up while messages flow
already. Until it is ready, or if it never is, bytes go by the socket. A mover belongs to one connection and brings
bytes both ways; the order of messages does not depend on it. One that breaks ends its connection, and on the next one
both ends may do without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stream_balancer.net.movers.shared_memory import SharedMemory
from stream_balancer.net.movers.torch_dist import TorchDist

if TYPE_CHECKING:
    from stream_balancer.net.connection import Connection

_MOVERS: dict[str, type[SharedMemory | TorchDist]] = {one.name: one for one in (SharedMemory, TorchDist)}


def available(wanted: Sequence[str], *, again: bool = False) -> tuple[str, ...]:
    """Movers of ``wanted`` that this system has. Raises ValueError for one that there is not. ``again``: a rank that
    was there before goes by the socket, because torch's pairs are built once and may have broken."""
    # a misspelt one would go by the socket for ever, and nobody would notice
    unknown = [name for name in wanted if name not in _MOVERS]
    if unknown:
        raise ValueError(f"no mover is called {unknown[0]!r}; there are {', '.join(_MOVERS)}")
    return tuple(name for name in wanted if _MOVERS[name].available() and not (again and name == TorchDist.name))


def attach(connection: Connection, names: Sequence[str]) -> None:
    """Set up what both ends have agreed on. In the I/O thread, when the handshake is over, at both ends."""
    # in the acceptor's order of preference, the same at both ends
    connection.movers = {_MOVERS[name].number: _MOVERS[name](connection) for name in names}
    for mover in connection.movers.values():
        mover.begin()
