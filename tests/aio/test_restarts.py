"""A controller that is killed with a journal, and the next one: whom it waits for, and for how long."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup
from crew import Crew
from in_loop import Disk, journals_in_loop

import stream_balancer as sb
from stream_balancer.client.payloads import PayloadOwner
from stream_balancer.testing import MemoryNetwork, make_rollout
from stream_balancer.testing.network import MemoryPeer

SIZE = 8


@pytest.fixture(autouse=True, scope="module")
def _no_blocking_calls() -> None:
    """Journals write in the loop."""


@pytest.fixture
def disk() -> Iterator[Disk]:
    with journals_in_loop() as disk:
        yield disk


class Life:
    """Controllers of one journal, one after the other."""

    def __init__(self, folder: Path, disk: Disk, network: MemoryNetwork, **options: Any) -> None:
        self.folder, self.disk, self.network, self.options = folder, disk, network, options
        self.report_after_s = 1e9

    def balancer(self) -> sb.StreamBalancer:
        config = sb.BalancerConfig(dp_size=self.network.dp_size, batch_size=SIZE, window=SIZE)
        return sb.StreamBalancer(config, journal=self.folder, report_after_s=self.report_after_s)

    @asynccontextmanager
    async def serving(self, numbers: Iterable[int]) -> AsyncIterator[tuple[sb.StreamBalancer, TaskGroup]]:
        """Ends with its ``serve``; rollouts of these numbers were put."""
        async with self.balancer() as balancer, anyio.create_task_group() as tasks:
            tasks.start_soon(partial(sb.serve, **self.options), balancer, self.network)
            for number in numbers:
                await balancer.put(make_rollout(8, f"r{number}"))
            yield balancer, tasks

    async def until_killed(
        self, rollouts: int, when: Callable[[], bool], *producers: MemoryPeer, end: bool = False
    ) -> None:
        async with self.serving(range(rollouts)) as (balancer, tasks):
            if end:
                balancer.end()
            with anyio.fail_after(500):
                while not when():  # noqa: ASYNC110
                    await anyio.sleep(0.05)
            self.disk.die()
            for peer in producers:
                peer.cut()
            tasks.cancel_scope.cancel()

    async def to_the_end(self) -> sb.StreamBalancer:
        async with self.balancer() as balancer:
            balancer.end()
            with anyio.fail_after(1000):
                await sb.serve(balancer, self.network, **self.options)
        return balancer


async def test_a_rank_that_was_told_of_the_end_and_has_left_is_not_waited_for(tmp_path: Path, disk: Disk) -> None:
    """Another saves a checkpoint meanwhile, for longer than the controller lives."""
    network, through = MemoryNetwork(dp_size=2), list[int]()
    life = Life(tmp_path, disk, network)

    async def train(rank: int, *, auto_ack: bool) -> None:
        feed = sb.RankFeed(network.connect(rank, rejoin=True), auto_ack=auto_ack)
        async for step in feed:
            for _ in step:
                pass
        through.append(rank)
        await anyio.sleep(50)
        if not auto_ack:
            feed.acknowledge_through(step.step)

    async with anyio.create_task_group() as ranks:
        ranks.start_soon(partial(train, 0, auto_ack=True))
        ranks.start_soon(partial(train, 1, auto_ack=False))
        await life.until_killed(2 * SIZE, lambda: len(through) == 2, end=True)
        balancer = await life.to_the_end()
    assert balancer.statistics().acknowledged == 2 * SIZE


async def test_who_left_before_its_acknowledgement_was_on_the_disk_is_named(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    network = MemoryNetwork(dp_size=1)
    life, left = Life(tmp_path, disk, network), list[int]()

    async def train() -> None:
        async with sb.RankFeed(network.connect(0), auto_ack=False) as feed:
            async for step in feed:
                for _ in step:
                    pass
            disk.delay_s = 1e9
            step.ack()
        left.append(step.step)

    async with anyio.create_task_group() as ranks:
        ranks.start_soon(train)
        await life.until_killed(2 * SIZE, lambda: bool(left), end=True)
    disk.is_dead, disk.delay_s = False, 0.0
    life.report_after_s = 60.0
    async with life.balancer() as balancer, anyio.create_task_group() as tasks:
        balancer.end()
        tasks.start_soon(sb.serve, balancer, network)
        await anyio.sleep(100)
        [line] = [line for line in caplog.messages if line.startswith("all batches were sent")]
        assert "not yet done with them: rank 0. Not connected: rank 0. If it has left" in line
        assert "balancer.acknowledge_through(1)" in line
        balancer.acknowledge_through(1)
    assert balancer.statistics().acknowledged == 2 * SIZE


async def test_a_rank_that_does_not_come_back_is_given_up_in_time_and_named(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    network = MemoryNetwork(dp_size=3)
    crew = Crew(network, {1: (1, "work")})
    crew.rejoin = True
    life = Life(tmp_path, disk, network, on_rank_loss="replan", rejoin_timeout_s=30.0)
    async with anyio.create_task_group() as ranks:
        for rank in range(3):
            ranks.start_soon(crew.train, rank)
        await life.until_killed(4 * SIZE, lambda: not crew.die)
        began = anyio.current_time()
        balancer = await life.to_the_end()
    assert 30.0 <= anyio.current_time() - began < 40.0
    crew.check(balancer, 4 * SIZE)
    assert "rank 1 is given up: it did not come back after the controller was started again" in caplog.text


async def test_a_rank_is_given_up_on_the_disk_before_others_get_its_work(tmp_path: Path, disk: Disk) -> None:
    network = MemoryNetwork(dp_size=2)
    crew, begun = Crew(network, {1: (0, "work")}), list[float]()

    def seconds(*_: int) -> float:
        begun.append(anyio.current_time())
        return 1.0

    crew.seconds = seconds
    life = Life(tmp_path, disk, network, on_rank_loss="replan", rejoin_timeout_s=10.0)
    async with life.serving(range(SIZE)) as (balancer, tasks):
        for rank in range(2):
            tasks.start_soon(crew.train, rank)
        balancer.end()
        await anyio.sleep(5.0)
        disk.delay_s = 7.0
    crew.check(balancer, SIZE)
    assert begun[-1] >= 10.0 + 7.0


@asynccontextmanager
async def without_rank_0(
    folder: Path, disk: Disk, crew: Crew
) -> AsyncIterator[tuple[sb.StreamBalancer, TaskGroup, TaskGroup]]:
    """A controller whose rank 0 died in the first step, and tasks of it and of the ranks. It is killed at the end, and
    the next one trains on two steps' rollouts in all."""
    crew.rejoin = True
    life = Life(folder, disk, crew.network, on_rank_loss="replan", rejoin_timeout_s=5.0)
    dp_size = crew.network.dp_size
    async with anyio.create_task_group() as ranks:
        for rank in range(dp_size):
            ranks.start_soon(crew.train, rank)
        async with life.serving(range(SIZE)) as (balancer, tasks):
            await anyio.sleep(50.0)
            assert (balancer.config.dp_size, balancer.in_flight()) == (dp_size - 1, ())
            yield balancer, tasks, ranks
            disk.die()
            tasks.cancel_scope.cancel()
        disk.is_dead, disk.delay_s = False, 0.0
        crew.check(await life.to_the_end(), 2 * SIZE)


