"""The balancer in a Ray actor, on a small cluster of real processes: the transport contract, puts, feeds."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch
from children import ending_with_us
from guard import GUARD_S
from scripted import same_rollout

ray = pytest.importorskip("ray")

from ray_cluster import STORE_BYTES, Worker, host_among_others, kill  # noqa: E402

import stream_balancer as sb  # noqa: E402
from stream_balancer.client.object_store import INLINE_BYTES as STORED  # noqa: E402
from stream_balancer.ray import RayBalancer, host  # noqa: E402
from stream_balancer.testing import make_rollout  # noqa: E402


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Real time: actors are other processes."""
    return str(request.param)


also_on_trio_when_slow = pytest.mark.parametrize(
    "anyio_backend", ["asyncio", pytest.param("trio", marks=pytest.mark.slow)], indirect=True
)
"""Of tests that kill an actor of their own."""
pytestmark = pytest.mark.usefixtures("nodes")


# --- puts and feeds --------------------------------------------------------------------------------------------------


@asynccontextmanager
async def hosted(*, alone: bool = False, **knobs: Any) -> AsyncIterator[RayBalancer]:
    """A balancer, full at four, in an actor of its own or the shared one."""
    of_host = ("journal", "staged_bytes", "rejoin_timeout_s", "report_after_s")
    options = {key: knobs.pop(key) for key in of_host if key in knobs}
    config = sb.BalancerConfig(**{"dp_size": 1, "batch_size": 4, "window": 4, "capacity": 4, **knobs})
    with anyio.fail_after(GUARD_S):

        def begin() -> tuple[RayBalancer, Callable[[], None]]:
            if not alone:
                return host_among_others(config, **options)
            balancer = host(config, **options)
            return balancer, lambda: ray.kill(balancer.actor)

        balancer, stop = await anyio.to_thread.run_sync(begin)
        try:
            yield balancer
        finally:
            with anyio.CancelScope(shield=True):
                await balancer.producer.aclose()
                await anyio.to_thread.run_sync(stop)


async def until(balancer: RayBalancer, condition: Callable[[sb.Statistics], bool]) -> None:
    while not condition(await balancer.statistics()):  # noqa: ASYNC110 - an actor has no event for a test
        await anyio.sleep(0.01)


async def train(balancer: RayBalancer, rank: int, got: list[sb.Rollout]) -> None:
    """Everything this rank gets."""
    async with balancer.feed(rank=rank) as feed:
        async for batch in feed:
            got.extend(rollout for rollout in batch.rollouts if not rollout.is_padding)


async def verdict(put: Awaitable[object]) -> tuple[str, str]:
    try:
        await put
    except Exception as error:  # noqa: BLE001 - compared
        return type(error).__name__, str(error)
    return "accepted", ""


async def test_bits_and_fields_arrive_as_they_were_put() -> None:
    """Inline and stored, with every kind of field."""
    lengths = [1, 7, STORED, 300, 2 * STORED, STORED + 1, 5, 6]
    made = [make_rollout(length, f"s{n}", group_id=f"g{n // 2}", version=n) for n, length in enumerate(lengths)]
    got: list[sb.Rollout] = []
    async with hosted(capacity=8, window=8) as balancer, anyio.create_task_group() as tasks:
        tasks.start_soon(train, balancer, 0, got)
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


async def test_what_is_acknowledged_is_freed() -> None:
    async with hosted(capacity=8) as balancer:
        for n in range(8):
            await balancer.put(make_rollout(STORED, f"f{n}"))
        held = balancer.producer._kept  # type: ignore[attr-defined]
        assert held
        async with balancer.feed(rank=0) as feed:
            first = await anext(feed)
            second = await anext(feed)
            assert len({r.rollout_id for r in (*first.rollouts, *second.rollouts)}) == 8
            assert held, "the second batch is not acknowledged"
            second.ack()
            await balancer.producer.released()
            assert held is not None
            assert not len(held)


# --- deaths ----------------------------------------------------------------------------------------------------------


async def _asked(ref: Any) -> Any:
    return await anyio.to_thread.run_sync(functools.partial(ray.get, ref, timeout=GUARD_S))


@also_on_trio_when_slow
async def test_a_killed_worker_s_waiting_rollouts_are_named_and_the_rest_go_on() -> None:
    async with hosted(capacity=64, window=32) as balancer, anyio.create_task_group() as tasks:
        doomed = ray.remote(Worker).options(num_cpus=0).remote(balancer)
        label, pid = await _asked(doomed.label.remote()), await _asked(doomed.pid.remote())
        stored = await _asked(doomed.put.remote([f"d{n}" for n in range(6)], STORED))
        inline = await _asked(doomed.put.remote([f"i{n}" for n in range(3)], 5, 1))
        await balancer.put(make_rollout(STORED, "mine"))
        os.kill(pid, signal.SIGKILL)
        await until(balancer, lambda now: now.evicted["lost"] == 6)
        assert {(lost.rollout_id, lost.holder, lost.step) for lost in await balancer.lost_rollouts()} == {
            (name, label, None) for name in stored
        }
        await balancer.put(make_rollout(STORED, "d0"))  # it may be put again
        got: list[sb.Rollout] = []
        tasks.start_soon(train, balancer, 0, got)
        await balancer.end()
        await balancer.producer.released()
    assert sorted(one.rollout_id for one in got) == sorted([*inline, "mine", "d0"])


