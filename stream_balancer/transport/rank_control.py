"""What a rank sets, ends and asks of the balancer, besides its batches; and the policy version that it learns.

::

    set_version, end, ask_statistics  --PolicyVersion, EndBalancer, StatisticsRequest--> controller
    version, the answers              <--PolicyVersion, StatisticsReply----------------- controller

On the same channel as the rank's reports, so a version that is set before the next batch is asked for is in force
before it is planned. What a connection takes with it is repeated on the next one. No socket, no clock, no event loop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

from stream_balancer.core.staleness import next_version
from stream_balancer.errors import ClosedResourceError, to_raise
from stream_balancer.statistics import Statistics
from stream_balancer.wire.messages import EndBalancer, Message, PolicyVersion, StatisticsReply, StatisticsRequest
from stream_balancer.wire.statistics import read_reply

__all__ = ["Answer", "RankControl"]

Answer: TypeAlias = Callable[["Statistics | Exception"], object]
"""Called once, in any thread."""


class RankControl:
    """One rank's. From any thread."""

    def __init__(self, send: Callable[[Message], object]) -> None:
        """``send`` queues a message; never blocks."""
        self.version: int | None = None
        """The policy version last set here, or passed on by the controller."""
        self._send = send
        self._lock = threading.RLock()
        self._set: int | None = None
        self._ended = False
        self._asked: dict[int, Answer] = {}
        self._num_asked = 0
        self._over: Exception | None = None

    def set_version(self, version: int) -> None:
        """The policy moved on. Never blocks. Raises ValueError if it goes backwards."""
        with self._lock:
            self._check_open("set_version")
            self._set = self.version = next_version(self.version, version)
            self._send(PolicyVersion(self._set))

    def end(self) -> None:
        """No more rollouts are wanted. Never blocks."""
        with self._lock:
            self._check_open("end")
            self._ended = True
            self._send(EndBalancer())

    def ask_statistics(self, answer: Answer) -> None:
        """Have ``answer`` called with the balancer's statistics, or with why there are none."""
        with self._lock:
            over = self._over
            if over is None:
                self._num_asked += 1
                self._asked[self._num_asked] = answer
                self._send(StatisticsRequest(self._num_asked))
        if over is not None:
            answer(to_raise(over))

    def _check_open(self, method: str) -> None:
        if isinstance(self._over, ClosedResourceError):  # a lost controller is raised by who waits for a batch
            raise ClosedResourceError(f"{method}() on a feed that is closed: call it before")

    # in the channel's thread

    def version_is(self, message: PolicyVersion) -> None:
        """The controller passes a version on."""
        with self._lock:  # it may not know yet what was set here
            self.version = message.version if self.version is None else max(self.version, message.version)

    def answered(self, message: StatisticsReply) -> None:
        """Its statistics. One that was not asked for, or twice, is passed over."""
        statistics = read_reply(message)
        with self._lock:
            answer = self._asked.pop(message.number, None)
        if answer is not None:
            answer(statistics)

    def repeat(self) -> None:
        """On a new connection: the controller may not have got it, or was started again."""
        with self._lock:
            if self._set is not None:
                self._send(PolicyVersion(self._set))
            if self._ended:
                self._send(EndBalancer())
            for number in self._asked:
                self._send(StatisticsRequest(number))

    def fail(self, error: Exception) -> None:
        """The connection is over for good; the first reason counts."""
        with self._lock:
            self._over = self._over or error
            asked, self._asked = self._asked, {}
        for answer in asked.values():
            answer(to_raise(error))
