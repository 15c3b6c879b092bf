"""Payloads that stay with who made them: fetched into the holes of a batch, or named as missing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import anyio
import msgspec
import pytest
import torch
from codec_help import carried, remote, rollout
from guard import GUARD_S
from scripted import same_rollout

import stream_balancer as sb
from stream_balancer.client import payloads
from stream_balancer.client.payloads import Fetcher, PayloadOwner
from stream_balancer.errors import DuplicateRolloutError
from stream_balancer.net.address import TcpDialer
from stream_balancer.net.listener import Listener
from stream_balancer.net.loops import Io
from stream_balancer.net.service import Asked, Peer, Service
from stream_balancer.net.session import Session
from stream_balancer.rollouts import Rollout
from stream_balancer.wire.codec import Decoded, Owner, Wanted

LOCAL = [rollout(n) for n in range(6)]


@pytest.fixture
def owners() -> Iterator[Callable[[str], PayloadOwner]]:
    made: list[PayloadOwner] = []

    def make(label: str) -> PayloadOwner:
        made.append(PayloadOwner.over_tcp(label))
        return made[-1]

    yield make
    for owner in made:
        owner.close()


@pytest.fixture
def fetcher() -> Iterator[Fetcher]:
    one = Fetcher(lambda owner: TcpDialer(owner.address, token=owner.token.decode()))
    yield one
    one.close()


def elsewhere(local: Rollout, owner: PayloadOwner) -> Rollout:
    [handle] = owner.keep([local])
    return remote(local, handle.owner, handle.key)


def fetched(fetcher: Fetcher, decoded: Decoded) -> Mapping[str, str]:
    """Why some could not be, by id."""
    found: list[Mapping[str, str]] = []
    ready = threading.Event()

    def done(missing: Mapping[str, str]) -> None:
        found.append(missing)
        ready.set()

    Io.current().do(lambda: fetcher.fetch(decoded, done))
    assert ready.wait(GUARD_S)
    assert len(found) == 1
    return found[0]


def same(decoded: Decoded, rollouts: Sequence[Rollout]) -> None:
    for ours, theirs in zip(carried(rollouts).rollouts, decoded.rollouts, strict=True):
        assert same_rollout(ours, theirs)


def test_holes_are_filled_from_all_owners(owners: Callable[[str], PayloadOwner], fetcher: Fetcher) -> None:
    a, b = owners("a"), owners("b")
    for _ in range(3):
        mixed = [elsewhere(LOCAL[0], a), LOCAL[1], elsewhere(LOCAL[2], b), elsewhere(LOCAL[3], a), *LOCAL[4:]]
        got = carried(mixed)
        assert fetched(fetcher, got) == {}
        same(got, LOCAL)
    assert len(fetcher._sources) == 2, "connections stay open"


def test_what_is_gone_is_named_and_the_rest_comes(owners: Callable[[str], PayloadOwner], fetcher: Fetcher) -> None:
    a, b, left = owners("a"), owners("b"), owners("left")
    mixed = [elsewhere(LOCAL[0], a), elsewhere(LOCAL[1], b), elsewhere(LOCAL[2], left), elsewhere(LOCAL[3], a)]
    left.close()
    a.drop([0])
    got = carried(mixed)
    missing = fetched(fetcher, got)
    assert missing.keys() == {"r0", "r2"}
    assert missing["r0"] == "it does not have payload 0"
    assert "refused" in missing["r2"]
    got.mask(missing)
    assert got.micro_batches[0].packed().rollout_weights.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert torch.equal(got.rollouts[3].tokens["input_ids"], LOCAL[3].tokens["input_ids"])
    again = carried(mixed)
    again.mask(["r0", "r2"])
    assert fetched(fetcher, again) == {}, "what is masked is not asked for"


def test_a_connection_that_was_lost_is_made_anew(owners: Callable[[str], PayloadOwner], fetcher: Fetcher) -> None:
    a = owners("a")
    assert fetched(fetcher, carried([elsewhere(LOCAL[0], a)])) == {}
    (peer,) = a._service.peers.values()
    ended = threading.Event()
    a._service.host.on_end = lambda *_: ended.set()  # type: ignore[method-assign]
    peer.abort()
    assert ended.wait(GUARD_S)
    assert fetched(fetcher, carried([elsewhere(LOCAL[1], a)])) == {}


def test_other_sizes_than_were_described_are_missing(owners: Callable[[str], PayloadOwner], fetcher: Fetcher) -> None:
    [handle] = owners("a").keep([LOCAL[0]])
    missing = fetched(fetcher, carried([remote(LOCAL[5], handle.owner, handle.key)]))
    assert missing == {"r5": "it does not have payload 0"}


def test_nothing_is_asked_for_after_close(owners: Callable[[str], PayloadOwner], fetcher: Fetcher) -> None:
    got, asked = carried([elsewhere(LOCAL[0], owners("a"))]), threading.Event()
    fetcher.close()
    Io.current().do(lambda: (fetcher.fetch(got, lambda _: None), asked.set()))
    assert asked.wait(GUARD_S)
    assert not fetcher._sources, "a session that nobody would close"


def test_much_is_asked_for_in_shares(
    owners: Callable[[str], PayloadOwner], fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payloads, "_CALL_BYTES", 200)
    a, asked = owners("a"), list[int]()

    def fetch(peer: Peer, call: Asked) -> Any:
        asked.append(call.number)
        return a._fetch(peer, call)

    a._service.answer_here({"fetch": fetch})
    got = carried([elsewhere(one, a) for one in LOCAL])
    a.drop([4])
    assert fetched(fetcher, got).keys() == {"r4"}
    assert len(asked) > 2
    got.mask(["r4"])
    assert same_rollout(got.rollouts[5], carried(LOCAL).rollouts[5])


def test_nothing_is_said_after_close(owners: Callable[[str], PayloadOwner], fetcher: Fetcher) -> None:
    a = owners("a")
    held, done, closed = threading.Event(), list[object](), threading.Event()
    a._service.answer_here({"fetch": lambda peer, it: held.wait(0.2) and None})
    Io.current().do(lambda: fetcher.fetch(carried([elsewhere(LOCAL[0], a)]), done.append))
    fetcher.close()
    held.set()
    Io.current().do(closed.set)
    assert closed.wait(GUARD_S)
    assert done == []


@pytest.mark.parametrize("args", [None, [[1]], [[0, 2, 2, 5]], [[0, 0, 0, 5]], [[-1, 1, 0, 5]], "x"])
def test_impossible_wishes_end_the_connection(owners: Callable[[str], PayloadOwner], args: Any) -> None:
    a = owners("a")
    [handle] = a.keep([LOCAL[0]])
    session = Session(TcpDialer(handle.owner.address, token=handle.owner.token.decode()), "fetcher")
    session.begin()

    async def ask() -> None:
        await session.ask("fetch", msgspec.Raw(msgspec.msgpack.encode(args)))

    with pytest.raises(Exception, match=r"fetch|wanted"):
        anyio.run(ask)
    session.close()
    assert len(a) == 1


def test_released_waits_for_the_last_payload(owners: Callable[[str], PayloadOwner]) -> None:
    a = owners("a")

    async def main() -> None:
        await a.released()
        keys = [one.key for one in a.keep(LOCAL)]
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(a.released)
            await anyio.wait_all_tasks_blocked()
            a.drop(keys[:-1])
            await anyio.wait_all_tasks_blocked()
            assert len(anyio.get_running_tasks()) == 3
            a.drop([keys[-1], 99])

    anyio.run(main)


def test_owners_that_are_not_dialled_have_a_way_of_their_own(fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch) -> None:
    class Store:
        def __init__(self, owner: Owner) -> None:
            self.owner = owner

        def fetch(self, wanted: Sequence[Wanted], done: Callable[[Mapping[str, str]], object]) -> None:
            done({one.rollout_id: f"spilled {one.key}" for one in wanted})

        def close(self) -> None: ...

    monkeypatch.setitem(payloads.SOURCES, "ray", Store)
    owner = Owner("ray://actor", b"", "the store")
    assert fetched(fetcher, carried([LOCAL[0], remote(LOCAL[1], owner, 7)])) == {"r1": "spilled 7"}


@pytest.fixture
def controller() -> Iterator[Service]:
    """A port whose calls are answered by whoever a test says."""
    service = Service(lambda arrived: Listener("127.0.0.1", 0, b"", arrived))
    yield service
    service.io.do(service.close)


def refuse(*_: object) -> object:
    raise DuplicateRolloutError("again")


@pytest.mark.parametrize("answer", [lambda *_: None, refuse])
def test_what_is_put_without_waiting_is_kept_as_long_as_somebody_may_fetch_it(
    controller: Service, answer: Callable[..., object]
) -> None:
    controller.answer_here({"put": answer})
    with sb.connect(controller.address, hand_over="direct") as producer:
        if answer is refuse:
            with pytest.raises(DuplicateRolloutError):
                producer.put_nowait(LOCAL[0])
            producer.released(timeout_s=GUARD_S)
        else:
            producer.put_nowait(LOCAL[0])
            with pytest.raises(TimeoutError):
                producer.released(timeout_s=0.0)
            producer.close()


def test_what_is_on_its_way_is_kept_when_its_connection_is_lost(controller: Service) -> None:
    tries: list[Peer] = []

    def put(peer: Peer, asked: Asked) -> object:
        tries.append(peer)
        if len(tries) == 1:
            peer.abort()
        return None

    controller.answer_here({"put": put, "drop": lambda *_: None})
    with sb.connect(controller.address, hand_over="direct", rejoin=True) as producer:
        producer.put_nowait(LOCAL[0])
        assert len(tries) == 2
        with pytest.raises(TimeoutError):
            producer.released(timeout_s=0.0)
        producer.close()


def test_where_payloads_cannot_be_kept_puts_say_so(controller: Service) -> None:
    controller.answer_here({})
    with sb.connect(controller.address, hand_over="direct", host="192.0.2.1") as producer:  # no machine has it
        for _ in range(2):
            with pytest.raises(
                sb.errors.ConfigError, match=r"payloads cannot be kept here.*Give connect\(host=\) an address"
            ):
                producer.put(LOCAL[0], timeout_s=GUARD_S)
