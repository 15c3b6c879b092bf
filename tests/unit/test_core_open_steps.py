"""Open steps in the core: whatever the order of calls, each rollout is in one step, and rows add up to it."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import numpy as np
import pytest
from cores import learning_core
from hypothesis import example, given
from hypothesis import strategies as st
from invariants import verify

import stream_balancer as sb
from stream_balancer.core.groups import GroupSize
from stream_balancer.core.in_flight import StepTiming
from stream_balancer.core.machine import BalancerCore
from stream_balancer.errors import WouldBlock
from stream_balancer.rollouts import Batch

CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(1, 50)),
        st.tuples(st.sampled_from(["row", "row", "wait", "again", "acknowledge", "nack"]), st.just(0)),
    ),
    max_size=60,
)
KNOBS = [
    {"dp_size": 2, "batch_size": 5, "window": 5},
    {"dp_size": 3, "batch_size": 12, "window": 12, "deadline_s": 10.0, "micro_batches": {"max_tokens": 60}},
    {
        "dp_size": 2,
        "batch_size": 8,
        "window": 8,
        "groups": {"size": 2},
        "micro_batches": {"multiple_of": 2},
    },
    {
        "dp_size": 2,
        "batch_size": 6,
        "window": 6,
        "policy": "fifo",
        "micro_batches": {"equal_number": False},
        "equal_rollouts": True,
    },
    {"dp_size": 2, "batch_size": 6, "window": 6, "sync": "micro_batch"},
]


class Trainer:
    """Takes rows, and holds what a step's last row says against what came of the step."""

    def __init__(self, core: BalancerCore) -> None:
        self.core = core
        self.now = 0.0
        self.rows: list[Batch] = []  # of the step that is under way
        self.trained: Counter[str] = Counter()
        self.in_flight: dict[int, Batch] = {}

    def take(self) -> bool:
        expected = self.core.next_wakeup() <= self.now
        row = self.core.poll(self.now)
        verify(self.core)
        assert (row is not None) == expected
        if row is None:
            return False
        config = self.core.config
        for one in row.ranks:
            assert one.is_last == row.is_last
            assert all(mb.rollouts for mb in one.micro_batches)
            assert len(one.micro_batches) % config.micro_batches.multiple_of == 0
            if config.micro_batches.equal_number:
                assert len(one.micro_batches) == len(row.ranks[0].micro_batches)
        if not self.rows and row.step in self.in_flight:  # given again: as a whole
            assert row is self.in_flight.pop(row.step)
            self.in_flight[row.step] = row
            return True
        self.rows.append(row)
        assert {one.step for one in self.rows} == {row.step}
        if row.is_last:
            self._check_step(row)
        else:
            assert row.num_rollouts >= config.dp_size
            assert not self.core.in_flight.get(row.step)
        return True

    def _check_step(self, last: Batch) -> None:
        its = [r for row in self.rows for r in row.rollouts if not r.is_padding]
        (whole,) = [batch for batch in self.core.in_flight.delivered() if batch.step == last.step]
        assert sorted(r.rollout_id for r in its) == sorted(r.rollout_id for r in whole.rollouts if not r.is_padding)
        assert len({r.rollout_id for r in its}) == len(its) == whole.num_rollouts == last.ranks[1].global_num_rollouts
        assert sum(r.num_tokens for r in its) == last.ranks[0].global_num_tokens == whole.num_tokens
        assert len(its) == self.core.config.batch_size or last.reason in ("drain", "deadline")
        names = [r.rollout_id for r in whole.rollouts]
        assert len(set(names)) == len(names), "padding copies have ids of their own"
        for rank, one in enumerate(whole.ranks):
            assert one.micro_batches == tuple(mb for row in self.rows for mb in row.ranks[rank].micro_batches)
        assert np.allclose(whole.loads, np.sum([row.loads for row in self.rows], axis=0))
        assert whole.finish >= whole.lower_bound * (1 - 1e-9)
        self.in_flight[whole.step], self.rows = whole, []

    def acknowledge(self) -> None:
        for step in list(self.in_flight):
            if self.core.in_flight.get(step) is not None:
                batch = self.core.acknowledge(step)
                self.trained.update(r.rollout_id for r in batch.rollouts if not r.is_padding)
        self.in_flight.clear()


