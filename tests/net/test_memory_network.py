"""Controller, ranks and producers in one event loop, in virtual time."""

from __future__ import annotations

import anyio
import pytest
from ends import Heard, call

from stream_balancer.errors import RefusedError, refused_error
from stream_balancer.net.connection import Connection
from stream_balancer.net.messages import Join, Message, Welcome
from stream_balancer.testing.network import MemoryListener, MemoryNetwork, MemoryPeer
from stream_balancer.wire.payload import Payload


class Meeting:
    """A network with a controller that keeps what it hears, and one peer."""

    def __init__(self) -> None:
        self.network = MemoryNetwork(dp_size=2)
        self.controller, self.peer = Heard(), Heard()
        self.there: list[Connection] = []
        self.here: list[Connection] = []
        self.failures: list[BaseException] = []

    def listen(self) -> MemoryListener:
        return self.network.listen(self._arrived)

    def _arrived(self, connection: Connection, join: Join) -> None:
        if join.name == "unwanted":
            raise refused_error("busy", "not two of you")
        connection.handler = self.controller
        self.there.append(connection)
        connection.let_in(Welcome(known=True))

    def dial(self, peer: MemoryPeer, name: str = "one") -> None:
        peer.dial(Join(b"", "rank", name, b"1" * 16), self._welcomed, self.failures.append)

    def _welcomed(self, connection: Connection, welcome: Welcome) -> None:
        assert welcome.known
        connection.handler = self.peer
        self.here.append(connection)

    def heard(self) -> list[Message]:
        return [message for message, _ in self.controller.messages]


async def meet() -> tuple[Meeting, MemoryPeer]:
    meeting = Meeting()
    peer = meeting.network.connect(1, incarnation=3)
    meeting.listen()
    meeting.dial(peer)
    await anyio.sleep(0.001)
    assert peer.joined == 1
    return meeting, peer


async def test_who_comes_before_the_controller_listens_waits_for_it() -> None:
    meeting = Meeting()
    peer = meeting.network.connect(0, depth=5)
    assert {"rank": 0, "dp_size": 2, "depth": 5}.items() <= peer.options.items()
    meeting.dial(peer)
    await anyio.sleep(3600)
    assert not meeting.failures
    listener = meeting.listen()
    await anyio.sleep(0.001)
    assert len(meeting.there) == len(meeting.here) == 1
    listener.close()
    meeting.dial(meeting.network.connect_producer())
    await anyio.sleep(3600)
    assert len(meeting.there) == 1
    meeting.listen()
    await anyio.sleep(0.001)
    assert len(meeting.there) == 2


async def test_messages_and_their_bytes_arrive_in_order_without_time_passing() -> None:
    meeting, _ = await meet()
    began = anyio.current_time()
    for number in range(50):
        meeting.here[0].send(call(number), Payload.of(bytes([number]) * number))
    while len(meeting.controller.messages) < 50:
        await anyio.lowlevel.checkpoint()
    assert meeting.heard() == [*map(call, range(50))]
    for number, (_, memory) in enumerate(meeting.controller.messages):
        assert memory is None if number == 0 else bytes(memory) == bytes([number]) * number  # type: ignore[arg-type]
    assert anyio.current_time() == began


async def test_held_messages_come_when_they_are_released() -> None:
    meeting, peer = await meet()
    peer.hold()
    for number in range(5):
        meeting.here[0].send(call(number), Payload.of(b"abc"))
        meeting.there[0].send(call(number))
    await anyio.sleep(3600)
    assert not meeting.controller.messages
    assert not meeting.peer.messages
    peer.release()
    await anyio.sleep(0.001)
    assert meeting.heard() == [message for message, _ in meeting.peer.messages] == [*map(call, range(5))]


@pytest.mark.parametrize("seen_by", [(0, 1), (0,), (1,)])
async def test_a_cut_is_seen_by_whom_the_test_says(seen_by: tuple[int, ...]) -> None:
    meeting, peer = await meet()
    peer.hold()
    meeting.here[0].send(call())
    await anyio.sleep(1)
    peer.cut(seen_by=seen_by)
    peer.release()
    await anyio.sleep(3600)
    assert not meeting.controller.messages
    found = meeting.controller.ends, meeting.peer.ends
    assert [[end.kind for end in ends] for ends in found] == [["lost"] * (side in seen_by) for side in (0, 1)]
    meeting.dial(peer)
    await anyio.sleep(1)
    assert peer.joined == 2
    peer.cut(seen_by=[0, 1])
    assert [len(ends) for ends in found] == [1 + (side in seen_by) for side in (0, 1)]


@pytest.mark.parametrize("when", ["admit", "receive"])
async def test_a_paused_end_takes_nothing(when: str) -> None:
    """Paused when it is asked about the first message, not even that."""
    meeting, _ = await meet()
    there = meeting.there[0]
    setattr(meeting.controller, f"on_{when}", lambda *_: there.pause())
    for number in range(5):
        meeting.here[0].send(call(number), Payload.of(b"abc"))
    await anyio.sleep(3600)
    assert len(meeting.heard()) == (when == "receive")
    setattr(meeting.controller, f"on_{when}", lambda *_: None)
    there.resume()
    await anyio.sleep(0.001)
    assert meeting.heard() == [*map(call, range(5))]


async def test_a_closed_network_refuses_and_an_owner_that_is_gone_is_not_there() -> None:
    meeting = Meeting()
    async with meeting.network as network:
        meeting.dial(network.connect(0))
        owner = network.connect_producer(keep=True)
        listener = owner.listen(meeting._arrived)
        meeting.dial(network.connect(0).elsewhere(listener.address))
        await anyio.sleep(1)
        assert len(meeting.here) == 1
        listener.close()
        meeting.dial(network.connect(0).elsewhere(listener.address))
    await anyio.sleep(1)
    gone, closed = meeting.failures
    assert isinstance(gone, ConnectionRefusedError)
    assert isinstance(closed, RefusedError)
    assert closed.reason == "closed"
