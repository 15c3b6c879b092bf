"""Groups of another size than ``groups.size``, told by who puts, from whichever process, and after a crash; and
groups that leave without their slowest siblings: who waits, who is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import anyio
import helpers
import pytest
from helpers import settle, waiting
from invariants import verify
from served import attended

import stream_balancer as sb
from stream_balancer.core.groups import Declared
from stream_balancer.testing import make_rollout

config = partial(helpers.config, groups=sb.Groups(size=4), window=4, capacity=16)


def siblings(count: int, prefix: str = "r") -> list[sb.Rollout]:
    return [make_rollout(3 + n, f"{prefix}{n}", group_id="g") for n in range(count)]


async def test_a_worker_that_lost_a_sibling_lets_the_step_go_without_it() -> None:
    """Seven of eight would wait for ever: three of four here."""
    async with attended(sb.StreamBalancer(config())) as (balancer, network, tasks):
        producer = sb.connect(network.connect_producer())
        got: list[sb.Batch] = []

        async def train() -> None:
            got.append(await anext(balancer.batches()))

        tasks.start_soon(train)
        await producer.put_group(siblings(2))
        await producer.put(make_rollout(9, "alone", group_id="h"))
        await settle()
        assert not got
        await producer.put_group(siblings(1, "last"), complete=True)
        await producer.close_group("h")
        await settle()
        (batch,) = got
        assert (batch.num_rollouts, batch.incomplete_groups) == (4, ())
        assert balancer.statistics().short_groups == 2
        assert balancer.statistics().open_groups == 0
        balancer.abandon_group("i")


async def test_every_producer_tells_what_the_balancer_is_told() -> None:
    async with attended(sb.StreamBalancer(config())) as (balancer, network, _):
        producer = sb.connect(network.connect_producer())
        await producer.expect_group("g", 3)
        await producer.put_group(siblings(2))
        for there, here in (
            (producer.expect_group("g", 2), balancer.expect_group("g", 2)),
            (producer.expect_group("g", 0), balancer.expect_group("g", 0)),
            (producer.put_group(siblings(2, "s")), balancer.put_group(siblings(2, "s"))),
        ):
            with pytest.raises(ValueError, match="group") as one:
                await there
            with pytest.raises(ValueError, match="group") as other:
                await here
            assert (type(one.value), str(one.value)) == (type(other.value), str(other.value))
        await producer.put_group(siblings(1, "third"))
        with pytest.raises(sb.errors.RolloutError, match="takes 0 more"):
            await producer.put(make_rollout(3, group_id="g"))
        await producer.abandon_group("h")
        await producer.put(make_rollout(3, "unwanted", group_id="h"))
        stats = balancer.statistics()
        assert (stats.waiting, stats.evicted["abandoned"], stats.short_groups) == (3, 1, 0)
        with pytest.raises(sb.errors.RolloutError, match="must be a non-empty str"):
            await producer.close_group(7)  # type: ignore[arg-type]


async def test_a_balancer_that_keeps_no_groups_says_so() -> None:
    async with attended(sb.StreamBalancer(helpers.config())) as (_, network, _):
        producer = sb.connect(network.connect_producer())
        for tell in (producer.close_group("g"), producer.abandon_group("g"), producer.expect_group("g", 2)):
            with pytest.raises(ValueError, match="keeps no groups"):
                await tell
        await producer.put_group(siblings(2), complete=True)  # a worker need not know


async def test_a_put_that_waits_for_room_is_refused_once_its_group_is_closed() -> None:
    async with sb.StreamBalancer(config(capacity=4)) as balancer, anyio.create_task_group() as tasks:
        await balancer.put_group([make_rollout(3, f"full{n}", group_id="full") for n in range(4)])

        async def late() -> None:
            with pytest.raises(sb.errors.RolloutError, match="takes 0 more"):
                await balancer.put_group(siblings(4))

        tasks.start_soon(late)
        await settle()
        assert balancer.statistics().blocked_puts == 1
        await balancer.close_group("g")
        await settle()
        assert balancer.statistics().blocked_puts == 0


async def test_closing_makes_room_for_those_who_wait() -> None:
    knobs = config(capacity=8, max_skips=7, min_batch_size=2)
    async with sb.StreamBalancer(knobs) as balancer, anyio.create_task_group() as tasks:
        await balancer.put_group([make_rollout(3, f"full{n}", group_id="full") for n in range(4)])
        await balancer.put_group(siblings(1))  # and three places are kept
        tasks.start_soon(balancer.put_group, [make_rollout(3, f"s{n}", group_id="s") for n in range(3)])
        await settle()
        assert len(waiting(balancer)) == 5
        await balancer.expect_group("s", 3)
        await balancer.close_group("g")
        await settle()
        assert len(waiting(balancer)) == 8


@pytest.mark.parametrize("keep", [True, False])
async def test_accept_judges_a_group_when_it_is_closed(keep: bool) -> None:
    asked: list[list[str]] = []

    async def accept(rollouts: Sequence[sb.Rollout]) -> bool:
        asked.append([r.rollout_id for r in rollouts])
        await anyio.sleep(1.0)
        return keep

    async with sb.StreamBalancer(config(), accept=accept) as balancer:
        await balancer.put_group(siblings(2))
        assert not asked
        await balancer.close_group("g")
        await balancer.close_group("g")
        assert asked == [["r0", "r1"]]
        assert waiting(balancer) == (["r0", "r1"] if keep else [])
        await balancer.put_group([make_rollout(3, "h0", group_id="h")], complete=True)
        await balancer.expect_group("i", 1)
        await balancer.put(make_rollout(3, "i0", group_id="i"))
        await balancer.close_group("nobody")
        assert asked[1:] == [["h0"], ["i0"]]


async def test_a_group_that_is_too_old_by_the_time_it_is_restored_is_done() -> None:
    async with sb.StreamBalancer(config(staleness=sb.Staleness(max_versions=2))) as before:
        before.set_version(2)
        await before.put_group([replace(one, version=0) for one in siblings(4)])
        state = before.state_dict()
    async with sb.StreamBalancer(config(staleness=sb.Staleness(max_versions=1))) as after:
        after.load_state_dict(state)
        assert after.statistics().evicted["stale"] == 4
        assert not after.snapshot().group_departures


@pytest.mark.parametrize("size", [1, 2, 3])
async def test_a_checkpoint_goes_on_with_smaller_groups(size: int) -> None:
    """One group is whole, one lacks siblings under the size of before."""
    async with sb.StreamBalancer(config(batch_size=4)) as before:
        await before.put_group(siblings(4))
        await before.put_group([make_rollout(3, f"h{n}", group_id="h") for n in range(3)])
        state = before.state_dict()
    # a dispatch may be a group short of its size
    knobs = config(batch_size=12, window=12, capacity=24, groups=sb.Groups(size=size))
    async with sb.StreamBalancer(knobs) as after:
        after.load_state_dict(state)
        verify(after.parts.core)
        after.end()
        got = [rollout.rollout_id async for batch in after.batches() for rollout in batch.rollouts]
        assert sorted(got) == ["h0", "h1", "h2", "r0", "r1", "r2", "r3"]


GROUPS = sb.Groups(size=4, min_size=3)
cutting = partial(helpers.config, groups=GROUPS, window=4, capacity=16)


def sibling(name: str, group_id: str = "g", tokens: int = 3) -> sb.Rollout:
    return make_rollout(tokens, name, group_id=group_id)


class Heard(sb.Observer):
    """What a program is told, so that its engine stops generating."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str, float]] = []

    def group_declared(self, group_id: str, declared: Declared | None) -> None:
        """An event of the balancer."""
        if declared is not None and declared.late:
            self.said.append((group_id, "cut", anyio.current_time()))

    def evicted(self, rollout: sb.Rollout, reason: sb.EvictReason) -> None:
        """An event of the balancer."""
        self.said.append((rollout.rollout_id, reason, anyio.current_time()))


