"""A state machine over ``_core``: whatever the order of calls, nothing is lost, doubled or starved.

Tiny sizes, so that rare paths run: buffers that fill, groups that never complete, deadlines that meet windows.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from cores import Evictions, learning_core, saved
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from invariants import verify

import stream_balancer as sb
from stream_balancer.core.groups import GroupSize
from stream_balancer.core.in_flight import StepTiming

IDS = torch.zeros(64, dtype=torch.int64)
LENGTHS = st.integers(1, 64)
COSTS = [
    sb.cost.TokenCost(),
    sb.cost.QuadraticCost(),
    sb.cost.PaddedCost(),
    sb.cost.CalibratedCost(sb.cost.TokenCost(), half_life_steps=2),
    sb.cost.CalibratedCost(sb.cost.PaddedCost()),
]


@st.composite
def configs(draw: st.DrawFn) -> sb.BalancerConfig:
    """What makes most paths run comes first: of a hundred examples, most are made of first choices."""
    dp_size = draw(st.integers(1, 3))
    group_size = draw(st.sampled_from([2, None, 3]))
    unit = (group_size or 1) * dp_size
    batch_size = unit * draw(st.integers(1, 3))
    window = batch_size + draw(st.integers(0, 2)) * unit
    cap = draw(st.sampled_from([None, None, 40]))
    equal_rollouts = draw(st.booleans())
    sync = draw(st.sampled_from(["step", "step", "micro_batch"]))
    cuts = bool(group_size) and draw(st.booleans())
    return sb.BalancerConfig(
        dp_size=dp_size,
        batch_size=batch_size,
        window=window,
        capacity=window + draw(st.integers(0, 2)) * unit,
        max_bytes=draw(st.sampled_from([None, None, 8 * 100])),
        deadline_s=draw(st.sampled_from([None, 1.0, 5.0])),
        groups=sb.Groups(
            size=group_size,
            min_size=-(-(group_size or 0) // 2) if cuts else None,
            patience=draw(st.sampled_from([2.0, 0.0])) if cuts else 2.0,
        ),
        equal_rollouts=equal_rollouts,
        micro_batches=sb.MicroBatches(
            max_tokens=cap,
            oversize="alone",
            equal_number=sync == "micro_batch" or draw(st.booleans()),
            overhead_cost=draw(st.sampled_from([None, 0.0, 7.0, 1e4])),
            multiple_of=draw(st.sampled_from([1, 2])) if batch_size >= 2 * dp_size else 1,
        ),
        sync=sync,
        staleness=sb.Staleness(
            max_versions=draw(st.sampled_from([1, None, 0])), on_stale=draw(st.sampled_from(["evict", "send"]))
        ),
        cost=draw(st.sampled_from(COSTS)),
        policy="window",
    )


class CoreMachine(RuleBasedStateMachine):
    @initialize(
        config=configs(),
        version=st.sampled_from([1, None]),
        first=st.lists(st.integers(1, 64), min_size=6, max_size=12),  # else most runs end before anything happens
    )
    def start(self, config: sb.BalancerConfig, version: int | None, first: list[int]) -> None:
        self.core = learning_core(config)
        self.evictions = Evictions(self.core)
        self.now = 0.0
        self.names = itertools.count()
        self.accepted: dict[str, sb.Rollout] = {}
        self.dispatched: set[str] = set()
        self.evicted: set[str] = set()
        self.acknowledged: set[int] = set()
        self.through: set[int] = set()
        """Steps in flight that the trainer is through with."""
        self.missing: dict[int, set[str]] = {}
        """By step in flight: rollouts without a payload."""
        self.passed_over: dict[str, int] = {}
        self.step_tokens: list[int] = []
        self.ended = False
        self.version: int | None = None
        if version is not None:
            self.set_version(version)
        for number, length in enumerate(first):
            self.add(length, number % 4, number % 3)

    # -- what a caller may do ------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.ended)
    @rule(length=st.integers(1, 64), group=st.integers(0, 3), lag=st.integers(0, 2))
    def add(self, length: int, group: int, lag: int) -> None:
        rollout = self.rollout(length, group, lag)
        before = self.core.statistics(self.now)
        try:
            self.core.add(rollout, self.now)
        except sb.errors.WouldBlock:
            assert self.core.statistics(self.now) == before
            # A put is held back only while a batch can leave to make room for it, now or after those in flight.
            assert self.core.next_wakeup() == -math.inf or self.too_old_now()
            assert not self.groups_of(self.waiting()) & {rollout.group_id}, "its place is kept"
        except sb.errors.RolloutError:
            assert self.is_too_large(rollout) or rollout.nbytes > (self.core.config.max_bytes or math.inf)
            assert self.core.statistics(self.now) == before
        else:
            self.accepted[rollout.rollout_id] = rollout
            self.take_evicted()

    def is_too_large(self, rollout: sb.Rollout) -> bool:
        """No step could take its group."""
        siblings = sum(one.group_id == rollout.group_id for one in self.waiting())
        return rollout.group_id is not None and siblings + 1 > self.core.config.batch_size

    def rollout(self, length: int, group: int, lag: int) -> sb.Rollout:
        config = self.core.config
        grouped = config.groups.size is not None
        return sb.Rollout(
            tokens={"input_ids": IDS[:length]},
            rollout_id=str(next(self.names)),
            group_id=self.group_name(group) if grouped else None,
            version=None if self.version is None else max(self.version - lag, 0),
        )

    def group_name(self, group: int) -> str:
        """Of a group that is not closed: what was is refused, see :meth:`declare_group`."""
        name = f"g{group}"
        declared = self.core.buffer.groups.declared
        while (one := declared(name)) is not None and one.closed and one.size is not None:
            name += "'"
        return name

    @precondition(lambda self: not self.ended)
    @rule(lengths=st.lists(st.integers(1, 64), min_size=2, max_size=12), group=st.integers(0, 3))
    def add_some(self, lengths: list[int], group: int) -> None:
        for length in lengths:
            self.add(length, group, 0)

    @precondition(lambda self: not self.ended)
    @rule(lengths=st.lists(st.lists(LENGTHS, min_size=1, max_size=3), min_size=1, max_size=2), group=st.integers(1, 3))
    def add_executions(self, lengths: list[list[int]], group: int) -> None:
        """Each of several samples, in one put."""
        name, first = self.group_name(group), next(self.names)
        rollouts = [
            sb.Rollout(
                tokens={"input_ids": IDS[:length]},
                rollout_id=str(next(self.names)),
                group_id=name,
                execution_id=f"e{first}-{number}",
            )
            for number, its in enumerate(lengths)
            for length in its
        ]
        groups, before = self.core.buffer.groups, self.core.statistics(self.now)
        new = groups.get(name) is None
        arrived = 0 if new else groups.get(name).arrived
        try:
            self.core.add_all(rollouts, self.now)
        except (sb.errors.WouldBlock, sb.errors.RolloutError):
            assert self.core.statistics(self.now) == before
            return
        self.accepted |= {rollout.rollout_id: rollout for rollout in rollouts}
        self.take_evicted()
        if groups.size is not None and not groups.why_unwanted(name) and not new:
            assert groups.get(name).arrived == arrived + len(lengths)

    @rule(seconds=st.lists(st.sampled_from([0.0, 1e-6, 0.5, 1.0, 1e6]), min_size=3, max_size=3), own=st.booleans())
    def clocks_of_a_step(self, seconds: list[float], own: bool) -> None:
        for batch in self.core.in_flight.delivered()[:1]:
            for rank in range(len(batch.ranks)):
                self.core.record_step(StepTiming(batch.step, rank, seconds[rank], own=own), 0.0)

    @precondition(lambda self: bool(self.accepted))
    @rule(data=st.data())
    def add_again(self, data: st.DataObject) -> None:
        held = sorted(r.rollout_id for b in self.core.in_flight.delivered() for r in b.rollouts if not r.is_padding)
        if not held or self.ended:
            return
        again = sb.Rollout(tokens={"input_ids": IDS[:3]}, rollout_id=data.draw(st.sampled_from(held)))
        with pytest.raises(sb.errors.DuplicateRolloutError):
            self.core.add(again, self.now)

    @rule(seconds=st.sampled_from([0.0, 0.4, 1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def wait_until_wakeup(self) -> None:
        when = self.core.next_wakeup()
        if math.isfinite(when):
            self.now = max(self.now, when)
            self.poll()

    @rule()
    def poll(self) -> None:
        short = [*self.core.buffer.groups.incomplete()]
        if self.core.cut_stragglers(self.now):
            cut = [name for name in short if (self.core.buffer.groups.declared(name) or (0, 0, False))[2]]
            assert cut
            assert not self.core.buffer.groups.incomplete().keys() & cut
        config, before = self.core.config, self.core.statistics(self.now)
        ready, held_back = self.core.next_wakeup(), self.too_old_now()
        short = self.core.buffer.groups.incomplete().keys()
        self.check_order()
        batch = self.core.poll(self.now)
        if batch is None:
            assert self.core.next_wakeup() > self.now, "a failed poll must not ask to be repeated at once"
            assert self.core.statistics(self.now) == before
            assert not (self.ended and before.waiting) or self.too_old_now()
            return
        assert ready <= self.now
        self.check_batch(batch, before)
        self.step_tokens.append(batch.num_tokens)
        varies = np.std(self.step_tokens) / np.mean(self.step_tokens)
        assert self.core.statistics(self.now).token_variation == pytest.approx(varies, abs=1e-9)
        real = {r.rollout_id for r in batch.rollouts if not r.is_padding}
        assert len(real) == batch.num_rollouts
        assert not real & self.dispatched
        assert real <= self.accepted.keys()
        left = self.groups_of(self.accepted[name] for name in real)
        assert left & short <= {*batch.incomplete_groups}
        assert not left & self.groups_of(held_back), "siblings wait for one that is held back"
        assert not real & {rollout.rollout_id for rollout in held_back}
        self.dispatched |= real
        free = config.groups.size is None
        held_back = {rollout.rollout_id for rollout in self.too_old_now()}
        for name in self.accepted.keys() - self.dispatched - self.evicted - held_back if free else ():
            self.passed_over[name] = self.passed_over.get(name, 0) + 1
            assert self.passed_over[name] <= config.max_skips

    @precondition(lambda self: not self.ended)
    @rule(length=st.integers(1, 64))
    def come_late(self, length: int) -> None:
        """Of a group that has left without it, or is about to."""
        groups, before = self.core.buffer.groups, self.core.statistics(self.now)
        for name in [name for name, one in groups.declarations().items() if one.late][:1]:
            late = sb.Rollout(tokens={"input_ids": IDS[:length]}, rollout_id=str(next(self.names)), group_id=name)
            self.core.add(late, self.now)
            self.accepted[late.rollout_id] = late
            self.take_evicted()
            after = self.core.statistics(self.now)
            assert (after.waiting, after.evicted["late"]) == (before.waiting, before.evicted["late"] + 1)

    def check_order(self) -> None:
        """The planner sees the index by cost."""
        shown = self.core.buffer.waiting(self.core.triggers.due(self.now))
        assert shown.by_cost is not None
        assert shown.by_cost.tolist() == np.argsort(shown.costs, kind="stable").tolist()
        assert (shown.skips >= 0).all()

    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        steps = [b.step for b in self.core.in_flight.delivered()]
        if steps:
            step = data.draw(st.sampled_from(steps))
            self.acknowledge_step(step)
            with pytest.raises(ValueError, match=f"step {step} is not in flight"):
                self.core.acknowledge(step)
            with pytest.raises(ValueError, match=f"step {step} is not in flight"):
                self.core.replan(step, 1)

    def acknowledge_step(self, step: int) -> None:
        """What is missing of it is lost, and may be put again."""
        missing, before = self.missing.pop(step, set()), self.core.statistics(self.now)
        batch = self.core.acknowledge(step)
        after = self.core.statistics(self.now)
        assert after.evicted["lost"] - before.evicted["lost"] == len(missing)
        left = {r.rollout_id for r in batch.rollouts if not r.is_padding} - missing
        assert after.acknowledged - before.acknowledged == len(left)
        assert before.in_flight - after.in_flight == len(left) + len(missing)
        assert not missing & (self.core.ids.held | self.core.ids.past.keys())
        self.dispatched -= missing
        self.take_evicted()
        assert missing <= self.evicted

    @rule(data=st.data())
    def acknowledge_without_some(self, data: st.DataObject) -> None:
        """A rank trained a step without rollouts whose payloads were lost; these may be put again."""
        for batch in self.core.in_flight.delivered()[:1]:
            real = sorted(r.rollout_id for r in batch.rollouts if not r.is_padding)
            missing = set(data.draw(st.lists(st.sampled_from(real), min_size=1, max_size=3, unique=True)))
            before = self.core.statistics(self.now)
            self.core.mark_missing(batch.step, [*missing, "never put"])
            self.core.mark_missing(batch.step, missing)
            assert self.core.statistics(self.now) == before
            self.missing.setdefault(batch.step, set()).update(missing)
            self.acknowledge_step(batch.step)

    @rule(data=st.data(), dp_size=st.sampled_from([2, 1, 3]))
    def replan(self, data: st.DataObject, dp_size: int) -> None:
        """A step in flight is planned again for other ranks, and perhaps without some of it."""
        flying = self.core.in_flight.delivered()
        if not flying:
            return
        batch = data.draw(st.sampled_from(flying))
        left = sorted(r.rollout_id for r in batch.rollouts if not r.is_padding)
        most = min(len(left) - 1, 2)
        missing = set(data.draw(st.lists(st.sampled_from(left), max_size=most, unique=True))) if most else set()
        before = self.core.statistics(self.now)
        self.core.mark_missing(batch.step, missing)
        again = self.core.replan(batch.step, dp_size)
        assert (again.step, again.reason, len(again.ranks)) == (batch.step, batch.reason, dp_size)
        assert sorted(r.rollout_id for r in again.rollouts if not r.is_padding) == sorted({*left} - missing)
        assert [b.step for b in self.core.in_flight.delivered()] == [b.step for b in flying]
        self.check_shares(again)
        assert self.core.statistics(self.now) == before
        self.missing.setdefault(batch.step, set()).update(missing)

    @rule()
    def worked_through(self) -> None:
        """The trainer is through with the oldest batch, and acknowledges it later."""
        for batch in self.core.in_flight.delivered()[:1]:
            self.core.finish_training(batch.step)
            self.through.add(batch.step)

    def waiting(self) -> list[sb.Rollout]:
        return [self.accepted[name] for name in self.accepted.keys() - self.dispatched - self.evicted]

    def groups_of(self, rollouts: Iterable[sb.Rollout]) -> set[str]:
        """Groups that stay together, of these."""
        names = {rollout.group_id for rollout in rollouts} if self.core.config.groups.size is not None else {None}
        return {name for name in names if name is not None}

    def too_old_now(self) -> list[sb.Rollout]:
        """Rollouts that wait because every batch before them may make a version."""
        c, version = self.core.config, self.core.staleness.version
        if c.staleness.max_versions is None or c.staleness.on_stale == "send" or version is None:
            return []
        latest = version + sum(batch.step not in self.through for batch in self.core.in_flight.delivered())
        ages = [(r, latest - r.min_version) for r in self.waiting() if r.min_version is not None]
        return [rollout for rollout, age in ages if age > c.staleness.max_versions]

    @rule(data=st.data())
    def nack(self, data: st.DataObject) -> None:
        flying = list(self.core.in_flight.delivered())
        if not flying:
            return
        chosen = data.draw(st.lists(st.sampled_from(flying), min_size=1, max_size=3, unique_by=id))
        before = self.core.statistics(self.now)
        for batch in (*chosen, chosen[0]):
            self.core.nack(batch.step)
            self.through.discard(batch.step)
        verify(self.core)
        after = self.core.statistics(self.now)
        assert after.redelivering == sum(b.num_rollouts for b in chosen) == after.nacked - before.nacked
        assert {b.step for b in self.core.in_flight.delivered()} == {b.step for b in flying} - {b.step for b in chosen}
        if data.draw(st.booleans()):
            self.acknowledge_step(chosen.pop().step)  # it was trained on after all
        for batch in sorted(chosen, key=lambda b: b.step):
            assert self.core.next_wakeup() == -math.inf
            self.check_again(self.core.poll(self.now), batch)
        assert not self.core.statistics(self.now).redelivering

    @precondition(lambda self: not self.ended)
    @rule(length=st.integers(1, 64), group=st.integers(0, 3), lag=st.integers(0, 2))
    def filter_out(self, length: int, group: int, lag: int) -> None:
        rollout = self.rollout(length, group, lag)
        asked = self.core.admission.completed_by([rollout])
        if asked is None or rollout.nbytes > (self.core.config.max_bytes or math.inf) or self.is_too_large(rollout):
            return
        before = self.core.statistics(self.now)
        self.core.filter_out([rollout], self.now)
        after = self.core.statistics(self.now)
        self.accepted[rollout.rollout_id] = rollout
        self.take_evicted()
        assert {r.rollout_id for r in asked} <= self.evicted
        assert after.accepted == before.accepted + 1
        assert after.waiting == before.waiting - (len(asked) - 1)
        with pytest.raises(sb.errors.DuplicateRolloutError, match="is done"):
            self.core.add(rollout, self.now)

    @rule(group=st.integers(0, 3))
    def abandon_group(self, group: int) -> None:
        """What waits of it goes; what comes of it later, too."""
        config, name = self.core.config, self.group_name(group)
        if config.groups.size is None:
            with pytest.raises(ValueError, match="keeps no groups"):
                self.core.abandon_group(name)
            return
        before = self.core.statistics(self.now)
        number = self.core.abandon_group(name)
        after = self.core.statistics(self.now)
        assert after.evicted["abandoned"] - before.evicted["abandoned"] == before.waiting - after.waiting == number
        assert name not in self.core.buffer.groups.incomplete()
        self.take_evicted()
        if not self.ended and after.waiting < 3:
            self.add(3, group, 0)
            assert self.core.statistics(self.now).evicted["abandoned"] == after.evicted["abandoned"] + 1

    @precondition(lambda self: not self.ended)
    @rule(group=st.integers(0, 3), size=st.sampled_from([None, 1, 2, 3, 4]), lengths=st.lists(LENGTHS, max_size=3))
    def declare_group(self, group: int, size: int | None, lengths: list[int]) -> None:
        """How many siblings a group has is told, with its last ones or by itself."""
        config, name, groups = self.core.config, self.group_name(group), self.core.buffer.groups
        if config.groups.size is None:
            with pytest.raises(ValueError, match="keeps no groups"):
                self.core.add_all([], self.now, GroupSize(name, size))
            return
        rollouts = [
            sb.Rollout(tokens={"input_ids": IDS[:length]}, rollout_id=str(next(self.names)), group_id=name)
            for length in (lengths if size is None else [])
        ]
        before, knew, group = self.core.statistics(self.now), groups.declared(name), groups.get(name)
        arrived = 0 if group is None else group.arrived
        try:
            self.core.add_all(rollouts, self.now, GroupSize(name, size))
        except (sb.errors.WouldBlock, ValueError):  # a RolloutError is one
            assert self.core.statistics(self.now) == before
            assert groups.declared(name) == knew
            return
        self.accepted |= {rollout.rollout_id: rollout for rollout in rollouts}
        self.take_evicted()
        declared = groups.declared(name)
        assert declared is not None
        if knew is None or not knew.closed:
            assert declared.size == (arrived + len(rollouts) if size is None else size)
            assert declared.closed >= (size is None)
        if declared.closed:
            assert name not in groups.incomplete()
        if declared.closed and declared.size is not None and not groups.incomplete().get(name) and not self.ended:
            with pytest.raises(sb.errors.RolloutError, match="takes 0 more"):
                self.core.add(sb.Rollout(tokens={"input_ids": IDS[:3]}, group_id=name), self.now)

    @precondition(lambda self: not self.ended)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """The tokens of some that wait are gone with their producer; they may be put again."""
        waiting = sorted(self.accepted.keys() - self.dispatched - self.evicted)
        if not waiting:
            return
        names = set(data.draw(st.lists(st.sampled_from(waiting), min_size=1, max_size=3, unique=True)))
        assert set(self.core.evict_lost(lambda rollout: rollout.rollout_id in names)) == names
        self.take_evicted()

    @rule(by=st.integers(0, 2))
    def set_version(self, by: int) -> None:
        self.version = (self.version or 0) + by
        self.core.set_version(self.version)
        self.take_evicted()
        c = self.core.config
        if c.staleness.max_versions is not None and c.staleness.on_stale == "evict":
            for name in self.accepted.keys() - self.dispatched - self.evicted:
                oldest = self.accepted[name].min_version
                assert oldest is None or oldest >= self.version - c.staleness.max_versions

    @rule(extra=st.integers(0, 2), deadline=st.sampled_from([None, 2.0]))
    def reconfigure(self, extra: int, deadline: float | None) -> None:
        c = self.core.config
        window = c.batch_size + extra * c.dp_size * (c.groups.size or 1)
        held = max(self.core.statistics(self.now).waiting, window)
        # max_skips is a promise to those who already wait: it may grow here, not shrink
        skips = max(c.max_skips, 3 * held, 12)
        self.core.reconfigure(c.replace(window=window, capacity=held, deadline_s=deadline, max_skips=skips))

    @rule(dp_size=st.sampled_from([2, 1, 3]))
    def resize(self, dp_size: int) -> None:
        """There are other ranks from the next plan on, whatever is in flight."""
        flying, before = self.core.in_flight.delivered(), self.core.statistics(self.now)
        with contextlib.suppress(sb.errors.ConfigError):  # too few rollouts for so many ranks, or half a group for one
            self.core.reconfigure(self.core.config.replace(dp_size=dp_size, max_skips=self.core.config.max_skips))
            assert self.core.config.dp_size == dp_size
        after = self.core.statistics(self.now)
        assert (after.waiting, after.in_flight, self.core.in_flight.delivered()) == (
            before.waiting,
            before.in_flight,
            flying,
        )

    def check_again(self, again: sb.Batch | None, batch: sb.Batch) -> None:
        """The same step; in the same plan, unless that was for other ranks."""
        assert again is not None
        assert (again.step, again.reason, again.num_tokens) == (batch.step, batch.reason, batch.num_tokens)
        assert again.ranks[0].denominators == batch.ranks[0].denominators
        if len(batch.ranks) == self.core.config.dp_size:
            plans = [
                [[[r.rollout_id for r in mb.rollouts] for mb in share.micro_batches] for share in one.ranks]
                for one in (again, batch)
            ]
            assert plans[0] == plans[1]
            return
        real = [sorted(r.rollout_id for r in one.rollouts if not r.is_padding) for one in (again, batch)]
        assert real[0] == real[1]
        assert len(again.ranks) == self.core.config.dp_size
        self.check_shares(again)

    @rule(dp_size_changes=st.booleans())
    def crash_and_restore(self, dp_size_changes: bool) -> None:
        """A new balancer continues from a checkpoint written and read with torch, perhaps on other ranks."""
        snapshot = saved(self.core, self.now)
        config = self.core.config
        if dp_size_changes and config.dp_size > 1:
            config = config.replace(dp_size=1, min_batch_size=1)
        before = self.core.statistics(self.now)
        groups = self.core.buffer.groups
        incomplete, declared = groups.incomplete(), groups.declarations()
        self.core = learning_core(config)
        self.evictions = Evictions(self.core)
        self.now += 3.0  # the clock of the new process is another one
        self.core.restore(snapshot, self.now)
        groups = self.core.buffer.groups
        assert groups.declarations() == declared
        assert incomplete.items() <= groups.incomplete().items()
        self.ended = False
        self.through = set()
        flying = {r.rollout_id for b in snapshot.in_flight for r in b.rollouts if not r.is_padding}
        self.dispatched -= flying
        self.passed_over = {}
        after = self.core.statistics(self.now)
        assert after.accepted == before.accepted
        assert (after.waiting, after.in_flight) == (before.waiting, before.in_flight)
        assert after.redelivering == after.in_flight - sum(map(len, self.missing.values()))
        if after.accepted:
            with pytest.raises(ValueError, match="needs a fresh balancer"):
                self.core.restore(snapshot, self.now)
        for batch in snapshot.in_flight:
            self.check_again(self.core.poll(self.now), batch)
        self.dispatched |= flying
        assert not self.core.statistics(self.now).redelivering

    @precondition(lambda self: len(self.accepted) > 12)
    @rule()
    def end(self) -> None:
        self.core.end()
        self.ended = True
        with pytest.raises(sb.errors.ClosedResourceError, match="after end"):
            self.core.add(sb.Rollout(tokens={"input_ids": IDS[:3]}), self.now)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.end()
        for _ in range(1_000):
            if self.core.finished:
                break
            self.poll()
            if self.core.next_wakeup() > self.now:  # what waits must wait for the batches before it
                for batch in self.core.in_flight.delivered():
                    self.acknowledge_step(batch.step)
        assert self.core.finished
        assert self.accepted.keys() == self.dispatched | self.evicted
        assert not self.dispatched & self.evicted

    # -- what must hold ------------------------------------------------------------------------------------------------

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "core"):
            verify(self.core)

    def take_evicted(self) -> None:
        for rollout, reason in self.evictions.take():
            assert reason in ("stale", "filtered", "lost", "abandoned", "late")
            assert rollout.rollout_id not in self.evicted | self.dispatched
            self.evicted.add(rollout.rollout_id)

    def check_batch(self, batch: sb.Batch, before: sb.Statistics) -> None:
        c = self.core.config
        assert len(batch.ranks) == c.dp_size
        free = c.groups.size is None
        full = batch.reason in ("window", "age") and before.waiting >= c.batch_size
        assert batch.num_rollouts <= c.batch_size
        if free and full:
            assert batch.num_rollouts >= c.batch_size
        if free and batch.reason in ("drain", "deadline") and not self.too_old_now():
            assert batch.num_rollouts >= min(c.batch_size, before.waiting)
        if batch.reason == "deadline":
            assert before.oldest_wait_s >= (c.deadline_s or math.inf) - 1e-9
        self.check_shares(batch)
        assert batch.num_padding == sum(r.is_padding for r in batch.rollouts)
        if not free:
            self.check_groups(batch)

    def check_shares(self, batch: sb.Batch) -> None:
        c = self.core.config
        numbers = {len(share.micro_batches) for share in batch.ranks}
        assert len(numbers) == 1 or not c.micro_batches.equal_number
        assert not any(number % c.micro_batches.multiple_of for number in numbers)
        real = [r for r in batch.rollouts if not r.is_padding]
        assert batch.num_tokens == sum(r.num_tokens for r in real)
        for rank, share in enumerate(batch.ranks):
            assert (share.rank, share.step, share.dp_size) == (rank, batch.step, len(batch.ranks))
            assert share.global_num_rollouts == len(real)
            assert share.global_num_tokens == batch.num_tokens
            assert share.global_num_executions == len({(r.group_id, r.execution_id or r.rollout_id) for r in real})
            for mb in share.micro_batches:
                assert mb.rollouts
                # a padding copy fills a micro-batch of its own, where every rollout of the rank has one already
                if mb.rollouts[0].is_padding:
                    assert mb.lengths == (1,)
                    assert all(len(other.rollouts) == 1 for other in share.micro_batches)
                cap = c.micro_batches.max_tokens
                size = max(mb.lengths) * len(mb.lengths) if c.cost.padded else mb.num_tokens
                assert cap is None or size <= cap or len(mb.rollouts) == 1
        if c.equal_rollouts and not batch.num_padding and len(real) >= c.batch_size:
            counts = {share.num_rollouts for share in batch.ranks}
            assert max(counts) - min(counts) <= 1
        weights = [mb.packed().execution_weights.sum().item() for share in batch.ranks for mb in share.micro_batches]
        assert sum(weights) == pytest.approx(batch.num_executions, rel=1e-5)
        assert batch.lower_bound <= batch.finish * (1 + 1e-9)

    def check_groups(self, batch: sb.Batch) -> None:
        """Siblings that waited together leave together, unless the group is flagged as incomplete."""
        waiting = {self.accepted[n].group_id for n in self.accepted.keys() - self.dispatched - self.evicted} - {None}
        left = {r.group_id for r in self.core.buffer.rollouts()} - {None}
        for share in batch.ranks:
            for r in share.rollouts:
                if r.group_id is not None and r.group_id in left & waiting:
                    assert r.group_id in batch.incomplete_groups


def run(**more: int) -> None:
    run_state_machine_as_test(CoreMachine, settings=settings(suppress_health_check=list(HealthCheck), **more))


def test_core_machine() -> None:
    run(max_examples=max(settings().max_examples, 60), stateful_step_count=40)


@pytest.mark.soak
def test_core_machine_for_long() -> None:
    run(max_examples=5_000, stateful_step_count=80)
