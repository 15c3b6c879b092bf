"""Payloads that stay with their producer, read into their places in a batch: over a socket, or in one process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

import pytest
import torch
from guard import GUARD_S

import stream_balancer as sb
from stream_balancer.errors import ClosedResourceError, WireError
from stream_balancer.testing import make_rollout
from stream_balancer.transport.sockets import payloads
from stream_balancer.transport.sockets.channel import SocketChannel
from stream_balancer.transport.sockets.hub import Hub
from stream_balancer.transport.sockets.payloads import Fetcher, PayloadServer, _OwnerSession
from stream_balancer.types.shared import part_of
from stream_balancer.wire.messages import Owner, WantPayloads
from stream_balancer.wire.partial_batch import WantedPayload, payload
from stream_balancer.wire.slices import Slice

ROLLOUTS = {key: make_rollout(5 + key, f"r{key}", seed=key) for key in range(4)}


@pytest.fixture(params=["one process", "a socket"])
def owner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[PayloadServer, Owner]]:
    """A producer that keeps four payloads, and where."""
    server = PayloadServer()
    if request.param == "a socket":
        monkeypatch.setattr(payloads, "_HERE", {})
    where = server.listen("127.0.0.1", "the owner")

    def serve() -> bool:
        server.serve(hub)
        return True

    hub = Hub("sb-owner", serve)
    hub.start()
    for key, rollout in ROLLOUTS.items():
        server.keep(key, rollout)
    yield server, where
    hub.close()


def places(key: int, *, spare: int = 0) -> list[torch.Tensor]:
    """Where a payload belongs, piece by piece."""
    return [torch.zeros(piece.numel() + spare, dtype=torch.uint8) for piece in payload(ROLLOUTS[key])]


def wanted(owner: Owner, keys: Iterable[int], targets: Sequence[Sequence[torch.Tensor]]) -> list[WantedPayload]:
    return [WantedPayload(key, owner, key, pieces) for key, pieces in zip(keys, targets, strict=True)]


def test_payloads_are_read_into_their_places_and_missing_ones_are_named(owner: tuple[PayloadServer, Owner]) -> None:
    server, where = owner
    fetcher, targets = Fetcher(), [places(key) for key in range(4)]
    for _ in range(2):
        assert fetcher.read(wanted(where, range(4), targets)) == {}
        for key, pieces in enumerate(targets):
            assert all(a.equal(b) for a, b in zip(pieces, payload(ROLLOUTS[key]), strict=True))
    server.drop([1, 3])
    targets = [places(key) for key in range(4)]
    gone = fetcher.read(wanted(where, range(4), targets))
    assert gone == {1: "it does not have payload 1", 3: "it does not have payload 3"}
    assert all(a.equal(b) for a, b in zip(targets[2], payload(ROLLOUTS[2]), strict=True))
    assert not any(piece.any() for piece in targets[1])
    fetcher.close()


def test_a_part_is_cut_by_who_keeps_the_whole(owner: tuple[PayloadServer, Owner]) -> None:
    """Between whole ones, and one that is gone."""
    server, where = owner
    server.drop([2])
    parts = {1: part_of(ROLLOUTS[1], 4, 1), 3: part_of(ROLLOUTS[3], 2, 0)}
    expected = [payload(parts.get(key, ROLLOUTS[key])) for key in range(4)]
    asked = [
        WantedPayload(
            *(key, where, key, [torch.zeros_like(piece) for piece in pieces]),
            part=Slice(part.cp_degree, part.cp_rank, part.whole_tokens) if (part := parts.get(key)) else None,
        )
        for key, pieces in enumerate(expected)
    ]
    fetcher = Fetcher()
    assert fetcher.read(asked) == {2: "it does not have payload 2"}
    for key in (0, 1, 3):
        assert [piece.tolist() for piece in asked[key].pieces] == [piece.tolist() for piece in expected[key]]
    fetcher.close()


@pytest.mark.parametrize("parts", [((0, 0),), ((2, 2),), ((2, 0), (2, 1))])
def test_impossible_parts_are_refused(parts: tuple[tuple[int, int], ...]) -> None:
    session = _OwnerSession(PayloadServer(), cast("SocketChannel", None))
    with pytest.raises(WireError, match="parts of payloads that there cannot be"):
        session.receive(WantPayloads(0, (7,), parts), [], ())


def test_other_sizes_than_were_described_are_refused(owner: tuple[PayloadServer, Owner]) -> None:
    fetcher = Fetcher()
    with pytest.raises(WireError, match=r"other sizes|another size"):
        fetcher.read(wanted(owner[1], [0], [places(0, spare=8)]))
    assert fetcher.read(wanted(owner[1], [0], [places(0)])) == {}, "the next one is asked for over a new connection"
    fetcher.close()


def test_an_owner_that_is_gone_has_nothing() -> None:
    fetcher = Fetcher()
    gone = fetcher.read(wanted(Owner("127.0.0.1", 1, "a token of nobody", "it"), [4, 7], [places(0), places(1)]))
    assert sorted(gone) == [0, 1]
    assert "refused" in gone[0]
    fetcher.close()


@pytest.mark.parametrize("owner", ["a socket"], indirect=True)
def test_who_waits_for_an_owner_that_does_not_answer_is_woken_by_close(
    owner: tuple[PayloadServer, Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, where = owner
    asked, answers = threading.Event(), threading.Event()

    def stuck(*_: int) -> None:
        asked.set()
        answers.wait(GUARD_S)

    monkeypatch.setattr(server, "get", stuck)
    fetcher, errors = Fetcher(), list[Exception]()

    def read() -> None:
        try:
            fetcher.read(wanted(where, [0], [places(0)]))
        except ClosedResourceError as error:
            errors.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert asked.wait(GUARD_S)
    fetcher.close()
    thread.join(GUARD_S)
    answers.set()
    assert len(errors) == 1


@pytest.mark.parametrize("owner", ["a socket"], indirect=True)
def test_the_number_of_a_socket_that_is_read_is_not_given_to_another_file(
    owner: tuple[PayloadServer, Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """close() comes from another thread, perhaps just before a read: that must not read from another file."""
    about_to_read, go_on = threading.Event(), threading.Event()
    numbers: list[int] = []

    def stopped(_: object, sock: socket.socket) -> bool:
        numbers.append(sock.fileno())
        about_to_read.set()
        go_on.wait(GUARD_S)
        raise ConnectionResetError

    monkeypatch.setattr(payloads._Reader, "read", stopped)
    fetcher = Fetcher()

    def read() -> None:
        with pytest.raises(ClosedResourceError):
            fetcher.read(wanted(owner[1], [0], [places(0)]))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert about_to_read.wait(GUARD_S)
    fetcher.close()
    with socket.socket() as other:
        assert other.fileno() != numbers[0]
    go_on.set()
    thread.join(GUARD_S)
    with socket.socket() as other:
        assert other.fileno() <= numbers[0], "it was closed after all"


Servers = Callable[[Sequence[sb.Rollout]], tuple[list[PayloadServer], list[WantedPayload]]]


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    """Owners with one rollout each, and what a rank wants of them."""
    hubs: list[Hub] = []

    def start(rollouts: Sequence[sb.Rollout]) -> tuple[list[PayloadServer], list[WantedPayload]]:
        made, want = [PayloadServer() for _ in rollouts], []
        monkeypatch.setattr(payloads, "_HERE", {})  # else they are found in this process, without a socket
        for key, (server, rollout) in enumerate(zip(made, rollouts, strict=True)):
            server.keep(key, rollout)
            where = server.listen("127.0.0.1", f"owner {key}")
            pieces = [torch.zeros(piece.numel(), dtype=torch.uint8) for piece in payload(rollout)]
            want.append(WantedPayload(key, where, key, pieces))
            hubs.append(Hub("sb-owner", lambda: True))
            hubs[-1].start()
            hubs[-1].do(lambda server=server, hub=hubs[-1]: server.serve(hub))  # type: ignore[misc]
        return made, want

    yield start
    for hub in hubs:
        hub.close()


def test_all_owners_are_asked_before_the_first_answer_is_read(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a batch waits for the slowest of them, not for one after the other."""
    asked = threading.Barrier(3)
    rollouts = [ROLLOUTS[key] for key in range(3)]
    owners, want = servers(rollouts)
    for server in owners:

        def get(*key: int, get: Callable[..., object] = server.get) -> object:
            asked.wait(GUARD_S)
            return get(*key)

        monkeypatch.setattr(server, "get", get)
    fetcher = Fetcher()
    assert fetcher.read(want) == {}
    for one, rollout in zip(want, rollouts, strict=True):
        assert all(a.equal(b) for a, b in zip(one.pieces, payload(rollout), strict=True))
    fetcher.close()


def test_an_answer_is_read_while_another_owner_has_not_begun_to_answer(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket holds a few megabytes: its owner would wait for the end of the others before it."""
    large = sb.Rollout(tokens={"input_ids": torch.ones(3 * 2**20, dtype=torch.int64)}, rollout_id="large")
    [slow, _], want = servers([ROLLOUTS[0], large])
    get, [last] = slow.get, [piece[-8:] for piece in want[1].pieces]
    was_read: list[bool] = []

    def wait_for_the_other(*key: int) -> object:
        deadline = time.monotonic() + GUARD_S
        while not last.any() and time.monotonic() < deadline:
            time.sleep(0.001)
        was_read.append(bool(last.any()))
        return get(*key)

    monkeypatch.setattr(slow, "get", wait_for_the_other)
    fetcher = Fetcher()
    assert fetcher.read(want) == {}
    assert was_read == [True]
    fetcher.close()