async def test_a_plan_that_no_rank_was_given_is_for_the_ranks_that_there_are(tmp_path: Path, disk: Disk) -> None:
    """It is on the disk, and that it is for ranks 1 and 2, not 0 and 1, is not yet."""
    crew = Crew(MemoryNetwork(dp_size=3), {0: (0, "work")})
    async with without_rank_0(tmp_path, disk, crew) as (balancer, _, _):
        for number in range(SIZE, 2 * SIZE):
            await balancer.put(make_rollout(8, f"r{number}"))
        disk.delay_s = 3.0  # of the plan, then of the ranks it is for
        await anyio.sleep(4.0)
        assert [batch.step for batch in balancer.in_flight()] == [1]
    assert crew.present == {0: (1, 2), 1: (1, 2)}
    assert not crew.errors


async def test_all_start_anew_with_as_many_ranks_as_were_left(tmp_path: Path, disk: Disk) -> None:
    """Numbered from 0, though those that were left had other numbers."""
    network = MemoryNetwork(dp_size=4)
    crew = Crew(network, {0: (0, "work"), 1: (0, "work")})
    crew.seconds = lambda rank, step: 100.0
    life = Life(tmp_path, disk, network, on_rank_loss="replan")
    async with anyio.create_task_group() as ranks:
        for rank in range(4):
            ranks.start_soon(crew.train, rank)
        await life.until_killed(SIZE, lambda: anyio.current_time() > 20)
        ranks.cancel_scope.cancel()
    disk.is_dead = False
    network.resize(2)
    again = Crew(network)
    async with anyio.create_task_group() as ranks:
        for rank in range(2):
            ranks.start_soon(partial(again.train, rank, incarnation=1))
        async with life.serving(range(SIZE, 2 * SIZE)) as (balancer, _):
            await anyio.sleep(20)
            balancer.end()
    assert not again.errors
    again.check(balancer, 2 * SIZE)