async def test_a_step_leaves_without_the_straggler_which_is_evicted_when_it_comes() -> None:
    """By a worker elsewhere, whose put returns as usual."""
    knobs = cutting(window=6, batch_size=6, groups=sb.Groups(size=3, min_size=2))
    async with attended(sb.StreamBalancer(knobs)) as (balancer, network, tasks):
        balancer.observers.append(heard := Heard())
        producer = sb.connect(network.connect_producer())
        got: list[tuple[float, sb.Batch]] = []

        async def train() -> None:
            batches = balancer.batches()
            while True:
                batch = await anext(batches)
                got.append((anyio.current_time(), batch))

        began = anyio.current_time()
        for group_id in "ab":
            await producer.expect_group(group_id, 3)
        tasks.start_soon(train)
        await anyio.sleep(10.0)
        await producer.put_group([sibling(f"a{n}", "a") for n in range(3)])
        await producer.put_group([sibling(f"b{n}", "b") for n in range(2)])
        await producer.put(sibling("c0", "c"))
        await anyio.sleep(1.0)
        balancer.reconfigure(deadline_s=20.0)
        await anyio.sleep(30.0)
        ((at, batch),) = got
        assert at - began == pytest.approx(30.0, abs=0.1)
        assert (batch.num_rollouts, batch.reason, batch.incomplete_groups) == (6, "deadline", ("c",))
        await producer.put(sibling("b2", "b"))
        assert [(name, why) for name, why, _ in heard.said] == [("b", "cut"), ("b2", "late")]
        assert heard.said[0][2] - began == pytest.approx(20.0, abs=0.1)
        statistics = await producer.statistics()
        assert (statistics.evicted["late"], statistics.cut_siblings, statistics.short_groups) == (1, 1, 2)


async def test_a_reserver_that_waits_gets_what_a_cut_group_leaves() -> None:
    """Nobody generates, nobody may begin: once the group is complete without its straggler, it leaves."""
    async with sb.StreamBalancer(cutting(capacity=4, staleness={"max_versions": 0})) as balancer:
        balancer.set_version(0)
        async with balancer.reserve(4) as slot, anyio.create_task_group() as tasks:
            for name, after_s in (("r0", 1.0), ("r1", 1.0), ("r2", 1.0)):
                await anyio.sleep(after_s)
                await slot.put(sibling(name))
            slot.release()
            steps: list[sb.Batch] = []

            async def train() -> None:
                async for batch in balancer.batches():
                    steps.append(batch)
                    balancer.set_version(batch.step + 1)

            async def begin() -> None:
                async with balancer.reserve(4):
                    tasks.cancel_scope.cancel()

            tasks.start_soon(train)
            tasks.start_soon(begin)
            with anyio.fail_after(100.0):
                await anyio.sleep_forever()
        assert [batch.num_rollouts for batch in steps] == [3]


async def test_accept_is_not_asked_about_what_is_late_nor_again_about_what_waits() -> None:
    asked: list[int] = []

    def accept(rollouts: object) -> bool:
        asked.append(len(rollouts))  # type: ignore[arg-type]
        return False

    async with sb.StreamBalancer(cutting(), accept=accept) as balancer, anyio.create_task_group() as tasks:
        await balancer.put_group([sibling(f"r{n}") for n in range(3)])
        tasks.start_soon(anext, balancer.batches())
        await settle()
        await balancer.put(sibling("r3"))
        assert not asked
        assert balancer.statistics().waiting == 3
        assert balancer.statistics().evicted["late"] == 1
        tasks.cancel_scope.cancel()
