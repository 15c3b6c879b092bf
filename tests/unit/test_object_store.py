"""A producer's payloads in Ray's object store, on a stand-in for Ray: when its keeper is told of them."""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import Any

import pytest
from guard import GUARD_S

from stream_balancer.client.object_store import InStore
from stream_balancer.testing import make_rollout


class Keeper:
    """What is called on the actor, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.told = threading.Event()
        self.keep, self.drop = self._method("keep"), self._method("drop")

    def _method(self, name: str) -> Any:
        def remote(_: str, numbers: Any) -> None:
            self.calls.append((name, list(numbers)))
            self.told.set()

        return type("Method", (), {"remote": staticmethod(remote)})


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Keeper:
    ray = ModuleType("ray")
    ray.put = lambda it: it  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    return Keeper()


def test_references_of_several_puts_travel_together_and_none_is_forgotten(keeper: Keeper) -> None:
    store = InStore(keeper, "keeper", "label")
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


def test_what_is_dropped_before_the_keeper_was_told_is_not_held_for_ever(keeper: Keeper) -> None:
    store = InStore(keeper, "keeper", "label")
    handles = store.keep([make_rollout(4, "r"), make_rollout(4, "s")])
    store.drop([handle.key for handle in handles])
    assert keeper.calls == [("keep", [0]), ("drop", [0])]
