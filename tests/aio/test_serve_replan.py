"""``serve`` with ranks that are lost for good, slow, more or fewer: each rollout is in one gradient, once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import helpers
import pytest
from crew import WHENS, Crew
from helpers import kill, settle
from kept import Kept

import stream_balancer as sb
from stream_balancer.host.serve import serve
from stream_balancer.rollouts import Rollout
from stream_balancer.testing import make_rollout
from stream_balancer.testing.network import MemoryNetwork


def knobs(dp_size: int, **more: Any) -> sb.BalancerConfig:
    return sb.BalancerConfig(**{"dp_size": dp_size, "batch_size": 12, "window": more.get("batch_size", 12), **more})


def some(number: int, name: str = "r") -> list[Rollout]:
    """Every sixth is far above the fair share of any number of ranks."""
    return [make_rollout(900 if n % 6 == 5 else 1 + 7 * n % 30, f"{name}{n}") for n in range(number)]


CAPPED = {"micro_batches": {"max_tokens": 1000}, "sync": "step"}
LOCKSTEP = {"sync": "micro_batch", "micro_batches": {"max_tokens": 1000}}
FREE = {"micro_batches": {"equal_number": False}}
PLANS: list[dict[str, Any]] = [{}, CAPPED, LOCKSTEP]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("step", [0, 2])
async def test_what_a_lost_rank_owed_is_done_by_the_others_in_the_same_step(
    step: int, when: str, plan: dict[str, Any]
) -> None:
    """All that are left compute the whole step again, under a new plan."""
    async with sb.StreamBalancer(knobs(4, **plan)) as balancer:
        crew = Crew(MemoryNetwork(dp_size=4), {1: (step, when)})
        await crew.run(balancer, some(60), on_rank_loss="replan")
        crew.check(balancer, 60)
        lost_before_they_met = step if when != "met" else step + 1
        without = [number for number, ranks in crew.present.items() if ranks == (0, 2, 3)]
        assert without == list(range(lost_before_they_met, 5))
        assert balancer.config.dp_size == 3
        assert not crew.errors
        assert {rank for rank, number in crew.replaced if number == step} == ({0, 2, 3} if when != "met" else set())


@pytest.mark.parametrize(
    ("die", "left"),
    [
        ({0: (0, "work"), 1: (1, "barrier"), 2: (1, "meeting")}, (3,)),
        *(({0: (1, first), 2: (1, second)}, (1, 3)) for first in WHENS for second in WHENS),
    ],
    ids=str,
)
async def test_several_are_lost_who_took_over_among_them(
    die: dict[int, tuple[int, str]], left: tuple[int, ...]
) -> None:
    async with sb.StreamBalancer(knobs(4, **LOCKSTEP)) as balancer:
        crew = Crew(MemoryNetwork(dp_size=4), die.copy())
        await crew.run(balancer, some(60), on_rank_loss="replan")
        crew.check(balancer, 60)
        assert crew.present[4] == left


@pytest.mark.parametrize("lost", range(3))
async def test_a_rank_that_owed_nothing_but_padding_is_given_up_while_the_others_wait(lost: int) -> None:
    async with sb.StreamBalancer(knobs(3)) as balancer:
        crew = Crew(MemoryNetwork(dp_size=3), {lost: (0, "work")})
        await crew.run(balancer, some(2), on_rank_loss="replan", rejoin_timeout_s=30.0)
        crew.check(balancer, 2)
        assert crew.present == {0: tuple(rank for rank in range(3) if rank != lost)}


async def test_the_last_rank_is_raised_and_the_next_serve_goes_on() -> None:
    async with sb.StreamBalancer(knobs(2)) as balancer:
        crew = Crew(MemoryNetwork(dp_size=2), {0: (1, "work"), 1: (1, "meeting")})
        with pytest.raises(BaseExceptionGroup) as caught:
            await crew.run(balancer, some(60), on_rank_loss="replan")
        assert caught.group_contains(sb.errors.RankLostError)
        again = Crew(crew.network)
        again.met, again.ends = crew.met, crew.ends
        crew.network.resize(balancer.config.dp_size)
        async with anyio.create_task_group() as tasks:
            for rank in range(2):
                tasks.start_soon(partial(again.train, rank, incarnation=1, dp_size=balancer.config.dp_size))
            tasks.start_soon(partial(serve, on_rank_loss="replan"), balancer, crew.network)
            balancer.end()
        assert balancer.statistics().waiting == balancer.statistics().in_flight == 0


@pytest.mark.parametrize("incarnation", [0, 1])
@pytest.mark.parametrize("loads", [None, 0])
@pytest.mark.parametrize("when", WHENS)
async def test_a_rank_that_dies_in_a_step_and_comes_back_in_time_is_waited_for(
    when: str, loads: int | None, incarnation: int
) -> None:
    """With the weights of the others, loaded before it joins or after it was told."""
    crew = Crew(MemoryNetwork(dp_size=3), {1: (1, when)})

    async def again() -> None:
        await anyio.sleep(50)
        next_step = (2 if when == "met" else 1) if loads is None else 0
        await crew.train(1, incarnation=incarnation, loads=loads, next_step=next_step)

    async with sb.StreamBalancer(knobs(3, **FREE)) as balancer:
        await crew.run(balancer, some(60), again, rejoin_timeout_s=100.0, on_rank_loss="replan")
        crew.check(balancer, 60)
    assert set(crew.present.values()) == {(0, 1, 2)}
    assert not crew.errors


async def test_a_rank_that_comes_back_with_new_weights_is_told_whose_it_lacks() -> None:
    crew = Crew(MemoryNetwork(dp_size=3), {1: (1, "met")})

    async def again() -> None:
        await anyio.sleep(50)
        await crew.train(1, incarnation=1)
        [error] = crew.errors
        assert isinstance(error, sb.errors.RankLostError)
        assert "weights of rank 1 contain all steps before 0 and lack step 1; those of rank" in str(error)

    async with sb.StreamBalancer(knobs(3, **FREE)) as balancer:
        await crew.run(balancer, some(60), again, rejoin_timeout_s=100.0, on_rank_loss="replan")
        crew.check(balancer, 60)
    assert crew.present[4] == (0, 2)


async def test_a_rank_that_was_given_up_takes_part_again_from_a_later_step() -> None:
    async with sb.StreamBalancer(knobs(3)) as balancer:
        crew = Crew(MemoryNetwork(dp_size=3), {1: (1, "work")})

        async def later() -> None:
            await anyio.sleep(200)
            assert balancer.config.dp_size == 2
            await crew.train(1, incarnation=1, loads=0)

        crew.seconds = lambda rank, step: 1.0 if step < 3 else 100.0
        await crew.run(balancer, some(96), later, on_rank_loss="replan")
        crew.check(balancer, 96)
        assert balancer.config.dp_size == 3
        assert (crew.present[1], crew.present[7]) == ((0, 2), (0, 1, 2))


async def test_a_process_that_was_given_up_must_not_come_back_and_a_new_one_may() -> None:
    """It may live behind a broken network, with a gradient that others do again."""
    async with sb.StreamBalancer(knobs(2)) as balancer:
        crew = Crew(MemoryNetwork(dp_size=2))

        async def breaks() -> None:
            await anyio.sleep(15)
            peer = crew.peers[1]
            peer.cut(seen_by=[0])
            await anyio.sleep(50)
            peer.cut(seen_by=[1])
            await anyio.sleep(50)
            [error] = crew.errors
            assert isinstance(error, sb.errors.RefusedError)
            assert "rank 1 was given up or replaced: start its processes under a higher incarnation" in str(error)
            await crew.train(1, loads=0)

        crew.seconds = lambda rank, step: 10.0
        crew.rejoin = True
        await crew.run(balancer, some(240), breaks, on_rank_loss="replan")
        crew.check(balancer, 240)
        assert crew.present[max(crew.present)] == (0, 1)


async def test_mini_batches_stay_as_they_are() -> None:
    async with sb.StreamBalancer(knobs(2, mini_batches=2)) as balancer:
        with pytest.raises(sb.errors.ConfigError, match=r"mini_batches=2: ranks meet several times"):
            await serve(balancer, MemoryNetwork(dp_size=2), on_rank_loss="replan")


@asynccontextmanager
async def one_step(dp_size: int) -> AsyncIterator[tuple[sb.StreamBalancer, MemoryNetwork]]:
    """A controller that waits a minute for who is lost, and has a step to give."""
    async with sb.StreamBalancer(knobs(dp_size)) as balancer, anyio.create_task_group() as tasks:
        network = MemoryNetwork(dp_size=dp_size)
        for one in some(12):
            await balancer.put(one)
        tasks.start_soon(partial(serve, on_rank_loss="replan", rejoin_timeout_s=60.0), balancer, network)
        yield balancer, network
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("back", [False, True])
async def test_who_asks_again_in_a_step_that_others_have_met_in_without_it_learns_so(back: bool) -> None:
    """Its own all_reduce failed, though that of the others was through; also if one of those is lost and back."""

    async def work(step: Any) -> None:
        assert list(step)
        assert (await step.async_finish()).ranks == (0, 1, 2)

    async with one_step(3) as (balancer, network):
        feeds = [sb.RankFeed(network.connect(rank)) for rank in range(3)]
        steps = [await anext(feed) for feed in feeds]
        async with anyio.create_task_group() as meeting:
            for step in steps:
                meeting.start_soon(work, step)
        steps[0].ack()
        steps[2].ack()
        await settle()
        if back:
            kill(feeds[0])
            sb.RankFeed(network.connect(0, incarnation=1))
            await settle()
        steps[1].failed()
        await settle()
        assert await steps[1].async_finish() is None
        for _ in range(2):  # it raises, however often it is asked
            with pytest.raises(sb.errors.RankLostError, match=r"weights of rank 1 .* lack step 0; those of rank 2"):
                await anext(feeds[1])
        if not back:  # with the others' weights it goes on
            feeds[1].load_state_dict(feeds[2].state_dict())
            await helpers.fill(balancer, [5] * 12, prefix="next")
            assert (await anext(feeds[1])).step == 1


async def test_a_rank_that_begins_a_step_again_has_not_met_in_it() -> None:
    """It was through with the step, and had not acknowledged it: its checkpoint is older."""
    async with one_step(1) as (balancer, network):
        feed = sb.RankFeed(network.connect(0), auto_ack=False)
        step = await anext(feed)
        assert list(step)
        assert (await step.async_finish()).ranks == (0,)
        with anyio.move_on_after(1.0):
            await anext(feed)
        kill(feed)
        feed = sb.RankFeed(network.connect(0, incarnation=1))
        step = await anext(feed)
        assert step.step == 0
        assert list(step)
        assert (await step.async_finish()).rollouts == 12
        balancer.end()
        assert [batch async for batch in feed] == []
        assert balancer.statistics().acknowledged == 12


async def test_a_rank_with_padding_only_begins_a_step_that_is_divided_last() -> None:
    """What others fetch may be gone: so the sizes come once all are through, this rank among them."""
    network = MemoryNetwork(dp_size=2)
    crew, kept = Crew(network), Kept(network)
    crew.connect = partial(kept.port, network)
    async with sb.StreamBalancer(knobs(2)) as balancer:
        await crew.run(balancer, [kept.remote(make_rollout(5, "alone"))], on_rank_loss="replan")
        crew.check(balancer, 1)
