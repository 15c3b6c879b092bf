"""The memory channel keeps the contract of channels, in virtual time, on both loops."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from stream_balancer.testing import check_channel
from stream_balancer.testing.channels import CLAUSES, Opener, Recorder
from stream_balancer.transport.channel import Channel, Outgoing
from stream_balancer.transport.memory_channel import Wire
from stream_balancer.wire.messages import Taken


@asynccontextmanager
async def open_wire() -> AsyncIterator[tuple[Channel, Channel]]:
    yield Wire().ends


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda clause: clause.__name__)
async def test_clause(clause: Callable[[Opener], Awaitable[None]]) -> None:
    await clause(open_wire)


async def test_contract() -> None:
    await check_channel(open_wire)


def test_messages_hang_in_a_held_wire() -> None:
    wire, recorders = Wire(), (Recorder(), Recorder())
    for end, recorder in zip(wire.ends, recorders, strict=True):
        end.start(recorder)
    wire.hold()
    wire.ends[0].send(Outgoing(Taken(1)))
    wire.ends[1].send(Outgoing(Taken(2)))
    for end in wire.ends:
        end.close()
    assert recorders[1].events == []
    wire.release()
    assert [recorder.messages for recorder in recorders] == [[Taken(2)], [Taken(1)]]
    assert [recorder.events[-1] for recorder in recorders] == ["ended", "ended"]


def test_references_come_with_their_message() -> None:
    wire, seen = Wire(), []

    class Keeping(Recorder):
        def receive(self, message, buffers, references):  # type: ignore[no-untyped-def]
            seen.append(references)

    wire.ends[0].start(Recorder())
    wire.ends[1].start(Keeping())
    wire.ends[0].send(Outgoing(Taken(1), references=["an object"]))
    assert seen == [["an object"]]
