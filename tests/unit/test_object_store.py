"""A producer's payloads in Ray's object store, on a stand-in for Ray: when its keeper is told of them."""

from __future__ import annotations

import asyncio
import sys
import threading
from types import ModuleType
from typing import Any

import pytest
from codec_help import carried, remote, rollout
from guard import GUARD_S
from scripted import same_rollout

from stream_balancer.client import object_store
from stream_balancer.client.object_store import InStore
from stream_balancer.client.payloads import SOURCES
from stream_balancer.rollouts import MicroBatch
from stream_balancer.testing import make_rollout


class Keeper:
    """What is called on the actor, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.told = threading.Event()
        self.boxes: dict[int, Any] = {}
        self.keep, self.drop, self.give = self._method("keep"), self._method("drop"), self._method("give")

    def _method(self, name: str) -> Any:
        def remote(_: str, numbers: Any) -> list[Any]:
            self.calls.append((name, list(numbers)))
            self.boxes |= numbers if name == "keep" else {}
            self.told.set()
            return [self.boxes.get(number) for number in numbers]

        return type("Method", (), {"remote": staticmethod(remote)})


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Keeper:
    ray, found = ModuleType("ray"), Keeper()
    ray.put = ray.get = lambda it: it  # type: ignore[attr-defined]
    ray.wait = lambda its, num_returns: (its, [])  # type: ignore[attr-defined]
    ray.get_actor = lambda name, namespace: found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    return found


def test_references_of_several_puts_travel_together_and_none_is_forgotten(keeper: Keeper) -> None:
    store = InStore(keeper, "keeper", None, "label")
    threads = [threading.Thread(target=store.keep, args=([make_rollout(4, f"r{n}")],)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while sum(len(numbers) for _, numbers in keeper.calls) < 8:
        assert keeper.told.wait(GUARD_S)
        keeper.told.clear()
    assert {name for name, _ in keeper.calls} == {"keep"}
    assert sorted(number for _, numbers in keeper.calls for number in numbers) == list(range(8))


def test_a_rank_that_asks_early_is_answered_once_the_payload_has_come(caplog: pytest.LogCaptureFixture) -> None:
    async def ask_early() -> list[Any]:
        keeper = object_store.Keeper()
        asked = asyncio.create_task(keeper.give("p", [1, 2]))
        for number in (1, 2):
            await asyncio.sleep(0)
            await keeper.keep("p", {number: [f"reference {number}"]})
        return await asked

    assert asyncio.run(ask_early()) == [["reference 1"], ["reference 2"]]
    assert not caplog.records, "it has not waited in vain"


def test_what_is_dropped_before_the_keeper_was_told_is_not_held_for_ever(keeper: Keeper) -> None:
    store = InStore(keeper, "keeper", None, "label")
    handles = store.keep([make_rollout(4, "r"), make_rollout(4, "s")])
    store.drop([handle.key for handle in handles])
    assert keeper.calls == [("keep", [0]), ("drop", [0])]


def test_an_object_stays_while_one_of_its_rollouts_is_needed(keeper: Keeper) -> None:
    store = InStore(keeper, "keeper", None, "label")
    first, second = [store.keep([make_rollout(4, f"{name}{n}") for n in range(2)]) for name in "ab"]
    for handle in (*first, *second):
        store.answered([handle.key], accepted=True)
    store.retain({first[1].key, second[0].key})
    assert keeper.calls == [("keep", [0, 1])]
    store.retain({second[0].key})
    assert keeper.calls[1:] == [("drop", [0])]
    store.close()
    assert keeper.calls[2:] == [("drop", [1])]
    assert not len(store)


def test_a_rank_gets_the_rollouts(keeper: Keeper) -> None:
    store = InStore(keeper, "space/keeper", None, "label")
    wholes = [rollout(3), rollout(4)]
    handles = store.keep(wholes)
    away = [remote(one, handle.owner, handle.key) for one, handle in zip(wholes, handles, strict=True)]
    got = carried(MicroBatch.of(away))
    fetched: list[object] = []
    done = threading.Event()
    store._tell()
    SOURCES["ray"](store.owner).fetch(got.holes(), lambda causes: (fetched.append(causes), done.set()))
    assert done.wait(GUARD_S)
    assert fetched == [{}]
    want = carried(MicroBatch.of(wholes))
    assert all(same_rollout(a, b) for a, b in zip(want.rollouts, got.rollouts, strict=True))
