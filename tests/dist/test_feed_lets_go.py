"""A feed that the trainer is done with keeps nothing of the trainer: no frame, no model, no memory."""

from __future__ import annotations

import gc
import os
import queue
import resource
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

import anyio
import pytest
from guard import GUARD_S
from processes import Child, wait_until
from scripted import Filled

import stream_balancer as sb
from stream_balancer.errors import RankLostError
from stream_balancer.net.movers import available
from stream_balancer.testing import make_rollout

Left = list[weakref.ref[object]]
Stop = Callable[[], None]


STEPS = 20


class Model:
    """What must not be kept."""


def finishes(address: str, _: Stop) -> Left:
    """Nobody calls close(); every batch is acknowledged."""
    model, feed = Model(), sb.RankFeed(address, rank=0, dp_size=1)
    for _batch in feed:
        assert model
    return [weakref.ref(model), weakref.ref(feed)]


def breaks_off(address: str, _: Stop) -> Left:
    model, feed = Model(), sb.RankFeed(address, rank=0, dp_size=1)
    for _batch in feed:
        break
    return [weakref.ref(model)]


def is_told_the_loss(address: str, stop: Stop) -> Left:
    """As often as it asks."""
    model, feed = Model(), sb.RankFeed(address, rank=0, dp_size=1, auto_ack=False)
    next(feed)
    stop()
    for _ in range(4):
        with suppress(RankLostError):
            next(feed)
    return [weakref.ref(model)]


@contextmanager
def controller() -> Iterator[tuple[str, Stop]]:
    """Its address, and what ends it."""
    addresses: queue.SimpleQueue[str] = queue.SimpleQueue()
    stop = threading.Event()

    async def main() -> None:
        async with sb.TorchTransport.listen(dp_size=1) as transport:
            addresses.put(transport.address or "")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(deliver, transport)
                await anyio.to_thread.run_sync(stop.wait)
                tasks.cancel_scope.cancel()

    async def deliver(transport: sb.TorchTransport) -> None:
        async with Filled(STEPS, 1) as filled:
            with suppress(RankLostError):
                await sb.serve(filled.balancer, transport)

    thread = threading.Thread(target=anyio.run, args=(main,), daemon=True)
    thread.start()
    yield addresses.get(timeout=GUARD_S), stop.set
    stop.set()
    thread.join(GUARD_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("trainer", [finishes, breaks_off, is_told_the_loss])
def test_the_trainers_frame_is_let_go(trainer: Callable[[str, Stop], Left]) -> None:
    with controller() as (address, stop):
        left = trainer(address, stop)
        gc.collect()
        assert [ref() for ref in left] == [None] * len(left)


def _holds_many(told: Connection) -> None:
    """Controller and rank in one process that may open few files."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    steps = 200

    async def main() -> None:
        async with (
            Filled(steps, 1) as filled,
            sb.TorchTransport.listen(dp_size=1) as transport,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(sb.serve, filled.balancer, transport)
            held = [batch async for batch in sb.RankFeed(transport.address, rank=0, dp_size=1)]
            told.send([int(batch.micro_batches[0].packed()["input_ids"][0]) for batch in held])

    anyio.run(main)


@pytest.mark.skipif(not available(["shared_memory"]), reason="needs memfd")
def test_batches_that_a_trainer_holds_cost_no_descriptors() -> None:
    child = Child(_holds_many)
    assert child.told() == [[1000 * step for step in range(200)]]
    assert child.process.exitcode == 0


def _open_here() -> tuple[int, set[str]]:
    """Descriptors and threads of this process, but for those of the test's controller."""
    names = {thread.name for thread in threading.enumerate()}
    return len(os.listdir("/proc/self/fd")), {name for name in names if not name.startswith("AnyIO")}


@pytest.mark.parametrize(
    ("how", "movers"), [("closed", []), ("lost", ["shared_memory"]), ("ended", ["torch_dist"])], ids=str
)
def test_descriptors_and_threads_go_at_once(how: str, movers: list[str]) -> None:
    """Not when the garbage collector runs; and whoever holds the feed, or batches of it."""
    with controller() as (address, stop):
        sb.RankFeed(address, rank=0, dp_size=2).close()  # the I/O thread is there
        gc.disable()
        try:
            fds, threads = _open_here()
            feed = sb.RankFeed(address, rank=0, dp_size=1, movers=movers)
            held = [next(feed)]
            if how == "ended":
                held += list(feed)
            elif how == "closed":
                feed.close()
            else:
                stop()
                with pytest.raises(RankLostError):
                    held += list(feed)

            def is_gone() -> bool:
                now = _open_here()
                return now[0] <= fds and now[1] <= threads

            wait_until(is_gone, f"open: {_open_here()}")  # the controller's end, which is in this process, too
            assert held
        finally:
            gc.enable()


def follow(pipe: Connection) -> None:
    """Iterate a feed of each address to its end."""
    while address := pipe.recv():
        with sb.RankFeed(address, rank=1, dp_size=2, movers=[]) as feed:
            try:
                pipe.send([step.step for step in feed])
            except RankLostError as error:
                pipe.send(str(error))


def test_a_rank_ends_though_the_process_that_hosts_its_controller_leaves_at_once() -> None:
    """That process has a rank of its own, and goes on as soon as this rank has its end."""
    with Child(follow) as child:
        for turn in range(25):
            with sb.blocking(sb.BalancerConfig(dp_size=2, batch_size=2, window=2)) as balancer:
                transport = sb.TorchTransport.listen(dp_size=2)
                balancer.serve(transport)
                child.pipe.send(transport.address)
                feed = sb.RankFeed(transport.address, rank=0, dp_size=2)
                for number in range(2):
                    balancer.put(make_rollout(3, f"{turn}-{number}"))
                balancer.end()
                assert [step.step for step in feed] == [0]
            assert child.hear() == [0]
        child.pipe.send("")
