"""Payloads that stay with their producer, read into their places in a batch: over a socket, or in one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from stream_balancer.errors import ClosedResourceError, WireError
from stream_balancer.testing import make_rollout
from stream_balancer.transport.sockets import payloads
from stream_balancer.transport.sockets.hub import Hub
from stream_balancer.transport.sockets.payloads import Fetcher, PayloadServer
from stream_balancer.wire.messages import Owner
from stream_balancer.wire.partial_share import payload

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


def test_payloads_are_read_into_their_places_and_missing_ones_are_named(owner: tuple[PayloadServer, Owner]) -> None:
    server, where = owner
    fetcher, targets = Fetcher(), [places(key) for key in range(4)]
    for _ in range(2):
        assert fetcher.read(where, range(4), targets) == {}
        for key, pieces in enumerate(targets):
            assert all(a.equal(b) for a, b in zip(pieces, payload(ROLLOUTS[key]), strict=True))
    server.drop([1, 3])
    targets = [places(key) for key in range(4)]
    gone = fetcher.read(where, range(4), targets)
    assert gone == {1: "it does not have payload 1", 3: "it does not have payload 3"}
    assert all(a.equal(b) for a, b in zip(targets[2], payload(ROLLOUTS[2]), strict=True))
    assert not any(piece.any() for piece in targets[1])
    fetcher.close()


def test_other_sizes_than_were_described_are_refused(owner: tuple[PayloadServer, Owner]) -> None:
    fetcher = Fetcher()
    with pytest.raises(WireError, match=r"other sizes|another size"):
        fetcher.read(owner[1], [0], [places(0, spare=8)])
    assert fetcher.read(owner[1], [0], [places(0)]) == {}, "the next one is asked for over a new connection"
    fetcher.close()


def test_an_owner_that_is_gone_has_nothing() -> None:
    fetcher = Fetcher()
    gone = fetcher.read(Owner("127.0.0.1", 1, "a token of nobody", "it"), [4, 7], [places(0), places(1)])
    assert sorted(gone) == [0, 1]
    assert "refused" in gone[0]
    fetcher.close()


@pytest.mark.parametrize("owner", ["a socket"], indirect=True)
def test_who_waits_for_an_owner_that_does_not_answer_is_woken_by_close(
    owner: tuple[PayloadServer, Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, where = owner
    asked, answers = threading.Event(), threading.Event()

    def stuck(key: int) -> None:
        asked.set()
        answers.wait(20)

    monkeypatch.setattr(server, "get", stuck)
    fetcher, errors = Fetcher(), list[Exception]()

    def read() -> None:
        try:
            fetcher.read(where, [0], [places(0)])
        except ClosedResourceError as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert asked.wait(20)
    fetcher.close()
    thread.join(20)
    answers.set()
    assert len(errors) == 1
