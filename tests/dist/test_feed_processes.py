"""The feed between real processes: every way out ends with the right exit code, and every loss is told, whatever
children live on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import anyio
import pytest
import torch
import torch.distributed as dist
from forked import Python, started
from guard import GUARD_S
from helpers import answering
from processes import Child, served, world_of
from scripted import Filled
from torch._C._distributed_c10d import Store, TCPStore

import stream_balancer as sb
from stream_balancer.errors import BrokenResourceError, RankLostError
from stream_balancer.net import movers
from stream_balancer.testing import make_rollout


def say(*words: object) -> None:
    print(*words, flush=True)  # noqa: T201 - read by the test


def run(mode: str, address: str, rank: int, dp_size: int) -> None:
    """A trainer that prints ``ready`` once it has its first batch, and the steps it trained as its last line where it
    gets that far."""
    feed = sb.RankFeed(address, rank=rank, dp_size=dp_size)
    if mode == "unconnected":
        return
    steps = [next(feed).step]
    say("ready")
    if mode == "unclosed":
        return
    try:
        for batch in feed:
            steps.append(batch.step)
            if mode == "break":
                break
            if mode == "exit":
                sys.exit(3)
            if mode == "raise":
                raise LookupError("a bug in the trainer")
    except KeyboardInterrupt:
        say("interrupted")
        return
    say(*steps)


def control(mode: str) -> None:
    """A controller that ends in the middle."""

    async def main() -> None:
        async with (
            Filled(2, 1, hold=True) as filled,
            sb.TorchTransport.listen(dp_size=1) as transport,
            anyio.create_task_group() as tasks,
        ):
            say(transport.address)
            tasks.start_soon(sb.serve, filled.balancer, transport)
            if mode == "unclosed":
                while not filled.acknowledged_steps:
                    await anyio.sleep(0.01)
                os._exit(0)

    try:
        anyio.run(main)
    except KeyboardInterrupt:
        say("interrupted")


def ended(process: Python) -> tuple[int | None, list[str], str]:
    """Exit code, lines of output, errors."""
    out, errors = process.communicate(GUARD_S)
    return process.returncode, out.splitlines(), errors


def test_every_way_out_of_the_loop_ends_the_process_cleanly() -> None:
    anyio.run(_ways_out)  # it is about the ranks' processes: one loop will do


async def _ways_out() -> None:
    modes = {"break": 0, "exit": 3, "raise": 1, "unclosed": 0, "ctrl-c": 0}
    with anyio.fail_after(GUARD_S):
        async with (
            Filled(2, len(modes), hold=True) as filled,
            sb.TorchTransport.listen(dp_size=len(modes)) as transport,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(partial(sb.serve, filled.balancer, transport, rejoin_timeout_s=GUARD_S))
            ranks = {}
            for rank, mode in enumerate([*modes, "unconnected"]):
                context = started(__file__, mode, transport.address, rank % len(modes), len(modes), finalize=True)
                ranks[mode] = (context, context.__enter__())
            try:
                process = ranks["ctrl-c"][1]
                await anyio.to_thread.run_sync(process.stdout.readline, abandon_on_cancel=True)
                await anyio.sleep(0.5)  # it is now blocked in next()
                process.send_signal(signal.SIGINT)
                for mode, code in (modes | {"unconnected": 0}).items():
                    result = await anyio.to_thread.run_sync(ended, ranks[mode][1])
                    assert result[0] == code, (mode, result)
                    assert "terminate called" not in result[2], mode
                    if mode == "ctrl-c":
                        assert result[1][-1] == "interrupted"
            finally:
                for context, _ in ranks.values():
                    context.__exit__(None, None, None)
            tasks.cancel_scope.cancel()


def in_world(rank: int, backend: str) -> list[int]:
    """Single-controller mode: rank 0 serves from a thread, and is fed like the others."""
    acknowledged: list[int] = []

    async def serve() -> None:
        async with Filled(12, dist.get_world_size()) as filled, sb.TorchTransport.in_world() as transport:
            await sb.serve(filled.balancer, transport)
        acknowledged.extend(filled.acknowledged_steps)

    controller = threading.Thread(target=anyio.run, args=(serve,), kwargs={"backend": backend})
    if rank == 0:
        controller.start()
    seen = []
    for batch in sb.RankFeed():
        total = torch.tensor([batch.step])
        dist.all_reduce(total)
        assert int(total) == batch.step * dist.get_world_size(), "ranks are in different steps"
        seen.append(batch.step)
    if rank == 0:
        controller.join()
        assert acknowledged == seen
    return seen


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_controller_may_live_in_rank_0(backend: str) -> None:
    assert world_of(2, in_world, backend) == [list(range(12))] * 2


BOTH = ("torch_dist", "shared_memory")


@pytest.mark.parametrize(
    ("in_store", "named", "found"),
    [
        (True, None, {("torch_dist",)}),
        (True, BOTH[::-1], {BOTH}),
        (False, None, {("shared_memory",)}),
        (False, BOTH, {("shared_memory",)}),
    ],
)
async def test_bulk_bytes_go_by_torch_in_a_store_and_by_shared_memory_at_an_address(
    monkeypatch: pytest.MonkeyPatch, in_store: bool, named: tuple[str, ...] | None, found: set[tuple[str, ...]]
) -> None:
    attached: set[tuple[str, ...]] = set()
    monkeypatch.setattr(movers, "attach", lambda connection, names: attached.add(tuple(names)))
    store = dist.HashStore() if in_store else None
    async with served(sb.serve, listen={"store": store}) as (balancer, transport):
        feed = sb.RankFeed(store or transport.address, rank=0, dp_size=1, movers=named)
        balancer.end()
        assert [step async for step in feed] == []
    assert attached == found


@pytest.mark.parametrize(
    ("mode", "how"), [("serve", signal.SIGKILL), ("serve", signal.SIGINT), ("unclosed", None)], ids=str
)
def test_the_end_of_the_controller_is_told(mode: str, how: signal.Signals | None) -> None:
    with started(__file__, "control", mode) as controller:
        address = controller.stdout.readline().strip()
        with sb.RankFeed(address, rank=0, dp_size=1) as feed:
            assert [next(feed).step for _ in range(2)] == [0, 1]
            if how is not None:
                threading.Timer(0.2, controller.send_signal, [how]).start()
            with pytest.raises(RankLostError, match="rank 0 lost its controller") as caught:
                next(feed)
            assert caught.value.rank == 0
        code, out, errors = ended(controller)
        assert code == (-signal.SIGKILL if how is signal.SIGKILL else 0), errors
        assert out == (["interrupted"] if how is signal.SIGINT else [])


# -- children that live on ---------------------------------------------------------------------------------------------

LIFE_S = 4 * GUARD_S


def begin_children() -> list[int]:
    """A worker of a worker, and a program."""
    told, tell = os.pipe()
    if os.fork() == 0:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(LIFE_S,))
        child.start()
        os.write(tell, (child.pid or 0).to_bytes(4, "little"))
        os._exit(0)
    return [int.from_bytes(os.read(told, 4), "little"), subprocess.Popen(["sleep", str(LIFE_S)], close_fds=False).pid]


def train_beside_children(address: str, told: Connection) -> None:
    with sb.RankFeed(address, rank=0, dp_size=1) as feed:
        next(feed)
        told.send(begin_children())
        time.sleep(LIFE_S)


def control_beside_children(told: Connection) -> None:
    async def main() -> None:
        async with served(sb.serve, batch_size=1, window=1) as (balancer, transport):
            told.send(transport.address)
            while not balancer.statistics().in_flight:
                await anyio.sleep(0.005)
            told.send(begin_children())
            await anyio.sleep_forever()

    anyio.run(main)


def kill_parent(parent: Child, children: list[int]) -> None:
    """Once its children are there."""
    children += parent.hear()
    parent.process.kill()


def test_a_killed_rank_or_controller_is_missed_though_its_children_live() -> None:
    children: list[int] = []

    async def lose_a_rank() -> None:
        async with (
            Filled(1, 1, hold=True) as filled,
            sb.TorchTransport.listen(dp_size=1) as transport,
            anyio.create_task_group() as tasks,
        ):
            rank = Child(train_beside_children, transport.address, daemon=False)
            tasks.start_soon(anyio.to_thread.run_sync, kill_parent, rank, children)
            with pytest.raises(RankLostError, match="rank 0"), anyio.fail_after(GUARD_S):
                await sb.serve(filled.balancer, transport)

    anyio.run(lose_a_rank)
    controller = Child(control_beside_children, daemon=False)
    address = controller.hear()
    with sb.connect(address) as producer, sb.RankFeed(address, rank=0, dp_size=1) as feed:
        producer.put(make_rollout(4))
        next(feed)
        kill_parent(controller, children)
        with pytest.raises(RankLostError, match="lost its controller"):
            next(feed)
        with pytest.raises(BrokenResourceError):
            while True:
                producer.put(make_rollout(4))
    for child in children:
        os.kill(child, signal.SIGKILL)  # raises if it does not live any more


# -- a controller that dies while somebody connects, a store that dies -------------------------------------------------


def test_a_rank_leaves_a_controller_that_died_while_it_connected() -> None:
    """The port accepts and then says nothing but good-bye, as when the process is killed in between."""
    probed = threading.Event()
    with answering(lambda sock: (sock.close(), probed.set())) as address:
        feed = sb.RankFeed(address, rank=0, dp_size=1)
        assert probed.wait(GUARD_S)
        closer = threading.Thread(target=feed.close, daemon=True)
        closer.start()
        closer.join(GUARD_S)
        assert not closer.is_alive()


def _host_store(pipe: Any) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


async def test_a_feed_goes_on_when_the_store_it_joined_through_has_died() -> None:
    host = Child(_host_store)
    port = await anyio.to_thread.run_sync(host.hear)
    stores: list[Store] = [TCPStore("127.0.0.1", port, is_master=False) for _ in range(2)]
    with anyio.fail_after(GUARD_S):
        async with (
            Filled(5, 1) as filled,
            sb.TorchTransport(stores[0], dp_size=1) as transport,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(sb.serve, filled.balancer, transport)
            feed = sb.RankFeed(stores[1], rank=0, dp_size=1)
            assert (await anext(feed)).step == 0
            host.process.kill()
            host.process.join()
            assert [batch.step async for batch in feed] == [1, 2, 3, 4]
    assert filled.acknowledged_steps == list(range(5))


if __name__ == "__main__":
    if sys.argv[1] == "control":
        control(sys.argv[2])
    else:
        run(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
