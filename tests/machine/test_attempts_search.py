"""The search over all states comes to its end without a broken promise, and each state still reaches the end."""

from __future__ import annotations

import random
from typing import Any

import pytest
from attempts_search import Search, explore, normal
from attempts_small import Small

from stream_balancer.steps.state import Meets

BARRIER, TRAINER, OWN = Meets.BARRIER, Meets.TRAINER, Meets.OWN


def soak(meets: Meets, faults: int, **options: Any) -> Any:
    return pytest.param(meets, faults, options, marks=[pytest.mark.soak, pytest.mark.timeout(3000)])


@pytest.mark.parametrize(
    ("meets", "faults", "options"),
    [
        *((meets, 0, {}) for meets in Meets),
        (OWN, 1, {}),
        (BARRIER, 0, {"auto_ack": True}),
        soak(BARRIER, 1),
        soak(TRAINER, 1),
        soak(BARRIER, 1, auto_ack=True),
        soak(TRAINER, 1, auto_ack=True),
        soak(OWN, 1, auto_ack=True),
        soak(BARRIER, 1, remote=True),
        *(soak(meets, 0, num_steps=2) for meets in Meets),
        soak(BARRIER, 1, num_steps=2),
    ],
)
def test_no_state_breaks_a_promise(meets: Meets, faults: int, options: dict[str, Any]) -> None:
    found = explore(meets, faults=faults, **options)
    assert found.is_whole
    assert found.violations == []


@pytest.mark.parametrize("meets", Meets)
def test_mirror_images_behave_equally(meets: Meets) -> None:
    """The reduction by symmetry: events of a state and of its mirror image lead to the same normal forms."""
    chosen = random.Random(0)
    world_type = type("World", (Small,), {"meets": meets})
    for _ in range(8):
        world = world_type()
        for _ in range(40):
            forms = [world.form(), world.form(flip=True)]
            after: list[set[bytes]] = [set(), set()]
            nexts = []
            for one, found in zip(forms, after, strict=True):
                first = world_type.of(one)
                assert first.form() == one, "the world of a normal form has another normal form"
                for name, _, arguments in [*first.events(), *first.faults()]:
                    new = world_type.of(one)
                    if new.happen(name, arguments):
                        found.add(normal(new))
                        nexts.append(new)
            assert after[0] == after[1]
            if world.is_end() or not nexts:
                break
            world = chosen.choice(nexts)


@pytest.mark.parametrize("rule", ["_send_work", "_send_commits", "_release"])
def test_without_a_rule_the_end_is_out_of_reach(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    monkeypatch.setattr(f"stream_balancer.steps.advance.{rule}", lambda *args, **options: None)
    assert "the end cannot be reached" in Search(Meets.BARRIER, 0).run().violations[0][0]
