"""Records and what they add up to: bytes there and back, damage noticed, nothing removed comes back."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stream_balancer as sb
from stream_balancer.controller.journal import records
from stream_balancer.controller.journal.contents import Contents, Place
from stream_balancer.controller.journal.records import (
    Dispatched,
    Done,
    Evicted,
    Plan,
    Put,
    Retracted,
    Returned,
    State,
    Versioned,
)
from stream_balancer.core.machine import BalancerCore
from stream_balancer.testing import make_rollout, make_rollouts

PLAN = Plan(3, "window", [[["a"], ["b", "c"]], [["d"], ["p"]]], ["p"], [1.0, 2.0], 1.5, ["g"])
HEADS: list[records.Head] = [
    Put(7, ["a", "b"], 12.5, 3),
    Retracted(7),
    Dispatched(PLAN, {"accepted": 4, "batches": {"window": 1}}, {"g": 2}),
    Done(3, ["a"]),
    Evicted("stale", ["a"], {}),
    Returned(3),
    Versioned(9),
    State(1, 2, None, [PLAN], ["x"], {}, {}, 4, {"stale": 1}),
]


def joined(salt: int, head: records.Head, payload: list[memoryview | bytes] | None = None) -> bytes:
    return b"".join(records.pack(salt, head, payload or []))


def test_every_kind_of_record_has_an_example() -> None:
    assert {type(head) for head in HEADS} == set(get_args(records.Head))


@pytest.mark.parametrize("head", HEADS, ids=lambda head: type(head).__name__)
def test_records_come_back(head: records.Head) -> None:
    data = b"before" + joined(5, head) + b"after"
    found = records.read(5, memoryview(data), 6)
    assert found is not None
    assert found.head == head
    assert found.size == len(data) - 11
    assert bytes(found.payload) == b""
    assert records.read(6, memoryview(data), 6) is None  # another segment's


def test_rollouts_come_back() -> None:
    given = [make_rollout(n, group_id="g", version=(2, 3), cost=4.5, seed=n) for n in (1, 5, 3)]
    data = joined(0, Put(0, [r.rollout_id for r in given], 0.0, 0), records.payload_of(given))
    found = records.read(0, memoryview(data), 0)
    assert found is not None
    for before, after in zip(given, records.rollouts_of(found.payload).values(), strict=True):
        assert isinstance(after, sb.Rollout)
        assert repr(before) == repr(after)
        assert (before.scalars, before.cost) == (after.scalars, after.cost)
        for name, column in before.tokens.items():
            assert torch.equal(column, after.tokens[name])
            assert column.dtype == after.tokens[name].dtype


def test_a_changed_byte_is_noticed_wherever_it_is() -> None:
    rollouts = list(make_rollouts([3]))
    data = bytearray(joined(1, Put(0, ["r0"], 0.0, 0), records.payload_of(rollouts)))
    for at in range(len(data)):
        data[at] ^= 0x40
        assert records.read(1, memoryview(bytes(data)), 0) is None, at
        data[at] ^= 0x40
    assert records.read(1, memoryview(bytes(data)), 0) is not None


def test_a_record_cut_anywhere_is_noticed() -> None:
    data = joined(1, HEADS[0])
    assert all(records.read(1, memoryview(data[:size]), 0) is None for size in range(len(data)))


def test_a_put_without_rollouts_is_refused() -> None:
    with pytest.raises(sb.WireError, match="holds no rollouts"):
        records.rollouts_of(memoryview(bytes(128)))


def test_plans_come_back_with_their_padding_copies() -> None:
    config = sb.BalancerConfig(dp_size=4, batch_size=4)
    core = BalancerCore(config)
    rollouts = {r.rollout_id: r for r in make_rollouts([9, 4])}
    for rollout in rollouts.values():
        core.add(rollout, 0.0)
    core.end()
    batch = core.poll(0.0)
    assert batch is not None
    assert batch.num_padding == 2
    again = records.batch_of(records.plan_of(batch), rollouts)
    assert repr(again) == repr(batch)
    assert (again.loads, again.lower_bound, again.num_padding) == (batch.loads, batch.lower_bound, batch.num_padding)
    for before, after in zip(batch.ranks, again.ranks, strict=True):
        assert repr(before) == repr(after)
        assert before.global_num_loss_tokens == after.global_num_loss_tokens
        assert [repr(r) for r in before.rollouts] == [repr(r) for r in after.rollouts]


# -- what records add up to --------------------------------------------------------------------------------------------


class Writer:
    """Applies records, and keeps what a disk would: segments, the first of which are dropped when not needed."""

    def __init__(self) -> None:
        self.contents = Contents(4)
        self.segments: dict[int, list[tuple[records.Head, Place]]] = {0: []}

    def say(self, head: records.Head) -> None:
        number = max(self.segments)
        place = Place(number, len(self.segments[number]), 1)
        self.segments[number].append((head, place))
        self.contents.apply(head, place)

    def rotate(self) -> None:
        self.segments[max(self.segments) + 1] = []
        self.say(self.contents.state())

    def copy_first(self) -> None:
        for held in self.contents.held_in(min(self.segments)):
            put = held.put
            self.say(Put(put.number, [name for name in put.ids if name in held.alive], put.arrived_at, put.step))

    def reclaim(self) -> None:
        while len(self.segments) > 2 and not self.contents.needs(min(self.segments)):
            del self.segments[min(self.segments)]

    def recovered(self, without: tuple[int, int] | None = None) -> Contents:
        contents = Contents(4)
        for number, said in self.segments.items():
            for index, (head, place) in enumerate(said):
                if (number, index) != without:
                    contents.apply(head, place)
        return contents


def alive(contents: Contents) -> dict[int, set[str]]:
    return {number: held.alive for number, held in contents.puts.items()}


ACTIONS = st.lists(
    st.sampled_from(["put", "group", "twice", "retract", "plan", "done", "evict", "void", "rotate", "copy", "reclaim"]),
    max_size=60,
)


@given(ACTIONS, st.randoms(use_true_random=False))
def test_what_is_recovered_is_what_was_there(actions: list[str], chance: object) -> None:
    """Against a model that knows nothing of segments; in the middle of everything the fold gives the same."""
    assert hasattr(chance, "choice")
    writer = Writer()
    waiting: dict[str, int] = {}
    flying: dict[int, list[str]] = {}
    steps = puts = 0
    for action in actions:
        if action in ("put", "group"):
            ids = [f"{puts}.{k}" for k in range(1 if action == "put" else 3)]
            writer.say(Put(puts, ids, 0.0, steps))
            waiting |= dict.fromkeys(ids, puts)
            puts += 1
        elif action == "twice" and waiting:  # a second put of one id, which is refused
            writer.say(Put(puts, [chance.choice(list(waiting))], 0.0, steps))
            writer.say(Retracted(puts))
            puts += 1
        elif action == "retract" and waiting:
            number = waiting[chance.choice(list(waiting))]
            if sum(n == number for n in waiting.values()) == len(writer.contents.puts[number].put.ids):
                writer.say(Retracted(number))
                waiting = {name: n for name, n in waiting.items() if n != number}
        elif action == "plan" and waiting:
            flying[steps] = ids = chance.sample(list(waiting), 1 + len(waiting) // 2)
            writer.say(Dispatched(Plan(steps, "window", [[ids]], [], [1.0], 1.0, []), {}, {}))
            for name in ids:
                del waiting[name]
            steps += 1
        elif action == "done" and flying:
            step = chance.choice(list(flying))
            writer.say(Done(step, flying.pop(step)))
        elif action == "void" and flying:
            step = chance.choice(list(flying))
            writer.say(Returned(step))
            waiting |= {name: int(name.split(".")[0]) for name in flying.pop(step)}
        elif action == "evict" and waiting:
            name = chance.choice(list(waiting))
            writer.say(Evicted("stale", [name], {}))
            del waiting[name]
        elif action == "rotate":
            writer.rotate()
        elif action == "copy":
            writer.copy_first()
        elif action == "reclaim":
            writer.reclaim()
        recovered = writer.recovered()
        names = [name for held in recovered.puts.values() for name in held.alive]
        assert sorted(names) == sorted([*waiting, *(name for ids in flying.values() for name in ids)])
        assert {step: plan.ids for step, plan in recovered.plans.items()} == flying
        assert (recovered.next_step, recovered.next_put) == (steps, puts)
        assert alive(recovered) == alive(writer.contents)
        assert recovered.live_bytes == writer.contents.live_bytes == len(recovered.puts)
        assert recovered.past_ids == writer.contents.past_ids
        assert (recovered.acknowledged, recovered.evicted) == (writer.contents.acknowledged, writer.contents.evicted)
        newest = max(writer.segments)
        if newest > min(writer.segments):  # the state at the start of the last segment is damaged: it can be spared
            spared = writer.recovered(without=(newest, 0))
            assert alive(spared) == alive(recovered)
            assert (spared.plans, spared.past_ids, spared.next_step) == (
                recovered.plans, recovered.past_ids, recovered.next_step
            )  # fmt: skip


def test_a_second_put_of_an_id_does_not_take_the_first_with_it() -> None:
    contents = Contents(4)
    contents.apply(Put(0, ["a"], 0.0, 0), Place(0, 0, 1))
    contents.apply(Put(1, ["a"], 0.0, 0), Place(0, 1, 1))
    contents.apply(Retracted(0), Place(0, 2, 1))
    snapshot, _ = contents.snapshot({"a": make_rollout(3, "a")}, 0.0)
    assert [r.rollout_id for r in snapshot.waiting] == ["a"]


def test_a_plan_whose_rollout_is_lost_is_not_kept() -> None:
    contents = Contents(4)
    contents.apply(Put(0, ["a"], 0.0, 0), Place(0, 0, 1))
    contents.apply(Put(1, ["b"], 0.0, 0), Place(0, 1, 1))
    contents.apply(Dispatched(Plan(0, "window", [[["a"], ["lost"]]], [], [1.0], 1.0, []), {}, {}), Place(0, 2, 1))
    snapshot, broken = contents.snapshot({name: make_rollout(3, name) for name in "ab"}, 0.0)
    assert [r.rollout_id for r in snapshot.waiting] == ["a", "b"]
    assert [plan.step for plan in broken] == [0]
    assert snapshot.next_step == 1


def test_ages_survive() -> None:
    contents = Contents(4)
    for number, (arrived_at, step) in enumerate([(10.0, 0), (9.0, 2), (12.0, 3)]):  # a wall clock may step back
        contents.apply(Put(number, [str(number)], arrived_at, step), Place(0, number, 1))
    snapshot, _ = contents.snapshot({str(n): make_rollout(3, str(n)) for n in range(3)}, 11.0)
    assert snapshot.waited_s.tolist() == [1.0, 1.0, 0.0]
    assert snapshot.skips.tolist() == [3, 1, 0]
