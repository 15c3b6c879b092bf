"""Calls over connections that break, hang and come again, from callers that are cancelled: none is lost, doubled, or
answered twice. In virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import numpy as np
import pytest
from ends import call
from helpers import until

from stream_balancer.errors import (
    BrokenResourceError,
    ClosedResourceError,
    DuplicateRolloutError,
    RefusedError,
    RolloutError,
    WireError,
)
from stream_balancer.net.errors import ConnectionEnd
from stream_balancer.net.loops import Inbox
from stream_balancer.net.messages import Cancel, Join, Notify, Welcome
from stream_balancer.net.service import Asked, Host, Peer, Service
from stream_balancer.net.session import Pending, Session
from stream_balancer.testing.network import MemoryNetwork
from stream_balancer.wire.payload import Encoded, Payload


class Taker(Host):
    """Takes names, each once; some at once and some after a while. What it has taken outlives its services."""

    def __init__(self, network: MemoryNetwork, *, keep_s: float = 60.0, **options: Any) -> None:
        self.taken: list[str] = []
        self.begun = 0
        self.service = Service(network.listen, **options)
        self.peers: list[Peer] = []
        self.ends: list[tuple[str, str]] = []
        self._keep_s = keep_s

    async def attend(self) -> None:
        self.methods = {"take": self._take, "echo": self._echo}
        await self.service.attend(self)

    def on_peer(self, peer: Peer) -> None:
        peer.keep_s = self._keep_s
        self.peers.append(peer)

    def on_end(self, peer: Peer, end: ConnectionEnd) -> None:
        self.ends.append(("end", end.kind))

    def on_gone(self, peer: Peer, end: ConnectionEnd) -> None:
        self.ends.append(("gone", end.kind))

    def _take(self, _: Peer, asked: Asked) -> Any:
        name, after_s = msgspec.msgpack.decode(asked.args)
        self.begun += 1
        return self._later(name, after_s) if after_s else self._now(name)

    def _now(self, name: str) -> str:
        if name in self.taken:
            raise DuplicateRolloutError(name)
        self.taken.append(name)
        return name

    async def _later(self, name: str, after_s: float) -> str:
        await anyio.sleep(after_s)
        return self._now(name)

    def _echo(self, _: Peer, asked: Asked) -> Encoded:
        return Encoded(
            msgspec.msgpack.decode(asked.args), Payload() if asked.memory is None else Payload.of(asked.memory)
        )


@asynccontextmanager
async def hosted(**options: Any) -> AsyncIterator[tuple[Taker, MemoryNetwork, Callable[..., Session]]]:
    async with MemoryNetwork(dp_size=1) as network, anyio.create_task_group() as tasks:
        host = Taker(network, **options)
        tasks.start_soon(host.attend)
        sessions: list[Session] = []

        def session(**options: Any) -> Session:
            sessions.append(Session(network.connect_producer(), "producer", on_message=lambda *_: None, **options))
            sessions[-1].begin()
            return sessions[-1]

        yield host, network, session
        for one in sessions:
            await one.aclose()
        tasks.cancel_scope.cancel()


async def settle() -> None:
    for _ in range(30):
        await anyio.lowlevel.checkpoint()


async def take(session: Session, name: str, after_s: float = 0.0) -> None:
    await session.ask("take", (name, after_s), accepted_if="DuplicateRolloutError")


class Fate:
    """What became of the calls of a drill, as their callers see it."""

    def __init__(self) -> None:
        self.returned: list[str] = []
        self.cancelled: list[str] = []
        self.unknown: list[str] = []

    async def call(self, session: Session, name: str, after_s: float) -> None:
        try:
            await take(session, name, after_s)
            self.returned.append(name)
        except BrokenResourceError:
            self.unknown.append(name)
        except anyio.get_cancelled_exc_class():
            self.cancelled.append(name)
            raise


async def cancel_after(how: str, seconds: float, call: Callable[[], Any]) -> None:
    if how == "scope":
        with anyio.move_on_after(seconds):
            await call()
    elif how == "native":
        task = asyncio.ensure_future(call())
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.wait([task])
    else:
        try:
            async with asyncio.timeout(seconds):
                await call()
        except TimeoutError:
            pass


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("seed", range(12))
async def test_a_storm_of_calls_cuts_and_cancels(seed: int, restarts: bool, anyio_backend_name: str) -> None:
    chance = random.Random(seed)
    ways = ["scope", "native", "timeout"] if anyio_backend_name == "asyncio" else ["scope"]
    limits = Welcome(max_calls=chance.choice([2, 1000]), staged_bytes=chance.choice([600, 10**6]))
    with anyio.fail_after(1000):
        async with MemoryNetwork(dp_size=1) as network, anyio.create_task_group() as tasks:
            host = Taker(network, limits=limits)
            attending, attended = anyio.CancelScope(), anyio.Event()

            async def attend() -> None:
                with attending:
                    await host.attend()
                attended.set()

            async def attend_anew() -> None:
                nonlocal attending, attended
                attending.cancel()
                await attended.wait()
                attending, attended = anyio.CancelScope(), anyio.Event()

            tasks.start_soon(attend)
            fate, over = Fate(), anyio.Event()
            dialers = [network.connect_producer() for _ in range(3)]
            sessions = [Session(one, "producer", rejoin=True, linger_s=1e9) for one in dialers]
            for session in sessions:
                session.begin()

            async def faults() -> None:
                while not over.is_set():
                    await anyio.sleep(chance.expovariate(2.0))
                    dialer, event = chance.choice(dialers), chance.random()
                    if event < 0.5:
                        dialer.cut(seen_by=chance.choice([(0, 1), (0, 1), (1,), (1, 0)]))
                    elif event < 0.7:
                        dialer.hold()
                        await anyio.sleep(chance.random())
                        dialer.release()
                    elif event < 0.85:  # somebody else attends
                        await attend_anew()
                        tasks.start_soon(attend)
                    elif restarts:  # and has forgotten all but what was taken
                        await attend_anew()
                        host.service.close()
                        host.service = Service(network.listen, limits=limits)
                        tasks.start_soon(attend)

            tasks.start_soon(faults)
            async with anyio.create_task_group() as calls:
                for number in range(60):
                    session, after_s = chance.choice(sessions), chance.choice([0.0, 0.0, 0.3])
                    call = partial(fate.call, session, str(number), after_s)
                    if chance.random() < 0.4:
                        calls.start_soon(cancel_after, chance.choice(ways), chance.random(), call)
                    else:
                        calls.start_soon(call)
                    await anyio.sleep(chance.expovariate(10.0))
            over.set()
            for session in sessions:
                await session.aclose()
            assert len(host.taken) == len(set(host.taken))
            assert not fate.unknown
            assert sorted(fate.returned + fate.cancelled, key=int) == [str(n) for n in range(60)]
            assert set(host.taken) == set(fate.returned)
            if not restarts:
                assert sum(len(peer.open) for peer in host.service.peers.values()) == 0
                assert host.service.staged == 0
            tasks.cancel_scope.cancel()


async def test_a_lost_session_goes_on_and_gets_each_reply_once() -> None:
    """Four calls are on their way: one is answered and its reply lost, two are worked on, one never came."""
    async with hosted() as (host, _, session), anyio.create_task_group() as tasks:
        caller = session(rejoin=True)
        await take(caller, "first")
        for name in ("a", "b"):
            tasks.start_soon(take, caller, name, 5.0)
        await settle()
        caller.line.dialer.hold()
        tasks.start_soon(take, caller, "never came")
        await settle()
        caller.line.dialer.cut()
        await anyio.sleep(1)
        assert (host.taken, host.begun) == (["first", "never came"], 4)
        await anyio.sleep(5)
        assert sorted(host.taken) == ["a", "b", "first", "never came"]
        assert host.begun == 4
        assert not host.service.peers[caller.line.join.session].open


async def test_a_reply_that_is_made_before_its_repetition_has_come_is_sent_once() -> None:
    async with hosted() as (host, _, session), anyio.create_task_group() as tasks:
        opened: list[Welcome] = []

        def on_open(welcome: Welcome) -> None:
            opened.append(welcome)
            if len(opened) == 2:
                caller.line.dialer.hold()

        caller = session(rejoin=True, on_open=on_open)
        tasks.start_soon(take, caller, "a", 1.0)
        await anyio.sleep(0.5)
        caller.line.dialer.cut()
        await anyio.sleep(1)
        caller.line.dialer.release()
        await take(caller, "b")
        assert (host.taken, host.begun, len(opened)) == (["a", "b"], 2, 2)


@pytest.mark.parametrize("keep_s", [0.0, 3.0])
async def test_a_session_that_does_not_come_back_is_withdrawn(keep_s: float) -> None:
    """At once, or when it has had the time to."""
    async with hosted(keep_s=keep_s) as (host, _, session), anyio.create_task_group() as tasks:
        caller = session()

        async def call() -> None:
            with pytest.raises(BrokenResourceError, match="whether it was accepted is not known"):
                await caller.ask("take", ("a", 5.0), Payload.of(np.zeros(1000, dtype=np.uint8)))

        tasks.start_soon(call)
        await settle()
        assert host.service.staged > 1000
        caller.line.dialer.cut("the network broke")
        await anyio.sleep(2)
        assert host.ends == [("end", "lost"), ("gone", "lost")][: 1 if keep_s else 2]
        await anyio.sleep(10)
        assert (host.taken, host.service.peers, host.ends[1:]) == ([], {}, [("gone", "lost")])
        assert host.service.staged == 0


async def test_at_most_so_many_calls_and_bytes_are_on_their_way() -> None:
    limits = Welcome(staged_bytes=4000, max_call_bytes=10_000, max_calls=3)
    async with hosted(limits=limits) as (host, _, session), anyio.create_task_group() as tasks:
        caller = session()
        for name in "abcd":
            tasks.start_soon(take, caller, name, 1.0)
        await settle()
        assert host.begun == 3
        await anyio.sleep(2)
        assert host.begun == 4
        data = np.arange(9000, dtype=np.uint8)
        answered = await caller.ask("echo", 1, Payload.of(data), reply_bytes=9000)  # larger than the window: alone
        assert answered.memory is not None
        assert (answered.memory == data).all()
        # the answerer would end the connection if all were sent at once
        async with anyio.create_task_group() as three:
            for name in "efg":
                three.start_soon(partial(caller.ask, "take", (name, 1.0), Payload.of(data[:1900])))
        with pytest.raises(RolloutError, match=r"10001 bytes, more than the controller's max_put_bytes \(10000\)"):
            await caller.ask("echo", 1, Payload.of(np.zeros(10_001, dtype=np.uint8)))


async def test_bytes_behind_a_reply_that_nobody_has_asked_for_end_the_connection() -> None:
    async with hosted() as (_, _, session):
        caller = session()
        with pytest.raises(WireError, match="nobody has asked for"):
            await caller.ask("echo", 1, Payload.of(np.zeros(10, dtype=np.uint8)), reply_bytes=9)


async def test_a_call_that_was_not_made_cannot_be_cancelled() -> None:
    async with hosted() as (_, _, session):
        caller = session()
        await settle()
        caller.send(Cancel(0))
        with pytest.raises(RefusedError, match="call 0 is cancelled before it was made"):
            await caller.ask("echo", 1)


async def test_who_has_left_while_it_knocked_is_lost() -> None:
    async with MemoryNetwork(dp_size=1) as network, anyio.create_task_group() as tasks:
        host, there = Taker(network), network.connect_producer()
        caller = Session(there, "producer")
        caller.begin()
        await settle()
        there.cut("killed")
        caller.close()
        await settle()
        tasks.start_soon(host.attend)
        await settle()
        assert host.ends == [("end", "lost")]
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("how", ["send", "close"])
async def test_what_is_sent_behind_a_reply_does_not_overtake_it(how: str) -> None:
    async with hosted() as (host, _, session):
        heard: list[object] = []
        caller = session(on_open=lambda _: None)
        caller._on_message = lambda message, _: heard.append(message)
        await take(caller, "a")

        async def then(peer: Peer, asked: Asked) -> None:
            asked.reply("b")
            peer.send(Notify(version=7)) if how == "send" else peer.close()

        host.methods = {"then": lambda peer, asked: then(peer, asked)}
        pending = Pending("then")
        pending.signal.then(lambda: heard.append("reply"))
        await caller.reply_to(pending)
        await settle()
        assert heard == (["reply", Notify(version=7)] if how == "send" else ["reply"])


async def test_beyond_the_budget_a_session_is_read_once_others_have_their_replies() -> None:
    """Two sessions, 1,000 bytes a call, 1,500 for all: each has one call in, and no more."""
    async with hosted(most_staged_bytes=1500) as (host, _, session), anyio.create_task_group() as tasks:
        callers = [session() for _ in range(2)]
        data = Payload.of(np.zeros(1000, dtype=np.uint8))

        async def put(caller: Session, name: str) -> None:
            await caller.ask("take", (name, 1.0), data)

        for number in range(3):
            for place, caller in enumerate(callers):
                tasks.start_soon(put, caller, f"{place}.{number}")
        await settle()
        assert host.begun in (2, 3)
        await anyio.sleep(10)
        assert len(host.taken) == 6
        assert (host.service.staged, host.service.paused) == (0, {})


async def test_closing_takes_back_what_waits_and_says_what_became_of_it() -> None:
    async with hosted() as (host, _, session), anyio.create_task_group() as tasks:
        caller = session()
        await take(caller, "a")

        async def call() -> None:
            with pytest.raises(ClosedResourceError, match="it was not granted"):
                await take(caller, "b", 5.0)

        tasks.start_soon(call)
        await settle()
        await caller.aclose()
        with pytest.raises(ClosedResourceError, match=r"take\(\) on a closed producer"):
            await take(caller, "c")
        await settle()
        assert (host.taken, host.ends) == (["a"], [("end", "closed"), ("gone", "closed")])


async def test_a_controller_that_does_not_answer_leaves_the_outcome_unknown() -> None:
    async with hosted() as (host, _, session):
        caller = session(linger_s=2.0)
        await take(caller, "a")
        caller.line.dialer.hold()
        began = anyio.current_time()
        with pytest.raises(BrokenResourceError, match=r"has not answered for 2\.0 s"), anyio.fail_after(1):
            await take(caller, "b")
        assert anyio.current_time() - began == pytest.approx(3.0)
        caller.line.dialer.release()
        await settle()
        assert host.taken in (["a"], ["a", "b"])


async def test_a_connection_that_is_lost_again_and_again_is_dialled_less_and_less_often() -> None:
    """Each lasts a little less than what lets the next one be built at once."""
    async with hosted() as (_, _, session), anyio.create_task_group() as tasks:
        caller = session(rejoin=True)

        async def cut() -> None:
            for joined in range(1, 1000):
                await until(lambda joined=joined: caller.line.dialer.joined >= joined)
                await anyio.sleep(0.06)
                caller.line.dialer.cut()

        tasks.start_soon(cut)
        await anyio.sleep(20)
        assert caller.line.dialer.joined < 40
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("sent", ["never", "now", "to a controller before this one"])
def test_only_what_was_sent_may_have_been_accepted(sent: str) -> None:
    pending = Pending("put", accepted_if="DuplicateRolloutError")
    # numbers begin anew where nothing is known of the ones before
    pending.number, pending.sent_before = 3 if sent == "now" else None, sent.startswith("to")
    text = str(pending.lost("the controller", "it broke"))
    assert ("so it was not accepted. Connect and put it again" in text) == (sent == "never")
    assert ("not known. Connect and put it again: a DuplicateRolloutError then" in text) == (sent != "never")


async def test_who_takes_has_a_turn_in_the_midst_of_a_burst_of_calls() -> None:
    """Room for two: of nine calls at a time only every third finds none."""
    async with MemoryNetwork(dp_size=1) as network, anyio.create_task_group() as tasks:
        inbox = Inbox(Service(network.listen).io)
        there: list[int] = []
        waited: list[int] = []
        is_full = anyio.Event()

        def put(number: int) -> None:
            if len(there) < 2:
                there.append(number)
                return
            waited.append(number)
            inbox.waits = True
            is_full.set()

        async def take() -> None:
            nonlocal is_full
            while True:
                await is_full.wait()
                is_full = anyio.Event()
                there.clear()

        tasks.start_soon(take)
        await settle()
        for number in range(9):
            inbox.do(partial(put, number))
        tasks.start_soon(inbox.work_off)
        await settle()
        assert waited == [2, 5, 8]
        tasks.cancel_scope.cancel()


def test_the_first_reply_counts() -> None:
    """A reply and the loss of the connection may come in either order."""
    lost = ConnectionError("it broke")
    for first, then in ((None, lost), (lost, None)):
        pending = Pending("put")
        pending.resolve(first)
        pending.resolve(then)
        assert pending.error is first


def test_bytes_that_are_still_coming_count() -> None:
    """A mover carries them beside the connection: more calls are announced before they are here."""
    limits = Welcome(staged_bytes=100, max_call_bytes=100)
    peer = Peer(SimpleNamespace(io=None, limits=limits), Join(b"", "producer", "p", b"1" * 16))  # type: ignore[arg-type]
    peer.admit(call(0), 60)
    with pytest.raises(WireError, match="a call of 60 bytes, where 60 of 100 have no reply"):
        peer.admit(call(1), 60)
