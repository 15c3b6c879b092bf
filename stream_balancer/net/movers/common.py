"""A way for bulk bytes beside the socket, as a connection sees it; and what all such ways share."""

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


class Mover:
    """An end of a mover. A subclass has these, which are called in the I/O thread::

        begin()                     set it up with the other end
        send(payload, go)           go(where) lets the message leave; those behind it wait for that. False: not now,
                                    use the socket
        receive(envelope, ready)    ready(memory), once all runs are there; messages behind it wait for that
        note(body)                  the other end's mover says something
        close()                     the connection is over

    ``receive`` and ``note`` raise WireError for what makes no sense.
    """

    name: ClassVar[str]
    number: ClassVar[int]
    """``via`` of its messages."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.ready = False
        """Set up at both ends: bytes may go this way."""

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
