"""Common to all movers: their connection, notes to the other end, and the thread that packs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from stream_balancer.net.messages import MoverNote

if TYPE_CHECKING:
    from stream_balancer.net.connection import Connection

_log = logging.getLogger(__name__)
_warned: set[str] = set()


class CommonMover:
    """Part that all movers share."""

    name: ClassVar[str]
    number: ClassVar[int]
    """``via`` of its messages."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.ready = False

    def _tell(self, body: bytes) -> None:
        """A note to the other end."""
        self._connection.send(MoverNote(self.number, body))

    def _pack(self, job: Callable[[], object]) -> None:
        """Run it in the thread that packs. What it raises ends the connection."""

        def guarded() -> None:
            try:
                job()
            except Exception as error:  # noqa: BLE001 - the peer waits for what will not come
                self._connection.io.do(partial(self._connection.fail, error))

        self._connection.io.work(guarded)

    def _warn(self, why: object) -> None:
        """Bytes go by the socket instead. Said once for each mover: a controller has many peers."""
        level = logging.DEBUG if self.name in _warned else logging.WARNING
        _warned.add(self.name)
        text = str(why).split("\n", 1)[0]
        _log.log(level, "bytes go by the socket instead of %s: %s. Further ones are not logged", self.name, text)
