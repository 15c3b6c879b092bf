"""The balancer in a Ray actor, on a small cluster of real processes: the transport contract, puts, feeds."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
import pytest

ray = pytest.importorskip("ray")

from ray_cluster import ContractHost, cluster  # noqa: E402

import stream_balancer as sb  # noqa: E402
from stream_balancer.integrations.ray import RayBalancer, find, host  # noqa: E402
from stream_balancer.testing import make_rollout  # noqa: E402
from stream_balancer.testing.transports import CLAUSES, same_rollout  # noqa: E402
from stream_balancer.transport.ray import INLINE_BYTES  # noqa: E402

pytestmark = pytest.mark.timeout(300)
GUARD_S = 60  # against hangs; nothing here is timed
STORED = INLINE_BYTES  # tokens that make a rollout go to the object store


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Real time: actors are other processes."""
    return str(request.param)


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with cluster():
        yield


# --- the contract ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def contract() -> Any:
    return ray.remote(ContractHost).options(num_cpus=0, max_concurrency=1000).remote()


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda clause: clause.__name__)
def test_clause(clause: Any, contract: Any) -> None:
    ray.get(contract.clause.remote(clause.__name__), timeout=GUARD_S)


def test_contract(contract: Any) -> None:
    ray.get(contract.contract.remote(), timeout=250)


# --- puts and feeds --------------------------------------------------------------------------------------------------

_NAMES = (f"r{n}" for n in itertools.count())


@asynccontextmanager
async def hosted(**knobs: Any) -> AsyncIterator[RayBalancer]:
    """A balancer, full at four."""
    options = {key: knobs.pop(key) for key in ("journal", "staged_bytes") if key in knobs}
    config = sb.BalancerConfig(**{"dp_size": 1, "batch_size": 4, "window": 4, "capacity": 4, **knobs})
    with anyio.fail_after(GUARD_S):
        balancer = await anyio.to_thread.run_sync(lambda: host(config, **options))
        try:
            yield balancer
        finally:
            with anyio.CancelScope(shield=True):
                await balancer.producer.aclose()
            ray.kill(balancer.actor)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    while not await condition():  # noqa: ASYNC110 - an actor has no event for a test
        await anyio.sleep(0.01)


async def train(balancer: RayBalancer, rank: int = 0) -> list[sb.Rollout]:
    """Everything this rank gets."""
    async with balancer.feed(rank=rank) as feed:
        return [rollout async for batch in feed for rollout in batch.rollouts if not rollout.is_padding]


async def verdict(put: Awaitable[object]) -> tuple[str, str]:
    try:
        await put
    except Exception as error:  # noqa: BLE001 - compared
        return type(error).__name__, str(error)
    return "accepted", ""


def rollouts_of_all_sizes() -> list[sb.Rollout]:
    """Inline and stored, with every kind of field."""
    lengths = [1, 7, STORED, 300, 2 * STORED, STORED + 1, 5, 6]
    return [make_rollout(length, f"s{n}", group_id=f"g{n // 2}", version=n) for n, length in enumerate(lengths)]


@ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
def work(balancer: RayBalancer, name: str, backend: str | None, lengths: list[int]) -> int:
    """A worker process: puts at once; returns how many were accepted."""
    import functools

    made = [make_rollout(length, f"{name}.{n}") for n, length in enumerate(lengths)]

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for rollout in made:
                tasks.start_soon(balancer.put, rollout)

    if backend is None:
        for rollout in made:
            balancer.blocking.put(rollout)
    else:
        anyio.run(functools.partial(main), backend=backend)
    return len(made)


@ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
def train_in_a_process(balancer: RayBalancer, rank: int) -> list[tuple[str, int]]:
    feed = balancer.feed(rank=rank)
    return [
        (rollout.rollout_id, int(rollout.tokens["input_ids"].sum()))
        for batch in feed
        for rollout in batch.rollouts
        if not rollout.is_padding
    ]


def test_workers_and_ranks_in_processes_of_their_own() -> None:
    balancer = host(sb.BalancerConfig(dp_size=2, batch_size=8, window=16), name="here")
    lengths = [1 + (7919 * n) % 3000 for n in range(20)] + [STORED, 2 * STORED]
    ranks = [train_in_a_process.remote(find("here"), rank) for rank in range(2)]
    workers = [work.remote(balancer, str(b), b, lengths) for b in ("asyncio", "trio", None)]
    assert ray.get(workers, timeout=GUARD_S) == [len(lengths)] * 3
    ray.get(balancer.actor._call.remote("end"))
    trained = [one for rank in ray.get(ranks, timeout=GUARD_S) for one in rank]
    expected = [
        (f"{name}.{n}", int(make_rollout(length, f"{name}.{n}").tokens["input_ids"].sum()))
        for name in ("asyncio", "trio", "None")
        for n, length in enumerate(lengths)
    ]
    assert sorted(trained) == sorted(expected)
    ray.kill(balancer.actor)


