"""What a clause of the transports' contract is given, and the few things that every clause does with it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, Self, TypeVar

import anyio

from stream_balancer.errors import RankLostError
from stream_balancer.rank.feed import RankFeed
from stream_balancer.transport import Link, Report, Transport
from stream_balancer.types import RankBatch
from stream_balancer.wire.messages import EndBalancer, PolicyVersion, StatisticsRequest

__all__ = [
    "CLAUSE_TIMEOUT_S",
    "Harness",
    "Opener",
    "accepted",
    "check",
    "collect",
    "drain",
    "loss_of",
    "raises",
    "until",
]

CLAUSE_TIMEOUT_S = 30.0  # a guard against hangs, not a measurement
T = TypeVar("T")


class Harness(Protocol):
    """One transport under test, and ways to reach it."""

    @property
    def transport(self) -> Transport:
        """The controller's side."""
        ...

    def connect(
        self,
        rank: int,
        *,
        dp_size: int | None = None,
        incarnation: int = 0,
        depth: int = 2,
        auto_ack: bool = True,
        role: str = "",
    ) -> RankFeed:
        """A rank's feed, as a trainer would open it."""
        ...

    def kill(self, feed: RankFeed) -> None:
        """Let the rank be gone without a word."""
        ...


Opener = Callable[[int], AbstractAsyncContextManager[Harness]]


async def check(clauses: Sequence[Callable[[T], Awaitable[None]]], opener: T, timeout_s: float) -> None:
    """Check every clause. Raises AssertionError, naming the clause, for the first that does not hold."""
    for clause in clauses:
        try:
            with anyio.fail_after(timeout_s):
                await clause(opener)
        except TimeoutError as error:
            raise AssertionError(f"{clause.__name__}: not done within {timeout_s} s") from error
        except AssertionError as error:
            raise AssertionError(f"{clause.__name__}: {error}") from error


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - a transport has no event for everything a test may want to see
        await anyio.sleep(0.005)


async def accepted(transport: Transport, *, ready: bool = True) -> Link:
    link = await transport.accept()
    if ready:
        await until(lambda: link.credits > 0)
    return link


async def drain(feed: RankFeed) -> list[RankBatch]:
    return [batch async for batch in feed]


def collect(link: Link, into: list[Report]) -> bool:
    done = link.report()
    if done is not None and not isinstance(done, PolicyVersion | EndBalancer | StatisticsRequest):
        into.append(done)
    return bool(into)


async def loss_of(link: Link) -> RankLostError:
    try:
        while True:
            link.report()
            await anyio.sleep(0.005)
    except RankLostError as error:
        return error


class raises:  # noqa: N801 - reads like pytest.raises, which a library cannot depend on
    """Asserts that its block raises ``kind``."""

    def __init__(self, kind: type[Exception]) -> None:
        self._kind = kind
        self.error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        self.error = error
        assert error is not None, f"{self._kind.__name__} was not raised"
        return isinstance(error, self._kind)
