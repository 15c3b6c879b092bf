"""Common parts of the movers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from stream_balancer.net.messages import MoverNote

if TYPE_CHECKING:
    from stream_balancer.net.connection import Connection

__all__ = ["NUMBERS", "note", "pack", "warn"]

_log = logging.getLogger(__name__)
NUMBERS = {"shared_memory": 1, "torch_dist": 2}
"""``via`` of each."""
_warned: set[str] = set()


def note(connection: Connection, name: str, body: bytes) -> None:
    """Tell the other end."""
    connection.send(MoverNote(NUMBERS[name], body))


def pack(connection: Connection, job: Callable[[], object]) -> None:
    """Run it in the thread that packs. What it raises ends the connection."""

    def guarded() -> None:
        try:
            job()
        except Exception as error:  # noqa: BLE001 - the peer waits for what will not come
            connection.io.do(partial(connection.fail, error))

    connection.io.work(guarded)


def warn(name: str, why: object) -> None:
    """Bytes go by the socket instead. Said once for each mover: a controller has many peers."""
    level = logging.DEBUG if name in _warned else logging.WARNING
    _warned.add(name)
    text = str(why).split("\n", 1)[0]
    _log.log(level, "bytes go by the socket instead of %s: %s. Further ones are not logged", name, text)