async def test_bits_and_fields_arrive_as_they_were_put() -> None:
    async with hosted(capacity=8, window=8) as balancer, anyio.create_task_group() as tasks:
        made = rollouts_of_all_sizes()
        got: list[sb.Rollout] = []

        async def collect() -> None:
            got.extend(await train(balancer))

        tasks.start_soon(collect)
        for rollout in made[:4]:
            await balancer.put(rollout)
        await balancer.put_group(made[4:6])
        balancer.put_nowait(made[6])
        await balancer.put(made[7])
        await balancer.end()
        await balancer.producer.released()
    by_id = {rollout.rollout_id: rollout for rollout in got}
    assert len(got) == len(by_id) == len(made)
    assert all(same_rollout(rollout, by_id[rollout.rollout_id]) for rollout in made)


async def test_a_batch_is_the_rank_s_own_to_write_into() -> None:
    """The store's memory is read-only, and shared."""
    async with hosted(batch_size=1, window=1) as balancer:
        await balancer.put(make_rollout(STORED, "a"))
        async with balancer.feed(rank=0) as feed:
            batch = await anext(feed)
            for micro_batch in batch.micro_batches:
                micro_batch.packed()["input_ids"].zero_()
            batch.ack()


async def test_what_is_acknowledged_is_freed() -> None:
    async with hosted(capacity=8) as balancer:
        for n in range(8):
            await balancer.put(make_rollout(STORED, f"f{n}"))
        held = balancer.producer._port._held  # type: ignore[attr-defined]
        assert held
        async with balancer.feed(rank=0) as feed:
            first = await anext(feed)
            second = await anext(feed)
            assert len({r.rollout_id for r in (*first.rollouts, *second.rollouts)}) == 8
            assert held, "the second batch is not acknowledged"
            second.ack()
            await balancer.producer.released()
            assert not held


async def test_every_refusal_is_the_balancer_s_own() -> None:
    knobs: dict[str, Any] = {"max_tokens_per_micro_batch": 50, "capacity_bytes": 10_000}
    local = sb.StreamBalancer(sb.BalancerConfig(dp_size=1, batch_size=4, window=4, capacity=4, **knobs))
    bad = [
        make_rollout(5, "a"),
        make_rollout(51, "long"),
        sb.Rollout(tokens={"input_ids": [1, 2]}, rollout_id="columns"),
        make_rollout(5, "p").padding_copy("padding"),
    ]
    async with hosted(**knobs) as balancer:
        assert await verdict(balancer.put(make_rollout(5, "a"))) == ("accepted", "")
        await local.put(make_rollout(5, "a"))
        for rollout in bad:
            here = await verdict(local.put(rollout))
            assert here[0] in ("RolloutError", "DuplicateRolloutError")
            assert await verdict(balancer.put(rollout)) == here
        for n in range(3):
            await balancer.put(make_rollout(5, f"more{n}"))
        with pytest.raises(sb.WouldBlock):
            balancer.put_nowait(make_rollout(5, "late"))
        for group in ([], [make_rollout(5, "x")], [make_rollout(5, "x", group_id="g"), make_rollout(5, "y")]):
            assert (await verdict(balancer.put_group(group)))[0] == "RolloutError"
        await balancer.end()
        local.end()
        closed = await verdict(local.put(make_rollout(5, "z")))
        assert await verdict(balancer.put(make_rollout(5, "z"))) == closed
        assert closed[0] == "ClosedResourceError"


async def test_a_full_balancer_holds_puts_back() -> None:
    async with hosted() as balancer, anyio.create_task_group() as tasks:
        done: list[str] = []

        async def put(name: str) -> None:
            await balancer.put(make_rollout(3, name))
            done.append(name)

        for n in range(4):
            await put(f"b{n}")
        for n in range(4, 9):
            tasks.start_soon(put, f"b{n}")
            await until(lambda n=n: _blocked(balancer, n - 3))  # type: ignore[misc]
        assert done == [f"b{n}" for n in range(4)]
        async with balancer.feed(rank=0, depth=1) as feed:
            await anext(feed)
            await anext(feed)
            await until(lambda: _blocked(balancer, 0))
            assert sorted(done) == [f"b{n}" for n in range(9)]


async def _blocked(balancer: RayBalancer, count: int) -> bool:
    return (await balancer.statistics()).blocked_puts == count


async def test_a_cancelled_put_was_not_accepted() -> None:
    """At any moment: what was cancelled is not trained on, what returned is."""
    choose = random.Random(7)
    async with hosted(capacity=16, window=8) as balancer, anyio.create_task_group() as tasks:
        accepted: list[str] = []
        trained: list[str] = []

        async def collect() -> None:
            trained.extend(rollout.rollout_id for rollout in await train(balancer))

        async def put(name: str, length: int, patience_s: float) -> None:
            with anyio.move_on_after(patience_s):
                await balancer.put(make_rollout(length, name))
                accepted.append(name)

        async with anyio.create_task_group() as puts:
            for n in range(60):
                length = STORED if n % 6 == 0 else 10
                puts.start_soon(put, f"c{n}", length, choose.choice([0.0, 0.001, 0.003, 0.006, 0.02, 0.1, GUARD_S]))
                if n == 30:
                    tasks.start_soon(collect)
        await balancer.end()
    assert sorted(trained) == sorted(accepted)
    assert 0 < len(accepted) < 60
