"""What the movers share."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from stream_balancer.net.messages import MoverNote

if TYPE_CHECKING:
    from stream_balancer.net.connection import Base

__all__ = ["NUMBERS", "note", "warn"]

_log = logging.getLogger(__name__)
NUMBERS = {"shared_memory": 1, "torch_dist": 2}
"""``via`` of each."""
_warned: set[str] = set()


def note(connection: Base, name: str, body: bytes) -> None:
    """Tell the other end."""
    connection.send(MoverNote(NUMBERS[name], body))


def warn(name: str, why: object) -> None:
    """Bytes go by the socket instead. Said once for each mover: a controller has many peers."""
    level = logging.DEBUG if name in _warned else logging.WARNING
    _warned.add(name)
    text = str(why).split("\n", 1)[0]
    _log.log(level, "bytes go by the socket instead of %s: %s. Further ones are not logged", name, text)
