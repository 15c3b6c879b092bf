"""The balancer on both loops, in virtual time: when batches leave, who waits, who is woken."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import helpers
import numpy as np
import pytest
from helpers import config, settle
from invariants import verify
from wakeups import count_wakeups

import stream_balancer as sb
from stream_balancer.core.in_flight import RolloutIds
from stream_balancer.testing import make_rollout, make_rollouts


async def fill(balancer: sb.StreamBalancer, count: int, start: int = 0) -> None:
    await helpers.fill(balancer, range(1, count + 1), prefix=f"f{start}-")


def ids(batch: sb.Batch) -> set[str]:
    return {r.rollout_id for r in batch.rollouts if not r.is_padding}


# -- when a batch leaves -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(["trainer", "w1", "w2"])), ids="-".join)
async def test_a_full_window_has_no_latency_whatever_the_order_of_starting(order: tuple[str, ...]) -> None:
    async with sb.StreamBalancer(config(window=8, deadline_s=50.0)) as balancer:
        left: list[float] = []

        async def trainer(_: str) -> None:
            async for _ in balancer.batches():
                left.append(anyio.current_time())
                if len(left) == 2:
                    break

        async def worker(name: str) -> None:
            for rollout in make_rollouts([3] * 6, prefix=name):
                await anyio.sleep(1.0)
                await balancer.put(rollout)

        async with anyio.create_task_group() as tasks:
            for name in order:
                tasks.start_soon(trainer if name == "trainer" else worker, name)
        # 2 rollouts a second fill the window of 8 at 4 s; the 4 left behind and 4 more fill it again at 6 s
        assert left == [4.0, 6.0]


@pytest.mark.parametrize(
    ("knobs", "events", "leaves"),
    [
        ({"deadline_s": 30.0}, [(5.0, 2), (15.0, 1)], (35.0, "deadline", 3)),
        ({"deadline_s": 30.0, "min_batch_size": 3}, [(0.0, 2), (100.0, 1)], (100.0, "deadline", 3)),
        ({"deadline_s": 1000.0}, [(0.0, 3), (5.0, {"deadline_s": 20.0})], (20.0, "deadline", 3)),
        ({"window": 12, "staleness": {"max_versions": 1}}, [(0.0, 6), (7.0, {"version": 6})], (7.0, "age", 4)),
    ],
    ids=["deadline", "min_batch_size", "nearer deadline", "about to go stale"],
)
async def test_a_batch_leaves_without_a_full_window(
    knobs: dict[str, Any], events: list[tuple[float, Any]], leaves: tuple[float, str, int]
) -> None:
    """At its time exactly. Events: how many rollouts are put then, or what changes."""
    async with sb.StreamBalancer(config(**knobs)) as balancer, anyio.create_task_group() as tasks:
        balancer.set_version(5)

        async def play() -> None:
            for at_s, event in events:
                await anyio.sleep(at_s - anyio.current_time())
                if isinstance(event, int):
                    for rollout in make_rollouts([4] * event, prefix=f"{at_s}-"):
                        await balancer.put(replace(rollout, version=5))
                elif "version" in event:
                    balancer.set_version(**event)
                else:
                    balancer.reconfigure(**event)

        tasks.start_soon(play)
        batch = await anext(balancer.batches())
        assert (anyio.current_time(), batch.reason, batch.num_rollouts) == leaves


# -- nothing polls -----------------------------------------------------------------------------------------------------


async def test_nothing_wakes_while_idle() -> None:
    knobs = config(deadline_s=None, window=64, capacity=64)
    async with sb.StreamBalancer(knobs, report_after_s=math.inf) as balancer, anyio.create_task_group() as tasks:
        tasks.start_soon(anext, balancer.batches())
        for start in range(3):
            tasks.start_soon(fill, balancer, 3, start)
        await settle()
        with count_wakeups() as wakeups:
            await anyio.sleep(80_000.0)
        assert wakeups.count <= 4
        tasks.cancel_scope.cancel()


# -- backpressure ------------------------------------------------------------------------------------------------------


async def test_limits_bytes_holds_puts_back_and_lets_the_window_go() -> None:
    """Nothing more can come in, so the window is as full as it gets: a trainer that waits for it is woken."""
    async with sb.StreamBalancer(config(window=8, capacity=64, max_bytes=400)) as balancer:
        batches: list[sb.Batch] = []

        async def train() -> None:
            batches.append(await anext(balancer.batches()))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(train)
            for n in range(5):
                await balancer.put(make_rollout(10, f"r{n}", minimal=True))  # 80 bytes each
            await settle()
            assert not batches
            await balancer.put(make_rollout(10, "r5", minimal=True))
        assert [(batch.reason, batch.num_rollouts) for batch in batches] == [("window", 4)]
        assert balancer.statistics().waiting == 2
        with pytest.raises(sb.errors.RolloutError, match=r"808 bytes of tensors, above max_bytes \(400\)"):
            await balancer.put(make_rollout(101, minimal=True))


async def test_put_group_is_all_or_nothing() -> None:
    async with sb.StreamBalancer(config(batch_size=4, groups=sb.Groups(size=2))) as balancer:
        await balancer.put_group([make_rollout(3, "a", group_id="g"), make_rollout(3, "b", group_id="g")])
        for bad, says in [
            ([make_rollout(3, "c", group_id="h"), make_rollout(3, "a", group_id="h")], "already held"),
            ([make_rollout(3, "c", group_id="h"), make_rollout(3, "c", group_id="h")], "same rollout_id"),
            ([make_rollout(3, "c", group_id="h"), make_rollout(3, "d", group_id="h", minimal=True)], "token columns"),
            ([make_rollout(3, "c", group_id="h"), make_rollout(3, "d")], "share one group_id"),
            ([], "at least one"),
            ([make_rollout(3, f"x{n}", group_id="h") for n in range(17)], "above capacity"),
        ]:
            with pytest.raises(sb.errors.RolloutError, match=says):
                await balancer.put_group(bad)
            assert balancer.statistics().waiting == 2


async def test_a_list_that_is_used_again_while_its_put_waits_changes_nothing() -> None:
    async with sb.StreamBalancer(config(dp_size=2, batch_size=2, window=2, capacity=2)) as balancer:
        await fill(balancer, 2)
        group = [make_rollout(3, name, group_id="g") for name in ("c", "d")]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(balancer.put_group, group)
            await anyio.wait_all_tasks_blocked()
            group[:] = [make_rollout(5, "z", group_id="h")]
            batches = balancer.batches()
            await anext(batches)
        assert ids(await anext(batches)) == {"c", "d"}


# -- the end -----------------------------------------------------------------------------------------------------------


async def test_closing_leaves_all_that_was_not_acknowledged_restorable() -> None:
    async with sb.StreamBalancer(config(window=4, batch_size=2)) as balancer:
        await fill(balancer, 6)
        batches = balancer.batches(auto_ack=False)
        done, flying = await anext(batches), await anext(batches)
        balancer.acknowledge(done.step)
        held = {r.rollout_id for r in balancer.snapshot().waiting} | ids(flying)
    state = balancer.state_dict()  # after aclose()
    async with sb.StreamBalancer(config(window=4, batch_size=2)) as balancer:
        balancer.load_state_dict(state)
        balancer.end()
        again = [batch async for batch in balancer.batches()]
    assert (again[0].step, ids(again[0])) == (flying.step, ids(flying))
    assert sorted(name for batch in again for name in ids(batch)) == sorted(held)


@pytest.mark.parametrize("how", ["end", "aclose"])
@pytest.mark.parametrize("wait", ["room", "verdict", "turn", "version"])
async def test_ending_tells_those_who_wait(wait: str, how: str) -> None:
    async def accept(rollouts: Sequence[sb.Rollout]) -> bool:
        await anyio.sleep(10.0 if rollouts[0].rollout_id == "judged" else 0.0)
        return True

    knobs = config(window=4, capacity=4, staleness=sb.Staleness(max_versions=0))
    told: list[str] = []
    async with sb.StreamBalancer(knobs, accept=accept) as balancer, anyio.create_task_group() as tasks:
        balancer.set_version(0)
        calls = {
            "room": lambda: balancer.put(make_rollout(2, version=0)),
            "verdict": lambda: balancer.put(make_rollout(2, "judged", version=0)),
            "turn": lambda: balancer.reserve().__aenter__(),
            "version": lambda: balancer.version_after(0),
        }

        async def waits() -> None:
            with pytest.raises(sb.errors.ClosedResourceError):
                await calls[wait]()
            told.append(wait)

        await fill(balancer, 4)
        tasks.start_soon(waits)
        await settle()
        if how == "end":
            balancer.end()
            await anyio.sleep(11.0)  # the verdict is there
            # what waits is still drained, and the trainer goes on
            assert told == ([] if wait == "version" else [wait])
        await balancer.aclose()
    assert told == [wait]
    with pytest.raises(sb.errors.ClosedResourceError):
        await calls[wait]()
    assert balancer.statistics().accepted == 4


# -- one trainer -------------------------------------------------------------------------------------------------------


async def test_two_trainers_are_told() -> None:
    async with sb.StreamBalancer(config()) as balancer:
        first = balancer.batches()
        second = balancer.batches()
        await fill(balancer, 8)
        assert (await anext(second)).num_rollouts == 4
        with pytest.raises(sb.errors.AlreadyInUseError, match="took over"):
            await anext(first)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anext, second)
            await settle()
            with pytest.raises(sb.errors.AlreadyInUseError, match="already waiting"):
                balancer.batches()
            with pytest.raises(sb.errors.AlreadyInUseError, match="already waiting"):
                await anext(second)
            tasks.cancel_scope.cancel()


async def test_without_auto_ack_batches_stay_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    async with sb.StreamBalancer(config()) as balancer:
        await fill(balancer, 16)
        batches = balancer.batches(auto_ack=False)
        one, two = await anext(batches), await anext(batches)
        assert [b.step for b in balancer.in_flight()] == [0, 1]
        with pytest.raises(sb.errors.DuplicateRolloutError):
            await balancer.put(make_rollout(2, next(iter(ids(one)))))
        balancer.acknowledge(one.step)
        balancer.acknowledge(two.step)
        with pytest.raises(ValueError, match=r"step 1 is not in flight.*In flight: nothing"):
            balancer.acknowledge(two.step)
        with pytest.raises(sb.errors.DuplicateRolloutError, match="accepted before and is done"):
            await balancer.put(make_rollout(2, next(iter(ids(one)))))
        monkeypatch.setattr(RolloutIds, "remember", 0)
        await anext(batches)
        balancer.acknowledge(2)
        await balancer.put(make_rollout(2, next(iter(ids(one)))))


# -- bad rollouts ------------------------------------------------------------------------------------------------------


class BrokenCost:
    padded = False

    def __call__(self, lengths: Any) -> Any:
        lengths = np.asarray(lengths, dtype=float)
        return np.where(lengths == 13, math.nan, lengths)


@pytest.mark.parametrize(
    ("knobs", "rollout", "error", "says"),
    [
        ({}, make_rollout(3, "f0-0"), sb.errors.DuplicateRolloutError, "already held"),
        (
            {},
            make_rollout(3, minimal=True),
            sb.errors.RolloutError,
            r"has token columns \{'input_ids': \(torch.int64, \(\)\)\}, but the first",
        ),
        (
            {"micro_batches": {"max_tokens": 10}, "sync": "step"},
            make_rollout(11),
            sb.errors.RolloutError,
            "above micro_batches.max_tokens",
        ),
        ({"cost": BrokenCost()}, make_rollout(13), sb.errors.RolloutError, "the cost model gave nan"),
        ({}, make_rollout(3).padding_copy("p"), sb.errors.RolloutError, "padding copy"),
        (
            {},
            replace(make_rollout(3), scalars={"other": 1.0}),
            sb.errors.RolloutError,
            r"has scalars \['other'\], but the first rollout had \['advantage'\]",
        ),
        ({}, {"input_ids": [1, 2]}, TypeError, r"takes a Rollout, not dict"),
    ],
)
async def test_a_refused_put_leaves_the_buffer_as_it_was(
    knobs: dict[str, Any], rollout: Any, error: type[Exception], says: str
) -> None:
    async with sb.StreamBalancer(config(**knobs)) as balancer:
        await fill(balancer, 3)
        before = balancer.statistics()
        for _ in range(2):
            with pytest.raises(error, match=says):
                await balancer.put(rollout)
            with pytest.raises(error, match=says):
                balancer.put_nowait(rollout)
        assert balancer.statistics() == before
        verify(balancer.parts.core)


async def test_what_is_no_config_and_no_list_of_rollouts_is_told() -> None:
    with pytest.raises(TypeError, match=r"config must be a BalancerConfig, not dict.*BalancerConfig\.from_dict"):
        sb.StreamBalancer({"dp_size": 2, "batch_size": 4})  # type: ignore[arg-type]
    async with sb.StreamBalancer(config()) as balancer:
        with pytest.raises(TypeError, match="'Rollout' object is not iterable"):
            await balancer.put_group(make_rollout(3))  # type: ignore[arg-type]
        assert balancer.statistics().waiting == 0


# -- knobs are live ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"window": 0}, "window must be"),
        ({"windw": 8}, "no such knob"),
        ({"dp_size": 5}, r"which is dp_size \(5\)"),
        ({"groups": {"size": 2}}, "groups.size cannot change: groups are counted by it"),
        ({"cost": BrokenCost()}, "the cost model gave nan"),
    ],
)
async def test_bad_knobs_change_nothing(changes: dict[str, Any], says: str) -> None:
    async with sb.StreamBalancer(config()) as balancer:
        await helpers.fill(balancer, [1, 2, 13])
        before = balancer.config, balancer.statistics()
        with pytest.raises(sb.errors.ConfigError, match=says):
            balancer.reconfigure(**changes)
        assert (balancer.config, balancer.statistics()) == before


# -- figures -----------------------------------------------------------------------------------------------------------


async def test_statistics_add_up_and_idle_is_measured() -> None:
    async with sb.StreamBalancer(config()) as balancer:
        await fill(balancer, 9)
        stats = balancer.statistics()
        assert (stats.waiting, stats.waiting_tokens, stats.peak_waiting) == (9, 45, 9)
        assert stats.waiting_lengths == (1, 5, 8, 9)
        assert stats.waiting_bytes == 45 * (8 + 4 + 1)
        await anyio.sleep(4.0)
        assert balancer.statistics().oldest_wait_s == 4.0
        await anext(balancer.batches())
        balancer.record_step_seconds(0, 0, 3.0)
        assert balancer.statistics().measured_idle_fraction is None
        balancer.record_step_seconds(0, 1, 1.0)
        assert balancer.statistics().measured_idle_fraction == pytest.approx(1 - 2.0 / 3.0)


@pytest.mark.parametrize(
    ("timing", "why"),
    [
        ({"rank": 2, "seconds": 1.0}, "rank 2 has no part in step 0: its ranks are 0 to 1"),
        ({"rank": -1, "seconds": 1.0}, "rank -1 has no part"),
        ({"rank": 1, "seconds": math.nan}, "must be >= 0 and finite, not nan"),
        ({"rank": 1, "seconds": -1.0}, "must be >= 0"),
        ({"rank": 1, "seconds": 1.0, "waited_s": math.inf}, "must be >= 0 and finite, not inf"),
        ({"rank": 1, "seconds": 1.0, "ready_s": math.nan}, "must be >= 0"),
    ],
)
async def test_seconds_that_cannot_be_are_refused_and_spoil_no_others(timing: dict[str, Any], why: str) -> None:
    async with sb.StreamBalancer(config()) as balancer:
        await fill(balancer, 9)
        await anext(balancer.batches())
        balancer.record_step_seconds(0, 0, 3.0)
        with pytest.raises(ValueError, match=why):
            balancer.record_step_seconds(0, **timing)
        balancer.record_step_seconds(0, 1, 1.0)
        assert balancer.statistics().measured_idle_fraction == pytest.approx(1 - 2.0 / 3.0)


async def test_recovering_more_than_the_capacity_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async with sb.StreamBalancer(config(window=12, capacity=24)) as balancer:
        await fill(balancer, 20)
        state = balancer.state_dict()
    async with sb.StreamBalancer(config(window=4, capacity=8)) as balancer:
        balancer.load_state_dict(state)
        assert balancer.statistics().waiting == 20
    assert "20 rollouts were recovered, above what may wait (8)" in caplog.text


# -- nothing moves -----------------------------------------------------------------------------------------------------


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "stream_balancer.balancer"]


@pytest.mark.parametrize(
    ("after_s", "lines", "why"),
    [
        (60, 4, "a batch is ready; nobody iterates batches(); 1 puts wait for room"),
        (10, 6, "1 rollout waits (window 4), the oldest for 10 s"),
        (math.inf, 0, ""),
    ],
    ids=["nobody iterates", "producers died", "silence is wanted"],
)
async def test_a_stall_is_told_by_who_waits_and_each_time_it_has_doubled(
    after_s: float, lines: int, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with sb.StreamBalancer(config(window=4, capacity=4), report_after_s=after_s) as balancer:
        with anyio.move_on_after(500):
            if after_s == 60:
                await fill(balancer, 5)
            await balancer.put(make_rollout(2))
            await anext(balancer.batches())
    told = [f"no batch for {after_s * 2**number} s" for number in range(lines)]
    assert [line.partition(":")[0] for line in reports(caplog)] == told
    assert why in "".join(reports(caplog)[:1])


async def test_who_may_not_begin_is_told_and_nobody_while_batches_leave_in_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with sb.StreamBalancer(config(window=4, capacity=4)) as balancer, anyio.create_task_group() as tasks:
        tasks.start_soon(fill, balancer, 40)
        batches = balancer.batches()
        for _ in range(10):
            await anyio.sleep(50)
            await anext(batches)
        assert reports(caplog) == []
        async with balancer.reserve(4):
            with anyio.move_on_after(100):
                async with balancer.reserve():
                    pass
    assert len(reports(caplog)) == 1


@pytest.mark.parametrize("value", [0, -1, math.nan])
def test_a_bad_time_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="report_after_s must be > 0"):
        sb.StreamBalancer(config(), report_after_s=value)


@pytest.mark.parametrize(
    ("rank", "world_size", "warned"), [(0, 2, False), (1, 2, True), (1, 4, True), (1, 1, False), (None, 2, False)]
)
async def test_a_balancer_on_every_rank_is_noticed(
    rank: int | None, world_size: int, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: rank is not None)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: world_size)
    async with sb.StreamBalancer(config(window=4)) as balancer:
        await fill(balancer, 4)
        balancer.end()
        assert [batch.step async for batch in balancer.batches()] == [0]
    told = reports(caplog)
    assert len(told) == warned
    assert all("sb.serve" in line and "sb.connect" in line and "rank 1 " in line for line in told)


async def test_a_version_is_set_again_after_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A trainer that goes on from an older checkpoint trains steps again, each of which makes its version."""
    versions = []
    for _ in range(2):
        async with sb.StreamBalancer(config(), journal=tmp_path) as balancer:
            if not versions:
                await fill(balancer, 8)
            balancer.end()
            async for batch in balancer.batches(auto_ack=False):
                balancer.set_version(batch.step + 1)
                versions.append(balancer.version)
    assert versions == [1, 2, 2, 2]
    assert "set_version(1): the version is 2 already, and stays so" in caplog.messages
    with pytest.raises(ValueError, match=r"set_version\(\): version must be an int, not '3'"):
        balancer.set_version("3")  # type: ignore[arg-type]


async def test_a_version_from_a_checkpoint_is_one() -> None:
    async with sb.StreamBalancer(config()) as first:
        first.set_version(7)
        for rollout in make_rollouts([3, 4]):
            await first.put(rollout)
        state = first.state_dict()
    async with sb.StreamBalancer(config()) as second, anyio.create_task_group() as tasks:
        seen: list[int] = []

        async def follow() -> None:
            seen.append(await second.version_after(None))

        tasks.start_soon(follow)
        await settle()
        second.load_state_dict(state)
        await settle()
        assert seen == [7]
        assert second.version == 7
