"""Who is refused learns why, and does not come again with the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest
from guard import GUARD_S
from on_a_port import served

import stream_balancer as sb
from stream_balancer.net import handshake
from stream_balancer.net.connection import Connection
from stream_balancer.net.listener import Listener
from stream_balancer.net.messages import PROTOCOL, Join
from stream_balancer.testing import make_rollout

TOKEN = "a token of sixteen or more"


def iterates(address: str, **options: Any) -> None:
    """A rank."""
    with sb.RankFeed(address, **{"rank": 0, "dp_size": 1, "token": TOKEN, **options}) as feed:
        next(iter(feed))


def puts(address: str, **options: Any) -> None:
    """A producer."""

    async def main() -> None:
        async with sb.connect(address, **{"token": TOKEN, **options}) as producer:
            await producer.put(make_rollout(3, "r"))

    anyio.run(main)


@pytest.mark.parametrize("joins", [iterates, puts])
async def test_another_version_of_the_library(joins: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    hello = handshake.Handshake.hello
    monkeypatch.setattr(
        handshake.Handshake, "hello", lambda self: msgspec.structs.replace(hello(self), protocol=PROTOCOL + 1)
    )
    async with served(listen={"token": TOKEN}) as (_, transport):
        with pytest.raises(
            sb.errors.RefusedError, match="Install the same version of stream_balancer everywhere"
        ) as refused:
            await anyio.to_thread.run_sync(partial(joins, transport.address))
    assert (refused.value.reason, isinstance(refused.value, ValueError)) == ("protocol", True)


@pytest.mark.parametrize("joins", [iterates, puts])
async def test_a_controller_that_closes_before_it_has_served(joins: Callable[..., None]) -> None:
    """Who waited to be let in hears it."""
    transport = sb.TorchTransport.listen(dp_size=1, token=TOKEN)
    with anyio.fail_after(GUARD_S), pytest.raises(sb.errors.RefusedError, match="closed its transport") as refused:
        async with anyio.create_task_group() as tasks:
            waiting = transport.service._jobs

            async def close_it() -> None:
                while not waiting:
                    await anyio.sleep(0.005)
                await transport.aclose()

            tasks.start_soon(close_it)
            try:
                await anyio.to_thread.run_sync(partial(joins, transport.address))
            except sb.errors.RefusedError as error:
                tasks.cancel_scope.cancel()
                failure = error
        raise failure
    assert (refused.value.reason, isinstance(refused.value, sb.errors.BrokenResourceError)) == ("closed", True)


def test_a_feed_says_who_it_is_each_time_that_it_joins() -> None:
    """Else its own former connection would keep it out."""
    sessions: list[bytes] = []
    twice = threading.Event()

    def cut_off(connection: Connection, join: Join) -> None:
        sessions.append(join.session)
        if len(sessions) == 2:
            twice.set()
        connection.abort()

    listener = Listener("127.0.0.1", 0, TOKEN.encode(), cut_off)
    with sb.RankFeed(listener.address, rank=0, dp_size=1, token=TOKEN):
        assert twice.wait(GUARD_S)
    listener.close()
    assert len(set(sessions)) == 1
    assert len(sessions[0]) == 16