@example(KNOBS[2], [("put", 1), ("put", 1), ("put", 1), ("put", 3), ("row", 0)])  # padding copies in both rows
@given(st.sampled_from(KNOBS), CALLS)
def test_rows_add_up_to_steps_and_every_rollout_is_in_one(
    knobs: dict[str, object], calls: list[tuple[str, int]]
) -> None:
    core = BalancerCore(sb.BalancerConfig(cost=sb.cost.QuadraticCost(), **knobs))
    core.open_steps(True)
    trainer, put, of_group = Trainer(core), 0, "groups" in knobs
    for call, value in calls:
        match call:
            case "put":
                group = f"g{put // 2}" if of_group else None
                rollout = sb.Rollout(tokens={"input_ids": [0] * value}, rollout_id=f"{put}", group_id=group)
                with suppress(WouldBlock):
                    core.add(rollout, trainer.now)
                    put += 1
            case "row":
                trainer.take()
            case "wait":
                trainer.now += 4.0
            case "again":
                core.open_steps(True)
                trainer.rows = []
            case "acknowledge":
                trainer.acknowledge()
            case "nack":
                for batch in core.in_flight.delivered()[:1]:
                    core.nack(batch.step)
        verify(core)
    core.end()
    while trainer.take():
        pass
    assert core.finished
    trainer.acknowledge()
    assert trainer.trained == Counter(str(number) for number in range(put))


def test_what_is_waited_for_rows_is_waited_for_rollouts() -> None:
    core = learning_core(sb.BalancerConfig(dp_size=2, batch_size=4, window=4))
    core.open_steps(True)
    for number in range(4):
        core.add(sb.Rollout(tokens={"input_ids": [0]}, rollout_id=f"{number}"), 5.0 if number < 2 else 9.0)
        if number == 1:
            assert core.poll(5.0, asked_at=0.0) is not None
    assert core.poll(9.0, asked_at=7.0) is not None
    for rank in range(2):
        core.record_step(StepTiming(0, rank, 1.0, own=True, waited_s=7.0, ready_s=0.0), 10.0)
    idle = core.statistics(10.0).idle_seconds
    assert idle["transport"] == 0.0
    assert idle["no_data"] + idle["window"] == 14.0


def opened(**knobs: object) -> BalancerCore:
    core = BalancerCore(
        sb.BalancerConfig(**{"dp_size": 2, "batch_size": 8, "window": 8, "groups": {"size": 2}, **knobs})
    )
    core.open_steps(True)
    return core


def test_a_group_that_no_step_has_room_for_leaves_in_parts() -> None:
    core = BalancerCore(sb.BalancerConfig(dp_size=2, batch_size=8, window=8, groups=sb.Groups(size=2)))
    core.open_steps(True)
    siblings = [sb.Rollout(tokens={"input_ids": [0]}, rollout_id=f"{n}", group_id="g") for n in range(6)]
    core.add_all(siblings, 0.0, GroupSize("g", 6))
    core.reconfigure(core.config.replace(batch_size=4, window=4))
    core.end()
    steps = [core.poll(0.0), core.poll(0.0)]
    assert [None if step is None else step.num_rollouts for step in steps] == [4, 2]
    assert core.finished


def test_an_execution_without_groups_is_refused_at_its_put() -> None:
    core = opened(groups=sb.Groups(size=None))
    one = sb.Rollout(tokens={"input_ids": [0]}, execution_id="e")
    with pytest.raises(sb.errors.RolloutError, match=r"execution_id needs groups\.size"):
        core.add(one, 0.0)
    core.open_steps(False)
    core.add(one, 0.0)
    with pytest.raises(sb.errors.ConfigError, match=r"execution_id needs groups\.size"):
        core.open_steps(True)
    assert core.statistics(0.0).waiting == 1
