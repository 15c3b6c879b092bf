"""The actor's end of a channel of actor calls, without Ray: the order of messages, and who waits for what."""

from __future__ import annotations

from itertools import chain, permutations
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import pytest

from stream_balancer.errors import RefusedError
from stream_balancer.testing import virtual_time_backend
from stream_balancer.testing.channels import Recorder
from stream_balancer.transport.channel import Outgoing, PeerClosed
from stream_balancer.transport.ray.actor import ActorChannel, ActorChannels
from stream_balancer.transport.ray.channel import Inbox, Packed
from stream_balancer.wire.messages import (
    Close,
    JoinPeer,
    Message,
    Payloads,
    Refused,
    Taken,
    WelcomePeer,
    decode_message,
    encode_message,
)


def packed(message: Message) -> Packed:
    return encode_message(message), [], []


def messages_of(reply: tuple[int, list[Packed]]) -> list[Message]:
    return [decode_message(raw)[1] for raw, _, _ in reply[1]]


def opened() -> tuple[ActorChannel, Recorder]:
    channel, recorder = ActorChannel(), Recorder()
    channel.start(recorder)
    return channel, recorder


def test_an_inbox_puts_in_order() -> None:
    for order in permutations(range(4)):
        inbox: Inbox[int] = Inbox()
        assert list(chain.from_iterable(inbox.add(number, number) for number in order)) == [0, 1, 2, 3]


async def test_messages_are_received_in_order_and_answered_in_the_same_call() -> None:
    channel, recorder = opened()
    recorder.on_message = lambda message: channel.send(Outgoing(message))
    got: list[tuple[int, list[Packed]]] = []

    async def call(number: int) -> None:
        got.append(await channel.exchange(number, [packed(Taken(number))]))

    async with anyio.create_task_group() as tasks:
        for number in (1, 0, 2):
            tasks.start_soon(call, number)
    answered = [message for reply in sorted(got, key=lambda reply: reply[0]) for message in messages_of(reply)]
    assert answered == [Taken(0), Taken(1), Taken(2)]


async def test_a_poll_waits_for_what_comes_up_from_any_thread() -> None:
    channel, _ = opened()
    replies: list[Any] = []

    async def poll() -> None:
        replies.append(await channel.poll())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(poll)
        await anyio.sleep(1)
        assert not replies
        channel.send(Outgoing(Taken(1)))
        await anyio.sleep(1)
        assert messages_of(replies[0]) == [Taken(1)]
        tasks.start_soon(poll)
        await anyio.sleep(1)
        await anyio.to_thread.run_sync(channel.send, Outgoing(Taken(2)))  # as a finalizer does
    assert replies[1][0] == 1
    assert messages_of(replies[1]) == [Taken(2)]


async def test_an_exchange_that_takes_the_last_message_does_not_leave_a_poll_behind() -> None:
    channel, recorder = opened()
    answered: list[Message] = []

    async def poll() -> None:
        answered.extend(messages_of(await channel.poll()))

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(poll)
            await anyio.sleep(1)
            answered.extend(messages_of(await channel.exchange(0, [packed(Close("done"))])))
    assert answered == [Close()]
    assert isinstance(recorder.error, PeerClosed)


async def test_calls_fail_once_the_channel_is_released() -> None:
    channel, recorder = opened()
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:

            async def poll() -> None:
                with pytest.raises(ConnectionError, match="released"):
                    await channel.poll()

            tasks.start_soon(poll)
            await anyio.sleep(1)
            channel.abort()
        with pytest.raises(ConnectionError, match="released"):
            await channel.exchange(0, [packed(Taken(1))])
    assert recorder.error is None, "its own receiver hears nothing after abort()"


async def test_buffers_of_other_sizes_than_announced_end_the_channel() -> None:
    channel, recorder = opened()
    with pytest.raises(RefusedError):
        await channel.exchange(0, [(encode_message(Payloads(0), (3,)), [np.zeros(2, np.uint8)], [])])
    assert "announces" in str(recorder.error)
    assert not recorder.messages


@pytest.mark.parametrize("anyio_backend", [virtual_time_backend("asyncio")])  # as Ray's actors
async def test_a_dead_caller_is_noticed_by_its_lifeline() -> None:
    arrived: list[ActorChannel] = []
    recorder = Recorder()

    def judge(channel: ActorChannel, request: object) -> WelcomePeer | Refused:
        if request == JoinPeer("no", 0):
            return Refused("busy", "no")
        arrived.append(channel)
        channel.start(recorder)
        return WelcomePeer()

    channels = ActorChannels(judge)
    dies = anyio.Event()

    async def lifeline() -> None:
        await dies.wait()
        raise RuntimeError("its owner has died")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(channels.hold, "a key")  # calls start in any order
        await anyio.sleep(1)
        await channels.join("a key", _request("a pair"), [lifeline()])
        assert channels.open == arrived
        dies.set()
        await anyio.sleep(1)
        assert "its owner has died" in str(recorder.error)
        assert not channels.open
        with pytest.raises(ConnectionError, match="released"):
            await channels.poll("a key")
        with pytest.raises(ConnectionResetError, match="started again"):
            await channels.poll("another key")
        await channels.join("refused", _request("no"), [])
        await channels.hold("refused")
        assert not channels.open


def _request(key: str) -> bytes:
    return msgspec.msgpack.encode(JoinPeer(key, 0))