@asynccontextmanager
async def two_seats_a_rank(
    network: MemoryNetwork, seats: list[Crew], *, rejoin_timeout_s: float
) -> AsyncIterator[tuple[sb.StreamBalancer, TaskGroup]]:
    """A crew for each seat, over four steps; left once all is trained on."""
    config = sb.BalancerConfig(dp_size=network.dp_size, batch_size=SIZE, window=SIZE)
    async with sb.StreamBalancer(config) as balancer, anyio.create_task_group() as tasks:
        serve = partial(sb.serve, on_rank_loss="replan", rejoin_timeout_s=rejoin_timeout_s)
        tasks.start_soon(serve, balancer, network)
        for seat, crew in enumerate(seats):
            for rank in range(network.dp_size):
                tasks.start_soon(partial(crew.train, rank, seat=seat, seats=2))
        for number in range(4 * SIZE):
            await balancer.put(make_rollout(8, f"r{number}"))
        balancer.end()
        yield balancer, tasks


async def test_a_rank_of_which_one_process_is_lost_is_given_up_and_the_others_are_told() -> None:
    network = MemoryNetwork(dp_size=3)
    seats = [Crew(network), Crew(network, {1: (1, "work")})]
    async with two_seats_a_rank(network, seats, rejoin_timeout_s=5.0) as (balancer, _):
        pass
    for crew in seats:
        crew.check(balancer, 4 * SIZE)
        assert crew.present[3] == (0, 2)
    [error] = seats[0].errors
    assert "rank 1 was given up, since others of its processes were lost" in str(error)


@pytest.mark.parametrize("later", ["one comes back", "the other is lost, too"])
async def test_a_rank_is_waited_for_from_its_first_loss(later: str, caplog: pytest.LogCaptureFixture) -> None:
    """What one of its processes does later prolongs nothing: the rank is waited for no longer than before."""
    network = MemoryNetwork(dp_size=2)
    comes_back = later == "one comes back"
    seats = [Crew(network, {1: (1, "work")}), Crew(network, {1: (1, "work")} if comes_back else {})]
    began = anyio.current_time()
    async with two_seats_a_rank(network, seats, rejoin_timeout_s=20.0) as (balancer, tasks):
        await anyio.sleep(10)
        if comes_back:
            tasks.start_soon(partial(seats[0].train, 1, seat=0, seats=2))
        else:
            seats[1].kill(1)
    assert 20.0 <= anyio.current_time() - began < 30.0
    assert balancer.statistics().acknowledged == 4 * SIZE
    assert "rank 1 is given up" in caplog.text


@pytest.mark.parametrize(("delay_s", "own_store"), [(0.0, False), (0.3, False), (0.0, True)])
async def test_what_a_producer_keeps_is_trained_on_after_its_controller_was_killed(
    tmp_path: Path, disk: Disk, delay_s: float, own_store: bool
) -> None:
    network = MemoryNetwork(dp_size=2)
    crew, life = Crew(network), Life(tmp_path, disk, network)
    crew.rejoin, disk.delay_s = True, delay_s
    async with anyio.create_task_group() as tasks:
        for rank in range(2):
            tasks.start_soon(crew.train, rank)
        peer = network.connect_producer(rejoin=True)
        producer = sb.connect(peer, hand_over=PayloadOwner(peer.listen, b"", "store") if own_store else "direct")

        async def put() -> None:
            for number in range(5 * SIZE):
                await producer.put(make_rollout(8, f"r{number}"))
                await anyio.sleep(0.05)
            await producer.end()
            await producer.released()
            await producer.aclose()

        tasks.start_soon(put)
        await life.until_killed(0, lambda: len(crew.met) == 2, peer)
        async with life.balancer() as balancer:
            assert balancer.recovered is not None
            assert balancer.recovered.waiting + balancer.recovered.in_flight > 0
            with anyio.fail_after(1000):
                await sb.serve(balancer, network)
    crew.check(balancer, 5 * SIZE)


