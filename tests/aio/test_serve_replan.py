"""``serve`` with ranks that are lost for good, slow, more or fewer: each rollout is in one gradient, once."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import anyio
import pytest
from crew import WHENS, Crew
from kept import Kept

import stream_balancer as sb
from stream_balancer.host.serve import serve
from stream_balancer.testing import make_rollout
from stream_balancer.testing.network import MemoryNetwork
from stream_balancer.types import Rollout, SharedRollout


def knobs(dp_size: int, **more: Any) -> sb.BalancerConfig:
    return sb.BalancerConfig(**{"dp_size": dp_size, "batch_size": 12, "window": more.get("batch_size", 12), **more})


def some(number: int, name: str = "r") -> list[Rollout]:
    """Every sixth is far above the fair share of any number of ranks."""
    return [make_rollout(900 if n % 6 == 5 else 1 + 7 * n % 30, f"{name}{n}") for n in range(number)]


CAPPED = {"max_tokens_per_micro_batch": 1000}
LOCKSTEP = {"sync": "micro_batch", "max_tokens_per_micro_batch": 1000}
SHARED = {"cp_sizes": (1, 2, 4), "cp_min_tokens": 100}
FREE = {"micro_batch_counts": "free"}
PLANS: list[dict[str, Any]] = [{}, CAPPED, LOCKSTEP, SHARED, {**SHARED, "sync": "micro_batch"}]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("step", [0, 2])
async def test_what_a_lost_rank_owed_is_done_by_the_others_in_the_same_step(
    step: int, when: str, plan: dict[str, Any]
) -> None:
    """Also where ranks meet at every micro-batch, or share rollouts: then those begin the step again."""
    async with sb.StreamBalancer(knobs(4, **plan)) as balancer:
        crew = Crew(MemoryNetwork(dp_size=4), {1: (step, when)})
        await crew.run(balancer, some(60), on_rank_loss="replan")
        crew.check(balancer, 60)
        lost_before_they_met = step if when != "met" else step + 1
        without = [number for number, ranks in crew.present.items() if ranks == (0, 2, 3)]
        assert without == list(range(lost_before_they_met, 5))
        assert balancer.config.dp_size == 3
        assert not crew.errors
        assert any(isinstance(one, SharedRollout) for one in crew.seen.values()) == ("cp_sizes" in plan)
        if plan is LOCKSTEP and when != "met":
            assert {rank for rank, number in crew.rewound if number == step} == {0, 2, 3}


async def test_nobody_begins_again_where_nothing_is_shared() -> None:
    async with sb.StreamBalancer(knobs(3)) as balancer:
        crew = Crew(MemoryNetwork(dp_size=3), {1: (1, "work")})
        await crew.run(balancer, some(60), on_rank_loss="replan")
        crew.check(balancer, 60)
        assert crew.rewound == crew.dropped == []
        assert len(crew.trained) == 60


@pytest.mark.parametrize("second", WHENS)
@pytest.mark.parametrize("first", WHENS)
async def test_two_ranks_are_lost_in_one_step(first: str, second: str) -> None:
    async with sb.StreamBalancer(knobs(4, **LOCKSTEP)) as balancer:
        crew = Crew(MemoryNetwork(dp_size=4), {0: (1, first), 2: (1, second)})
        await crew.run(balancer, some(60), on_rank_loss="replan")
        crew.check(balancer, 60)
        assert crew.present[4] == (1, 3)


async def test_the_last_rank_is_raised_and_the_next_serve_goes_on() -> None:
    async with sb.StreamBalancer(knobs(2)) as balancer:
        crew = Crew(MemoryNetwork(dp_size=2), {0: (1, "work"), 1: (1, "meeting")})
        with pytest.raises(BaseExceptionGroup) as caught:
            await crew.run(balancer, some(60), on_rank_loss="replan")
        assert caught.group_contains(sb.RankLostError)
        again = Crew(crew.network)
        again.met, again.ends = crew.met, crew.ends
        crew.network.resize(balancer.config.dp_size)
        async with anyio.create_task_group() as tasks:
            for rank in range(2):
                tasks.start_soon(partial(again.train, rank, incarnation=1, dp_size=balancer.config.dp_size))
            tasks.start_soon(partial(serve, on_rank_loss="replan"), balancer, crew.network)
            balancer.end()
        assert balancer.statistics().waiting == balancer.statistics().in_flight == 0


async def test_a_rank_that_dies_at_the_barrier_and_comes_back_in_time_is_waited_for() -> None:
    async with sb.StreamBalancer(knobs(3)) as balancer:
        for when in ("work", "barrier", "meeting"):
            crew = Crew(MemoryNetwork(dp_size=3), {1: (1, when)})

            async def again(crew: Crew = crew) -> None:
                await anyio.sleep(50)
                await crew.train(1, incarnation=1)

            async with sb.StreamBalancer(knobs(3)) as balancer:
                await crew.run(balancer, some(60), again, on_rank_loss="replan", rejoin_timeout_s=100.0)
                crew.check(balancer, 60)
                assert set(crew.present.values()) == {(0, 1, 2)}, when


async def test_a_rank_that_was_given_up_takes_part_again_from_a_later_step() -> None:
    async with sb.StreamBalancer(knobs(3)) as balancer:
        crew = Crew(MemoryNetwork(dp_size=3), {1: (1, "work")})

        async def later() -> None:
            await anyio.sleep(200)
            assert balancer.config.dp_size == 2
            await crew.train(1, incarnation=1)

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
            assert isinstance(error, sb.RefusedError)
            assert "rank 1 was given up, and others have its work" in str(error)
            await crew.train(1)

        crew.seconds = lambda rank, step: 10.0
        crew.rejoin = True
        await crew.run(balancer, some(240), breaks, on_rank_loss="replan")
        crew.check(balancer, 240)
        assert crew.present[max(crew.present)] == (0, 1)


async def test_others_take_over_what_a_slow_rank_has_not_begun() -> None:
    async with sb.StreamBalancer(
        knobs(4, batch_size=32, max_tokens_per_micro_batch=1000, micro_batch_counts="free")
    ) as balancer:
        crew = Crew(MemoryNetwork(dp_size=4))
        crew.seconds = lambda rank, step: 10.0 if rank == 1 else 1.0
        await crew.run(balancer, some(128), move_late=True)
        crew.check(balancer, 128)
        work = [len([one for one in crew.trained if one[0] == rank]) for rank in range(4)]
        assert work[1] < min(work[0], work[2], work[3])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("plan", [FREE, LOCKSTEP, {**SHARED, **FREE}], ids=str)
async def test_whoever_is_lost_or_slow_and_whenever(seed: int, plan: dict[str, Any]) -> None:
    chance = random.Random(seed)
    async with sb.StreamBalancer(knobs(4, **plan)) as balancer:
        die = {rank: (chance.randrange(4), chance.choice(WHENS)) for rank in chance.sample(range(4), 3)}
        crew = Crew(MemoryNetwork(dp_size=4), die)
        crew.seconds = lambda rank, step: chance.choice([0.0, 1.0, 5.0])
        await crew.run(balancer, some(60), on_rank_loss="replan", move_late=seed % 2 == 0 and "sync" not in plan)
        crew.check(balancer, 60)


@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("plan", [FREE, LOCKSTEP, {**SHARED, **FREE}], ids=str)
async def test_payloads_that_lie_with_producers_change_hands_too(when: str, plan: dict[str, Any]) -> None:
    """Some of them are gone: masked on all ranks, whoever takes them over."""
    async with sb.StreamBalancer(knobs(3, **plan)) as balancer:
        network = MemoryNetwork(dp_size=3)
        crew, kept = Crew(network, {1: (1, when)}), Kept(network)
        crew.connect = partial(kept.port, network)
        kept.gone = {2, 14, 30}
        rollouts = some(48)
        await crew.run(
            balancer, [kept.remote(one) for one in rollouts], on_rank_loss="replan", move_late=plan is not LOCKSTEP
        )
        trained = {name for gradient in crew.met.values() for name, _ in gradient}
        assert trained == {one.rollout_id for n, one in enumerate(rollouts) if n not in kept.gone}
        assert balancer.statistics().evicted["lost"] == 3
        for step, gradient in crew.met.items():
            assert {end.rollouts for end in crew.ends[step]} == {len({name for name, _ in gradient})}


@pytest.mark.parametrize("options", [{"on_rank_loss": "replan"}, {"move_late": True}])
async def test_mini_batches_stay_as_they_are(options: dict[str, Any]) -> None:
    async with sb.StreamBalancer(knobs(2, mini_batches=2)) as balancer:
        with pytest.raises(sb.ConfigError, match="mini_batches=2: ranks meet several times"):
            await serve(balancer, MemoryNetwork(dp_size=2), **options)