@pytest.fixture
def doomed_node(nodes: Any) -> Any:
    return nodes.add_node(num_cpus=1, resources={"doomed": 1}, object_store_memory=STORE_BYTES)


@also_on_trio_when_slow
async def test_a_killed_node_during_training(nodes: Any, doomed_node: Any) -> None:
    """Every accepted rollout is trained on once, or named with the node that took it along."""
    knobs = {"dp_size": 2, "batch_size": 8, "window": 16, "capacity": 64}
    async with hosted(**knobs) as balancer, anyio.create_task_group() as tasks:
        doomed = ray.remote(Worker).options(num_cpus=0, resources={"doomed": 1}).remote(balancer)
        label = await _asked(doomed.label.remote())
        trained: list[list[tuple[str, bool]]] = [[], []]
        go_on = anyio.Event()
        go_on.set()

        async def collect(rank: int) -> None:
            async with balancer.feed(rank=rank) as feed:
                async for batch in feed:
                    weights = [w for mb in batch.micro_batches for w in mb.packed().rollout_weights.tolist()]
                    for rollout, weight in zip(batch.rollouts, weights, strict=True):
                        assert rollout.is_padding == (weight == 0.0)
                        if not rollout.is_padding:
                            length = rollout.num_tokens
                            assert same_rollout(rollout, make_rollout(length, rollout.rollout_id))
                        trained[rank].append((rollout.rollout_id, rollout.is_padding))
                    await go_on.wait()

        for rank in range(2):
            tasks.start_soon(collect, rank)
        theirs = [f"n{n}" for n in range(2000)]
        putting = doomed.put.remote(theirs, STORED)
        mine = [f"m{n}" for n in range(100)]
        for name in mine[:60]:
            await balancer.put(make_rollout(STORED, name))
        go_on = anyio.Event()
        await until(balancer, lambda now: now.waiting >= 48)
        await anyio.to_thread.run_sync(lambda: nodes.remove_node(doomed_node, allow_graceful=False))
        with pytest.raises(ray.exceptions.RayError):
            await _asked(putting)
        go_on.set()
        for name in mine[60:]:
            await balancer.put(make_rollout(STORED, name))
        while label in await balancer._call("producers"):  # noqa: ASYNC110 - then what it had is evicted, or in flight
            await anyio.sleep(0.01)
        await balancer.end()
        await balancer.producer.released()
        async with balancer.producer:
            pass
        stats, lost = await balancer.statistics(), await balancer.lost_rollouts()
    real = [name for rank in trained for name, is_padding in rank if not is_padding]
    named = [one.rollout_id for one in lost]
    assert len(real) == len(set(real))
    assert set(mine) <= set(real)
    assert not set(real) & set(named)
    assert {one.holder for one in lost} == {label}
    assert len(real) + len(named) == stats.accepted
    assert stats.evicted["lost"] == len(named)


@also_on_trio_when_slow
async def test_a_killed_actor_comes_back_from_its_journal(tmp_path: Path) -> None:
    """Workers and ranks wait for it by themselves; every rollout is trained on once, though it dies at any moment."""
    knobs = {"dp_size": 2, "batch_size": 8, "window": 16, "capacity": 64}
    async with (
        hosted(alone=True, journal=tmp_path / "journal", **knobs) as balancer,
        anyio.create_task_group() as tasks,
    ):
        got: list[sb.Rollout] = []
        accepted: list[str] = []

        async def put(name: str, length: int) -> None:
            await balancer.put(make_rollout(length, name))
            accepted.append(name)

        for rank in range(2):
            tasks.start_soon(train, balancer, rank, got)
        for round_ in range(3):
            async with anyio.create_task_group() as puts:
                for n in range(60):
                    puts.start_soon(put, f"{round_}.{n}", STORED if n % 10 == 0 else 20)
                if round_ < 2:
                    await anyio.sleep(0.03)
                    await anyio.to_thread.run_sync(kill, balancer.actor)
        await balancer.end()
    assert sorted(one.rollout_id for one in got) == sorted(accepted)
    assert len(accepted) == len(set(accepted)) == 180


@also_on_trio_when_slow
async def test_an_actor_without_a_journal_is_lost_for_good() -> None:
    async with hosted(alone=True) as balancer:
        for n in range(4):
            await balancer.put(make_rollout(5, f"l{n}"))
        outcome: list[tuple[str, str]] = []

        async def put() -> None:
            outcome.append(await verdict(balancer.put(make_rollout(5, "late"))))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(put)
            await until(balancer, lambda now: now.blocked_puts == 1)
            await anyio.to_thread.run_sync(kill, balancer.actor)
        [(kind, text)] = outcome
        assert kind == "BrokenResourceError"
        assert "late" in text
        with pytest.raises(sb.errors.BrokenResourceError):
            await balancer.put(make_rollout(5, "later"))
        async with balancer.feed(rank=0) as feed:
            with pytest.raises(sb.errors.RankLostError):
                await anext(feed)


