"""The number of ranks changes while ``serve`` runs: nothing is lost, nothing is trained on twice."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup
from helpers import kill, settle
from team import Team, check_exact

import stream_balancer as sb
from stream_balancer.testing import BACKENDS, MemoryNetwork, make_rollout, virtual_time_backend


def knobs(dp_size: int, **more: object) -> sb.BalancerConfig:
    return sb.BalancerConfig(**{"dp_size": dp_size, "batch_size": 12, "window": 12, **more})  # type: ignore[arg-type]


class Trainers:
    """Ranks that train, each until its iteration ends; what they have trained on."""

    def __init__(self, transport: MemoryNetwork) -> None:
        self.transport = transport
        self.trained: Counter[str] = Counter()
        self.sizes: dict[int, list[int]] = {}
        """By rank, ``dp_size`` of each step."""
        self.ended: list[int] = []

    async def train(self, rank: int, seconds: float = 0.0, *, incarnation: int = 0) -> None:
        async for share in sb.RankFeed(self.transport.connect(rank, incarnation=incarnation)):
            await anyio.sleep(seconds)
            assert (share.rank, share.dp_size > rank) == (rank, True)
            self.trained.update(r.rollout_id for r in share.rollouts if not r.is_padding)
            self.sizes.setdefault(rank, []).append(share.dp_size)
        self.ended.append(rank)


async def put(balancer: sb.StreamBalancer, name: str, number: int) -> None:
    for n in range(number):
        await balancer.put(make_rollout(1 + 7 * n % 30, f"{name}{n}"))


@asynccontextmanager
async def training(dp_size: int, seconds: float = 0.0) -> AsyncIterator[tuple[sb.StreamBalancer, Trainers, TaskGroup]]:
    """So many ranks train, ``seconds`` a step, and have been given the first; on leaving, until the end."""
    async with sb.StreamBalancer(knobs(dp_size)) as balancer, MemoryNetwork(dp_size=dp_size) as transport:
        trainers = Trainers(transport)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sb.serve, balancer, transport)
            for rank in range(dp_size):
                tasks.start_soon(trainers.train, rank, seconds)
            await put(balancer, "a", 12)
            await settle()
            yield balancer, trainers, tasks
            balancer.end()


async def test_fewer_ranks_from_the_next_batch_on() -> None:
    async with training(3, 1.0) as (balancer, trainers, _):
        balancer.reconfigure(dp_size=2)
        await anyio.sleep(10.0)
        assert trainers.ended == [2], "a rank that is no more sees the end, behind what it was given"
        await put(balancer, "b", 24)
    assert trainers.sizes == {0: [3, 2, 2], 1: [3, 2, 2], 2: [3]}
    assert sum(trainers.trained.values()) == len(trainers.trained) == 36
    assert balancer.statistics().acknowledged == 36
    assert [len(balancer.statistics().rank_busy_seconds), trainers.transport.dp_size] == [3, 2]


async def test_more_ranks_once_they_are_wanted() -> None:
    async with training(2) as (balancer, trainers, tasks):
        with pytest.raises(ValueError, match="announces dp_size=3, but the controller balances for dp_size=2"):
            await anext(sb.RankFeed(trainers.transport.connect(2, dp_size=3)))
        balancer.reconfigure(dp_size=3)
        await put(balancer, "b", 12)
        await settle()
        assert [state.connected for state in balancer.rank_states()] == [True, True, False]
        assert balancer.statistics().redelivering == 12, "what was asked for before is for whoever is there"
        tasks.start_soon(trainers.train, 2)
        await settle()
    assert trainers.sizes == {0: [2, 3], 1: [2, 3], 2: [3]}
    assert sum(trainers.trained.values()) == len(trainers.trained) == 24


async def test_a_rank_that_is_no_more_may_be_one_again() -> None:
    async with training(2, 1.0) as (balancer, trainers, tasks):
        balancer.reconfigure(dp_size=1)
        balancer.reconfigure(dp_size=2)  # it has not done what it was given, and goes back to its place
        await put(balancer, "b", 12)
        await anyio.sleep(10.0)
        assert trainers.sizes == {0: [2, 2], 1: [2, 2]}
        balancer.reconfigure(dp_size=1)
        await settle()
        assert trainers.ended == [1], "it was told of the end"
        balancer.reconfigure(dp_size=2)
        await put(balancer, "c", 12)
        await anyio.sleep(10.0)
        assert trainers.sizes == {0: [2, 2], 1: [2, 2]}
        tasks.start_soon(trainers.train, 1, 1.0)
        await anyio.sleep(10.0)
    assert trainers.sizes == {0: [2, 2, 2], 1: [2, 2, 2]}
    assert sum(trainers.trained.values()) == len(trainers.trained) == 36


async def test_speeds_must_be_given_anew() -> None:
    async with sb.StreamBalancer(knobs(2, speeds=(1.0, 0.5))) as balancer:
        with pytest.raises(sb.ConfigError, match="speeds must be 3 finite numbers"):
            balancer.reconfigure(dp_size=3)
        balancer.reconfigure(dp_size=3, speeds=(1.0, 0.5, 0.5))
        await put(balancer, "a", 12)
        batch = await anext(balancer.batches())
        work = [share.num_tokens for share in batch.ranks]
        assert work[0] > 1.5 * max(work[1:])


async def test_a_batch_that_is_given_again_is_planned_for_the_ranks_there_are() -> None:
    async with sb.StreamBalancer(knobs(3)) as balancer:
        await put(balancer, "a", 12)
        batches = balancer.batches(auto_ack=False)
        first = await anext(batches)
        balancer.reconfigure(dp_size=2)
        balancer.nack(first.step)
        again = await anext(batches)
        assert (again.step, [share.dp_size for share in again.ranks]) == (0, [2, 2])
        assert sorted(r.rollout_id for r in again.rollouts) == sorted(r.rollout_id for r in first.rollouts)
        assert again.ranks[0].global_num_loss_tokens == first.ranks[0].global_num_loss_tokens
        assert again.imbalance < 0.05
        balancer.acknowledge(0)
        assert balancer.statistics().acknowledged == 12


@pytest.mark.parametrize("resized_first", [True, False])
async def test_a_lost_rank_that_is_no_more_is_not_waited_for(resized_first: bool) -> None:
    """``serve`` raises, and the next one has the steps planned for the others."""
    async with sb.StreamBalancer(knobs(2)) as balancer, MemoryNetwork(dp_size=2) as transport:
        feeds = [sb.RankFeed(transport.connect(rank)) for rank in range(2)]
        await put(balancer, "a", 12)
        failures: list[sb.RankLostError] = []

        async def serve_alone() -> None:
            try:
                await sb.serve(balancer, transport, rejoin_timeout_s=math.inf)
            except sb.RankLostError as error:
                failures.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve_alone)
            for feed in feeds:
                await anext(feed)
            if resized_first:
                balancer.reconfigure(dp_size=1)
            kill(feeds[1])
            await settle()
            balancer.reconfigure(dp_size=1)
        assert [error.rank for error in failures] == [1]
        assert balancer.statistics().in_flight == 12
        with pytest.raises(sb.RankLostError):
            await anext(feeds[0])
        trainers = Trainers(transport)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sb.serve, balancer, transport)
            tasks.start_soon(trainers.train, 0)
            balancer.end()
        assert trainers.sizes == {0: [1]}
        assert len(trainers.trained) == balancer.statistics().acknowledged == 12


@pytest.mark.parametrize("seed", range(5))
async def test_whatever_the_order_of_changes_every_rollout_is_trained_on_once(seed: int) -> None:
    chance = random.Random(seed)
    async with sb.StreamBalancer(knobs(2, capacity=48)) as balancer, MemoryNetwork(dp_size=2) as transport:
        trained: Counter[str] = Counter()

        async def train(rank: int) -> None:
            """As a launcher keeps it: whenever its place is wanted, a rank is there."""
            while not balancer.ended or balancer.statistics().waiting:
                if rank < transport.dp_size:
                    with suppress(sb.RefusedError):  # their number has changed while it was on its way
                        async for share in sb.RankFeed(transport.connect(rank, depth=chance.randint(1, 3))):
                            await anyio.sleep(chance.choice([0.0, 0.5, 3.0]))
                            trained.update(r.rollout_id for r in share.rollouts if not r.is_padding)
                await anyio.sleep(1.0)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(sb.serve, report_after_s=math.inf), balancer, transport)
            for rank in range(4):
                tasks.start_soon(train, rank)
            for n in range(200):
                await balancer.put(make_rollout(1 + chance.randrange(50), f"r{n}"))
                if chance.random() < 0.1:
                    await anyio.sleep(chance.choice([0.0, 0.2, 5.0]))
                    balancer.reconfigure(dp_size=chance.randint(1, 4))
            await anyio.sleep(100.0)
            balancer.end()
        assert sum(trained.values()) == len(trained) == 200
        assert balancer.statistics().acknowledged == 200


# -- a lost rank's part is planned again ------------------------------------------------------------------------------


async def run_team(
    balancer: sb.StreamBalancer, transport: MemoryNetwork, team: Team, *, rollouts: int = 60, **options: Any
) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(sb.serve, on_rank_loss="replan", **options), balancer, transport)
        for rank in range(transport.dp_size):
            tasks.start_soon(team.train, rank)
        await put(balancer, "r", rollouts)
        balancer.end()


WHENS = ["work", "asking", "meeting", "met"]


@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("step", [0, 2, 4])
async def test_what_a_lost_rank_owed_is_trained_on_by_the_others_in_the_same_step(step: int, when: str) -> None:
    async with sb.StreamBalancer(knobs(4)) as balancer, MemoryNetwork(dp_size=4) as transport:
        team = Team(transport, {1: (step, when)})
        await run_team(balancer, transport, team)
        check_exact(balancer, team)
        lost_before_they_met = step if when != "met" else step + 1
        assert [number for number, ranks in team.present.items() if ranks == (0, 2, 3)] == list(
            range(lost_before_they_met, 5)
        )
        assert balancer.config.dp_size == 3
        assert team.dp_sizes[0] == 4
        assert not team.errors


async def test_healthy_ranks_take_over_nothing_and_agree_who_is_there() -> None:
    async with sb.StreamBalancer(knobs(3)) as balancer, MemoryNetwork(dp_size=3) as transport:
        team = Team(transport)
        await run_team(balancer, transport, team)
        check_exact(balancer, team)
        assert set(team.present.values()) == {(0, 1, 2)}


@pytest.mark.parametrize("second", WHENS)
@pytest.mark.parametrize("first", WHENS)
async def test_two_ranks_are_lost_in_one_step(first: str, second: str) -> None:
    async with sb.StreamBalancer(knobs(4)) as balancer, MemoryNetwork(dp_size=4) as transport:
        team = Team(transport, {0: (1, first), 2: (1, second)})
        await run_team(balancer, transport, team)
        check_exact(balancer, team)
        assert team.present[4] == (1, 3)


async def test_who_took_over_is_lost_too_and_the_last_one_does_it_all() -> None:
    async with sb.StreamBalancer(knobs(4)) as balancer, MemoryNetwork(dp_size=4) as transport:
        team = Team(transport, {0: (0, "work"), 1: (1, "asking"), 2: (1, "meeting")})
        await run_team(balancer, transport, team)
        check_exact(balancer, team)
        assert team.present[1] == team.present[4] == (3,)


@pytest.mark.parametrize("lost", range(3))
async def test_a_rank_that_owed_nothing_but_padding_is_given_up_while_the_others_ask(lost: int) -> None:
    async with sb.StreamBalancer(knobs(3)) as balancer, MemoryNetwork(dp_size=3) as transport:
        team = Team(transport, {lost: (0, "work")})
        with anyio.fail_after(300.0):
            await run_team(balancer, transport, team, rollouts=2, rejoin_timeout_s=30.0)
        check_exact(balancer, team, 2)
        assert team.present == {0: tuple(rank for rank in range(3) if rank != lost)}


async def test_the_loss_of_the_last_rank_is_raised_and_the_next_serve_goes_on() -> None:
    async with sb.StreamBalancer(knobs(2)) as balancer, MemoryNetwork(dp_size=2) as transport:
        team = Team(transport, {0: (1, "work"), 1: (1, "meeting")})
        with pytest.raises(BaseExceptionGroup) as caught:
            await run_team(balancer, transport, team)
        assert caught.group_contains(sb.RankLostError)
        assert balancer.statistics().in_flight == 48 - balancer.statistics().waiting
        balancer.reconfigure(dp_size=2)
        team.die.clear()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(sb.serve, on_rank_loss="replan"), balancer, transport)
            for rank in range(2):
                tasks.start_soon(partial(team.train, rank, incarnation=1))
            balancer.end()
        check_exact(balancer, team)


async def test_a_rank_that_is_back_in_time_is_waited_for() -> None:
    async with sb.StreamBalancer(knobs(3)) as balancer, MemoryNetwork(dp_size=3) as transport:
        team = Team(transport, {1: (1, "work")})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(sb.serve, on_rank_loss="replan", rejoin_timeout_s=100.0), balancer, transport)
            for rank in range(3):
                tasks.start_soon(team.train, rank)
            await put(balancer, "r", 60)
            balancer.end()
            await anyio.sleep(50.0)
            await team.train(1, incarnation=1)
        check_exact(balancer, team)
        assert set(team.present.values()) == {(0, 1, 2)}


async def test_a_rank_that_was_given_up_takes_part_again_from_a_later_step() -> None:
    async with sb.StreamBalancer(knobs(3)) as balancer, MemoryNetwork(dp_size=3) as transport:
        team = Team(transport, {1: (1, "work")})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(sb.serve, on_rank_loss="replan"), balancer, transport)
            for rank in range(3):
                tasks.start_soon(team.train, rank)
            await put(balancer, "r", 60)
            await anyio.sleep(100.0)
            assert balancer.config.dp_size == 2
            tasks.start_soon(partial(team.train, 1, incarnation=1))
            await put(balancer, "s", 24)
            balancer.end()
        check_exact(balancer, team, 84)
        assert balancer.config.dp_size == 3
        assert team.present[6] == (0, 1, 2)
        assert team.present[1] == (0, 2)


async def test_speeds_stay_with_their_ranks() -> None:
    async with (
        sb.StreamBalancer(knobs(3, speeds=(1.0, 1.0, 0.5))) as balancer,
        MemoryNetwork(dp_size=3) as transport,
    ):
        team = Team(transport, {1: (1, "work")})
        await run_team(balancer, transport, team)
        check_exact(balancer, team)
        assert balancer.config.speeds == (1.0, 0.5)


async def test_a_rank_without_whom_the_others_have_met_learns_it() -> None:
    """It asks again because its own all_reduce failed, though that of the others was through."""
    async with sb.StreamBalancer(knobs(2)) as balancer, MemoryNetwork(dp_size=2) as transport:
        await put(balancer, "r", 24)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(sb.serve, on_rank_loss="replan"), balancer, transport)
            feeds = [sb.RankFeed(transport.connect(rank)) for rank in range(2)]

            async def step(feed: sb.RankFeed) -> list[sb.RankBatch]:
                own = await anext(feed)
                return [own, *[part async for part in feed.reassigned()]]

            async with anyio.create_task_group() as both:
                for feed in feeds:
                    both.start_soon(step, feed)
            done: list[sb.RankBatch] = []

            async def next_step() -> None:
                done.extend(await step(feeds[0]))

            async with anyio.create_task_group() as rest:
                rest.start_soon(next_step)  # acknowledges step 0
                await settle()
                with pytest.raises(sb.RankLostError):
                    [part async for part in feeds[1].reassigned()]
            assert sum(one.num_rollouts for one in done) == 12, "of the next step, in which nobody has met"
            balancer.end()
            assert [batch async for batch in feeds[0]] == []
        assert balancer.statistics().acknowledged == 24


async def test_who_is_lost_while_it_asks_is_waited_for_or_given_up() -> None:
    async with sb.StreamBalancer(knobs(2)) as balancer, MemoryNetwork(dp_size=2) as transport:
        await put(balancer, "r", 12)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(sb.serve, on_rank_loss="replan", rejoin_timeout_s=60.0), balancer, transport)
            feeds = [sb.RankFeed(transport.connect(rank)) for rank in range(2)]
            for feed in feeds:
                await anext(feed)
            async with anyio.create_task_group() as asking:
                asking.start_soon(anext, aiter(feeds[1].reassigned()))
                await settle()
                asking.cancel_scope.cancel()
            kill(feeds[1])
            await settle()
            others = feeds[0].reassigned()
            assert len([part async for part in others]) == 1
            assert others.ranks == (0,)
            balancer.end()
            assert [batch async for batch in feeds[0]] == []
        assert balancer.statistics().acknowledged == 12


@pytest.mark.parametrize("back", [False, True])
async def test_who_asks_again_in_a_step_that_others_have_met_in_without_it_learns_so(back: bool) -> None:
    """Its own all_reduce failed, though that of the others was through; also if one of those is lost and back."""
    async with sb.StreamBalancer(knobs(3)) as balancer, MemoryNetwork(dp_size=3) as transport:
        await put(balancer, "r", 12)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(sb.serve, on_rank_loss="replan", rejoin_timeout_s=60.0), balancer, transport)
            feeds = [sb.RankFeed(transport.connect(rank)) for rank in range(3)]
            steps = [await anext(feed) for feed in feeds]

            async def work(step: Any) -> None:
                assert [one async for one in step]
                assert (await step.async_finish()).ranks == (0, 1, 2)

            async with anyio.create_task_group() as meeting:
                for step in steps:
                    meeting.start_soon(work, step)
            steps[0].ack()
            steps[2].ack()
            await settle()
            if back:
                kill(feeds[0])
                sb.RankFeed(transport.connect(0, incarnation=1))
                await settle()
            assert [one async for one in steps[1]] == []
            assert await steps[1].async_finish() is None
            assert "step 0 is in the weights of the other ranks" in steps[1].dropped
            tasks.cancel_scope.cancel()


async def test_a_rank_that_begins_a_step_again_has_not_met_in_it() -> None:
    """It was through with the step, and had not acknowledged it: its checkpoint is older."""
    async with sb.StreamBalancer(knobs(1)) as balancer, MemoryNetwork(dp_size=1) as transport:
        await put(balancer, "r", 12)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(sb.serve, on_rank_loss="replan", rejoin_timeout_s=60.0), balancer, transport)
            feed = sb.RankFeed(transport.connect(0), auto_ack=False)
            step = await anext(feed)
            assert [one async for one in step]
            assert (await step.async_finish()).ranks == (0,)
            with anyio.move_on_after(1.0):
                await anext(feed)
            kill(feed)
            feed = sb.RankFeed(transport.connect(0, incarnation=1))
            step = await anext(feed)
            assert step.step == 0
            assert [one async for one in step]
            assert (await step.async_finish()).rollouts == 12
            balancer.end()
            assert [batch async for batch in feed] == []
        assert balancer.statistics().acknowledged == 12


async def test_reassigned_needs_a_batch_in_hand() -> None:
    async with (
        sb.StreamBalancer(knobs(1)) as balancer,
        MemoryNetwork(dp_size=1) as transport,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(sb.serve, balancer, transport)
        feed = sb.RankFeed(transport.connect(0))
        with pytest.raises(ValueError, match="the batch in hand, and there is none"):
            feed.reassigned()
        await put(balancer, "r", 12)
        batch = await anext(feed)
        assert [part async for part in feed.reassigned()] == [], "under every policy"
        batch.ack()
        with pytest.raises(ValueError, match=r"before batch.ack\(\)"):
            feed.reassigned()
        balancer.end()
        assert [batch async for batch in feed] == []


async def test_what_replanning_is_not_for_is_refused() -> None:
    with pytest.raises(ValueError, match="must be 'raise' or 'replan'"):
        await sb.serve(sb.StreamBalancer(knobs(1)), MemoryNetwork(dp_size=1), on_rank_loss="wait")  # type: ignore[arg-type]
    with pytest.raises(sb.ConfigError, match="ranks meet several times in a step"):
        await sb.serve(sb.StreamBalancer(knobs(2, mini_batches=2)), MemoryNetwork(dp_size=2), on_rank_loss="replan")


@pytest.mark.parametrize("seed", range(10))
async def test_whoever_is_lost_and_whenever(seed: int) -> None:
    """Ranks are lost, come back, or are no more, at random moments, while others take over."""
    chance = random.Random(seed)
    size = chance.randint(2, 5)
    more = chance.choice([{}, {"max_tokens_per_micro_batch": 40}, {"group_size": 3}, {"speeds": (1.0,) * size}])
    more = {**more, **({"max_tokens_per_micro_batch": 40, "micro_batch_multiple": 2} if seed % 3 == 1 else {})}
    async with sb.StreamBalancer(knobs(size, **more)) as balancer, MemoryNetwork(dp_size=size) as transport:
        die = {rank: (chance.randrange(5), chance.choice(WHENS)) for rank in range(1, size)}
        team = Team(transport, die)
        timeout_s = chance.choice([0.0, 0.0, 7.0])

        async def launch(rank: int) -> None:
            await team.train(rank)
            if rank and chance.random() < 0.5:
                await anyio.sleep(chance.choice([3.0, 30.0]))
                if not balancer.ended:
                    await team.train(rank, incarnation=1)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(sb.serve, on_rank_loss="replan", rejoin_timeout_s=timeout_s), balancer, transport)
            for rank in range(size):
                tasks.start_soon(launch, rank)
            for n in range(96):
                group = f"g{n // 3}" if "group_size" in more else None
                await balancer.put(make_rollout(1 + 7 * n % 30, f"r{n}", group_id=group))
            await anyio.sleep(300.0)
            balancer.end()
        check_exact(balancer, team, 96)


@pytest.mark.parametrize("anyio_backend", [virtual_time_backend(name, grace_s=0.01) for name in BACKENDS], ids=BACKENDS)
@pytest.mark.parametrize("seconds", [0.0, 1.05, 1.3, 1.7, 2.2])
async def test_the_controller_is_lost_while_others_take_over(tmp_path: Path, seconds: float) -> None:
    """Its journal knows the step whole, or not at all: the next one gives it again as it was planned. The clock waits
    a moment for the journal's thread."""
    async with sb.StreamBalancer(knobs(4), journal=tmp_path / "j") as balancer, MemoryNetwork(dp_size=4) as transport:
        team = Team(transport, {1: (1, "work")})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(sb.serve, on_rank_loss="replan"), balancer, transport)
            for rank in range(4):
                tasks.start_soon(team.train, rank)
            await put(balancer, "r", 36)
            with anyio.fail_after(60):
                while team.die:  # noqa: ASYNC110
                    await anyio.sleep(0.05)
            await anyio.sleep(seconds)
            tasks.cancel_scope.cancel()
        done = balancer.statistics().acknowledged
    trained = [step for step in team.met if step < done // 12]
    before: Counter[str] = sum((team.met[step] for step in trained), Counter())
    async with sb.StreamBalancer(knobs(3), journal=tmp_path / "j") as balancer, MemoryNetwork(dp_size=3) as transport:
        again = Team(transport)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(sb.serve, on_rank_loss="replan"), balancer, transport)
            for rank in range(3):
                tasks.start_soon(partial(again.train, rank, incarnation=1))
            balancer.end()
        after: Counter[str] = sum(again.met.values(), Counter())
        assert len(before) == done
        assert before + after == Counter(f"r{n}" for n in range(36))
        assert balancer.statistics().acknowledged == 36
        assert sorted([*trained, *again.met]) == [0, 1, 2], "the same steps"
