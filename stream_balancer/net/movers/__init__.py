"""Ways for bulk bytes beside the socket. All optional: an end names those it has in Join, the other answers with those
that both have, each is set up while messages flow already, and until it is ready (or if it never is) bytes go by the
socket.

A mover belongs to one connection and brings bytes both ways. In the I/O thread:

* ``send(payload, sent, go)``: calls ``go(where)`` when the message may leave, and ``sent`` when nobody needs the pieces
  any more. Messages behind it wait for ``go``, so the order of messages does not depend on movers.
* ``receive(envelope, ready)``: calls ``ready(memory)`` once all its runs are there. Messages behind it wait for that.
* ``note(body)``: the other end's mover says something. ``close()``: the connection is over.

A mover that breaks ends its connection; on the next one both ends may do without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stream_balancer.net.messages import MoverNote

if TYPE_CHECKING:
    from stream_balancer.net.connection import Base, Connection

__all__ = ["NUMBERS", "attach", "available", "note"]

NUMBERS = {"shared_memory": 1, "torch_dist": 2}
"""``via`` of each."""


def available(wanted: Sequence[str] = ("shared_memory", "torch_dist")) -> tuple[str, ...]:
    """Those of ``wanted`` that this system has."""
    from stream_balancer.net.movers import torch_dist, shared_memory

    has = {"shared_memory": shared_memory.available(), "torch_dist": torch_dist.available()}
    return tuple(name for name in wanted if has.get(name))


def attach(connection: Connection, names: Sequence[str]) -> None:
    """Set up what both ends have agreed on. In the I/O thread, when the handshake is over, at both ends."""
    from stream_balancer.net.movers import torch_dist, shared_memory

    makers = {"shared_memory": shared_memory.SharedMemory, "torch_dist": torch_dist.TorchDist}
    for name in names:
        mover = connection.movers[NUMBERS[name]] = makers[name](connection)
        mover.begin()
    connection.bulk = NUMBERS[names[0]] if names else 0


def note(connection: Base, name: str, body: bytes) -> None:
    """Tell the other end."""
    connection.send(MoverNote(NUMBERS[name], body))