async def test_the_actor_is_steered_from_anywhere(tmp_path: Path) -> None:
    async with hosted(staleness=sb.Staleness(max_versions=2), journal=tmp_path / "journal") as balancer:
        balancer.set_version(3)
        assert await balancer.version_after(2) == 3, "it need not be awaited"
        await balancer.set_version(2)
        assert balancer.version == 3, "an older one changes nothing"
        await balancer.put(make_rollout(5, "old", version=3))
        assert "1 rollout waits (window 4)" in await balancer.why_no_batch()
        await balancer.reconfigure(window=8, capacity=16)
        with pytest.raises(sb.errors.ConfigError):
            await balancer.reconfigure(window=1)
        await balancer.acknowledge_through(7)
        state = await balancer.state_dict()
        await balancer.set_version(9)
        assert (await balancer.statistics()).evicted["stale"] == 1
    async with hosted(staleness=sb.Staleness(max_versions=2)) as balancer:
        await balancer.load_state_dict(state)
        assert (await balancer.statistics()).waiting == 1
        await balancer.put(make_rollout(STORED, "stored", version=3))
        with pytest.raises(ValueError, match="stored"):
            await balancer.state_dict()


def in_a_log(says: str) -> bool:
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    return any(says in path.read_text(errors="replace") for path in logs.glob("worker-*.err"))


@also_on_trio_when_slow
async def test_the_actors_log_says_that_no_worker_ever_came() -> None:
    async with hosted(alone=True, report_after_s=1.0) as balancer, anyio.create_task_group() as tasks:
        tasks.start_soon(train, balancer, 0, [])
        while not in_a_log("no rollout waits; 4 make a window; no producer has connected"):  # noqa: ASYNC110
            await anyio.sleep(0.1)
        tasks.cancel_scope.cancel()


async def test_a_full_store_holds_puts_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """No error; and a put that is cancelled meanwhile was not accepted."""
    full = True
    real_put = ray.put

    def put(value: Any) -> Any:
        if full:
            raise ray.exceptions.ObjectStoreFullError("full")
        return real_put(value)

    monkeypatch.setattr(ray, "put", put)
    async with hosted(capacity=8) as balancer:
        await balancer.put(make_rollout(5, "inline"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(balancer.put, make_rollout(STORED, "waits"))
            with anyio.move_on_after(0.3) as scope:
                await balancer.put(make_rollout(STORED, "cancelled"))
            assert scope.cancelled_caught
            assert (await balancer.statistics()).accepted == 1
            full = False
        await balancer.put(make_rollout(STORED, "cancelled"))
        assert (await balancer.statistics()).accepted == 3
        full = True
        with anyio.move_on_after(0.3):
            await balancer.put(make_rollout(STORED, "left"))
        async with anyio.create_task_group() as tasks:
            outcome: list[tuple[str, str]] = []

            async def put_and_be_closed() -> None:
                outcome.append(await verdict(balancer.put(make_rollout(STORED, "closed"))))

            tasks.start_soon(put_and_be_closed)
            await anyio.sleep(0.2)
            await balancer.producer.aclose()
        assert outcome[0][0] == "ClosedResourceError"


async def test_more_than_the_store_holds_goes_through_it() -> None:
    """Four times the store's size; accepted rollouts are bounded by max_bytes."""
    async with hosted(capacity=64, window=4, max_bytes=32 * 2**20, staged_bytes=2**24) as balancer:
        trained = 0

        async def collect() -> None:
            nonlocal trained
            async with balancer.feed(rank=0) as feed:
                async for batch in feed:  # holds none of them
                    trained += sum(not r.is_padding for r in batch.rollouts)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collect)
            async with anyio.create_task_group() as puts:
                for n in range(4 * STORE_BYTES // 2**22):
                    ids = torch.full((2**19,), n)  # 4 MiB
                    puts.start_soon(balancer.put, sb.Rollout(tokens={"input_ids": ids}, rollout_id=f"big{n}"))
            await balancer.end()
        assert trained == 4 * STORE_BYTES // 2**22


@pytest.mark.parametrize("journal", [[], pytest.param(["--journal"], marks=pytest.mark.slow)], ids=["store", "journal"])
def test_the_example_runs(journal: list[str]) -> None:
    path = Path(__file__).parents[2] / "examples" / "ray_cluster.py"
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        ending_with_us(sys.executable, path, "--address", address, *journal),
        capture_output=True,
        text=True,
        timeout=GUARD_S,
    )
    assert done.returncode == 0, done.stderr
    trained = [int(line.split()[2]) for line in done.stdout.splitlines() if line.startswith("rank")]
    assert len(trained) == 2
    assert sum(trained) == 120