async def test_what_nobody_keeps_any_more_is_masked_after_a_restart(tmp_path: Path, disk: Disk) -> None:
    network = MemoryNetwork(dp_size=1)
    crew, life = Crew(network), Life(tmp_path, disk, network)
    producer, accepted_ = sb.connect(network.connect_producer(), hand_over="direct"), list[int]()
    async with anyio.create_task_group() as tasks:

        async def put() -> None:
            for number in range(SIZE // 2):
                await producer.put(make_rollout(8, f"lost{number}"))
                accepted_.append(number)

        tasks.start_soon(put)
        await life.until_killed(0, lambda: len(accepted_) == SIZE // 2)
        producer.close()
    async with life.serving(range(SIZE // 2)) as (balancer, tasks):
        tasks.start_soon(crew.train, 0)
        balancer.end()
    assert {*crew.met[0]} == {f"r{number}" for number in range(SIZE // 2)}
    assert balancer.statistics().evicted["lost"] == SIZE // 2


async def test_steps_that_ranks_have_trained_before_are_not_ahead_of_others() -> None:
    """No checkpoint has them, so they are in flight; with max_versions they would hold up the next one for ever."""
    network = MemoryNetwork(dp_size=2)
    config = sb.BalancerConfig(dp_size=2, batch_size=2, window=2, staleness=sb.Staleness(max_versions=3))
    trained: list[int] = []

    async def train(rank: int) -> None:
        feed = sb.RankFeed(network.connect(rank, rejoin=True), auto_ack=False)
        async for step in feed:
            for _ in step:
                pass
            feed.set_version(step.step + 1)
            if rank == 0:
                trained.append(step.step)
        feed.acknowledge_through(step.step)

    async with sb.StreamBalancer(config) as balancer, anyio.create_task_group() as tasks:
        balancer.set_version(0)
        for rank in range(2):
            tasks.start_soon(train, rank)
        for numbers in (range(8), range(8, 14)):  # a controller of each; the trainer lives through both
            async with anyio.create_task_group() as life:
                life.start_soon(sb.serve, balancer, network)
                for number in numbers:
                    await balancer.put(make_rollout(8, f"r{number}", version=balancer.version))
                if numbers[-1] == 13:
                    balancer.end()
                with anyio.fail_after(1000):
                    while len(trained) < (numbers[-1] + 1) // 2:  # noqa: ASYNC110
                        await anyio.sleep(0.1)
                if numbers[0] == 0:
                    await anyio.sleep(10)  # both ranks ask for more
                    life.cancel_scope.cancel()
    assert trained == list(range(7))


async def test_what_begins_while_a_rank_comes_back_is_as_old_as_its_weights() -> None:
    """Its weights contain a step, and the version that this step made is said after it has joined: until then nothing
    may begin that would be too old."""
    network = MemoryNetwork(dp_size=1)
    config = sb.BalancerConfig(dp_size=1, batch_size=2, window=2, staleness=sb.Staleness(max_versions=0))
    versions: list[int | None] = []
    async with sb.StreamBalancer(config) as balancer, anyio.create_task_group() as tasks:
        balancer.set_version(0)
        tasks.start_soon(partial(sb.serve, balancer, network, rejoin_timeout_s=100.0))
        first = network.connect(0)
        feed = sb.RankFeed(first, auto_ack=False)
        await balancer.put_group([make_rollout(8, f"r{number}", group_id="r", version=0) for number in range(2)])
        await anext(feed)
        first.cut()  # the trainer has saved weights with the step, and died before it said so

        async def work() -> None:
            async with balancer.reserve(2) as slot:
                versions.append(slot.version)
                await slot.put_group(
                    [make_rollout(8, f"s{number}", group_id="s", version=slot.version) for number in range(2)]
                )

        tasks.start_soon(work)
        async with sb.RankFeed(network.connect(0, incarnation=1), auto_ack=False, next_step=1) as again:
            await anyio.sleep(1.0)
            assert not versions, "the step is in the weights, and their version is not said yet"
            again.set_version(1)
            step = await anext(again)
            assert (step.step, versions) == (1, [1])
            again.acknowledge_through(1)
            balancer.end()
            assert [step async for step in again] == []
        assert balancer.statistics().evicted["stale"] == 0


async def test_what_was_put_between_two_balancers_is_let_go_of() -> None:
    """On one transport: the second takes the put, the producer joins again, and the first is collected."""
    network = MemoryNetwork(dp_size=1)
    peer = network.connect_producer(rejoin=True)
    producer = sb.connect(peer, hand_over="direct")
    config = sb.BalancerConfig(dp_size=1, batch_size=1, window=1, capacity=1)
    async with anyio.create_task_group() as tasks:
        async with sb.StreamBalancer(config) as first, anyio.create_task_group() as serving:
            serving.start_soon(sb.serve, first, network)
            serving.start_soon(Crew(network).train, 0)
            await producer.put(make_rollout(8, "a"))
            await producer.released()
            serving.cancel_scope.cancel()
        tasks.start_soon(producer.put, make_rollout(8, "b"))
        await anyio.sleep(1)
        del first
        async with sb.StreamBalancer(config) as second, anyio.create_task_group() as serving:
            serving.start_soon(sb.serve, second, network)
            await anyio.sleep(1)
            peer.cut()
            await anyio.sleep(1)
            gc.collect()
            serving.start_soon(Crew(network).train, 0)
            with anyio.fail_after(100):
                await producer.released()
            assert second.statistics().acknowledged == 1
            second.end()
    await producer.aclose()


async def test_what_waits_between_two_balancers_is_still_kept() -> None:
    """On one transport: the first leaves before there is room for the put, the second accepts it."""
    network = MemoryNetwork(dp_size=1)
    producer, crew = sb.connect(network.connect_producer(rejoin=True), hand_over="direct"), Crew(network)
    config = sb.BalancerConfig(dp_size=1, batch_size=1, window=1, capacity=1)
    async with anyio.create_task_group() as tasks:
        async with sb.StreamBalancer(config) as first, anyio.create_task_group() as serving:
            serving.start_soon(sb.serve, first, network)
            await producer.put(make_rollout(8, "a"))
            tasks.start_soon(producer.put, make_rollout(8, "b"))
            await anyio.sleep(1)
            serving.cancel_scope.cancel()
        del first
        async with sb.StreamBalancer(config) as second, anyio.create_task_group() as serving:
            serving.start_soon(sb.serve, second, network)
            serving.start_soon(crew.train, 0)
            await anyio.sleep(10)
            gc.collect()  # with the first goes what it had accepted
            with anyio.fail_after(100):
                await producer.released()
            assert crew.met == {0: {"b": 1}}
            second.end()
    await producer.aclose()


async def test_what_was_trained_on_while_a_connection_was_lost_is_let_go_of() -> None:
    """Neither the reply to its put has arrived, nor that nobody needs it any more."""
    network = MemoryNetwork(dp_size=1)
    peer = network.connect_producer(rejoin=True)
    producer, crew = sb.connect(peer, hand_over="direct"), Crew(network)
    config = sb.BalancerConfig(dp_size=1, batch_size=1, window=1, capacity=1)
    async with sb.StreamBalancer(config) as balancer, anyio.create_task_group() as tasks:
        tasks.start_soon(sb.serve, balancer, network)
        await producer.put(make_rollout(8, "a"))
        tasks.start_soon(producer.put, make_rollout(8, "b"))
        await anyio.sleep(1)
        peer.cut(seen_by=[0])
        tasks.start_soon(crew.train, 0)
        await anyio.sleep(10)
        assert balancer.statistics().acknowledged == 2
        peer.cut(seen_by=[1])
        with anyio.fail_after(100):
            await producer.released()
        balancer.end()
    await producer.aclose()


async def test_all_ranks_go_back_behind_what_was_acknowledged_and_one_warning_names_the_lost_steps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    network = MemoryNetwork(dp_size=2)
    config = sb.BalancerConfig(dp_size=2, batch_size=SIZE, window=SIZE, capacity=4 * SIZE)
    async with sb.StreamBalancer(config) as balancer, anyio.create_task_group() as tasks:
        tasks.start_soon(partial(sb.serve, rejoin_timeout_s=100.0), balancer, network)
        for number in range(4 * SIZE):
            await balancer.put(make_rollout(8, f"r{number}"))
        peers = [network.connect(rank) for rank in range(2)]
        feeds = [sb.RankFeed(peer) for peer in peers]
        for _ in range(3):
            for feed in feeds:
                await anext(feed)
        await anyio.sleep(1.0)
        for peer in peers:
            peer.cut()
        balancer.end()
        again = [sb.RankFeed(network.connect(rank, incarnation=1)) for rank in range(2)]
        got: list[list[int]] = [[], []]

        async def train(rank: int) -> None:
            async for step in again[rank]:
                got[rank].append(step.step)

        for rank in range(2):
            tasks.start_soon(train, rank)
    assert got == [[2, 3], [2, 3]]
    [told] = [text for text in caplog.messages if "which were acknowledged" in text]
    assert told.startswith("no weights contain steps 0 to 1, which were acknowledged")
