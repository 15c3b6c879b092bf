"""Model-parallel ranks: every process of a DP rank joins by itself, gets the same, and learns of every end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import anyio
import pytest
import torch
import torch.distributed as dist
from forked import forked, free_port, hear
from guard import GUARD_S
from scripted import ScriptedBalancer, make_batch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import stream_balancer as sb
from stream_balancer.client.seats import Seat, seat_in

Shape = tuple[tuple[int, ...], tuple[str, ...], Any]  # sizes, names, dp_dim
DP_TP: Shape = ((2, 2), ("dp", "tp"), "dp")


def mesh_without_world(shape: Shape, world_rank: int) -> DeviceMesh:
    """A place in a mesh is all the feed asks for: no process group is needed."""
    sizes, names, _ = shape
    ranks = torch.arange(int(torch.tensor(sizes).prod())).view(sizes)
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=world_rank)


def _train(
    address: str, port: int, shape: Shape, world_rank: int, incarnation: int, mode: str, told: Connection
) -> None:
    torch.set_num_threads(1)
    if mode == "world":
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=world_rank, world_size=4)
        mesh = init_device_mesh("cpu", shape[0], mesh_dim_names=shape[1])
    else:
        mesh = mesh_without_world(shape, world_rank)
    feed = sb.RankFeed(address, mesh=mesh, dp_dim=shape[2], incarnation=incarnation)
    try:
        for batch in feed:
            ids = [r.rollout_id for r in batch.rollouts]
            checksum = sum(int(mb.packed()["input_ids"].sum()) for mb in batch.micro_batches)
            told.send((batch.step, ids, checksum, batch.rank))
            if mode == "slow":
                time.sleep(0.05)
            for mb in batch.micro_batches:
                mb.packed()["input_ids"].zero_()  # what a trainer does to its batch is its own business
    except Exception as error:
        told.send((type(error).__name__, str(error)))
    told.send(None)
    if mode == "world":
        dist.destroy_process_group()


class Process:
    """One process of the mesh, and what it has told."""

    def __init__(self, address: str, world_rank: int, mode: str = "", *, port: int = 0, shape: Shape = DP_TP,
                 incarnation: int = 0) -> None:  # fmt: skip
        self.process, self.told = forked(_train, address, port, shape, world_rank, incarnation, mode)

    def kill(self) -> None:
        assert self.process.pid
        os.kill(self.process.pid, signal.SIGKILL)

    def said(self) -> list[Any]:
        """What it has said by the time it has said all."""
        got = []
        with suppress(EOFError):
            while (said := hear(self.told)) is not None:
                got.append(said)
        return got

    def all(self) -> list[Any]:
        """What it has said; waits until it has ended, which it does by itself."""
        got = self.said()
        self.process.join(GUARD_S)
        assert not self.process.is_alive()
        return got


def expected(steps: range, rank: int, num_tokens: int) -> list[Any]:
    told = []
    for step in steps:
        share = make_batch(step, 2, num_tokens=num_tokens).ranks[rank]
        checksum = sum(int(r.tokens["input_ids"].sum()) for r in share.rollouts)
        told.append((step, [r.rollout_id for r in share.rollouts], checksum, rank))
    return told


async def in_thread(function: Callable[[], Any]) -> Any:
    return await anyio.to_thread.run_sync(function)


@pytest.mark.processes
@pytest.mark.parametrize(
    "shape", [DP_TP, ((1, 2, 2), ("replicate", "shard", "tp"), ("replicate", "shard"))], ids=["dp_tp", "hsdp"]
)
async def test_all_peers_get_the_same_and_hear_the_end(shape: Shape) -> None:
    port = free_port()
    steps = range(0, 40, 2)  # those between were given up
    balancer = ScriptedBalancer([make_batch(step, 2, num_tokens=5000) for step in steps])
    with anyio.fail_after(GUARD_S):
        async with sb.TorchTransport.listen(dp_size=2) as transport:
            address = transport.address
            processes = [Process(address, rank, "world", port=port, shape=shape) for rank in range(4)]
            await sb.serve(balancer, transport)
            told = [await in_thread(process.all) for process in processes]
    for world_rank in range(4):
        assert told[world_rank] == expected(steps, world_rank // 2, 5000), world_rank
    assert balancer.acknowledged == list(steps)


@pytest.mark.processes
async def test_a_killed_process_comes_back_with_its_group() -> None:
    """Whoever is left of the rank would wait for it in a collective: a launcher starts all of them again."""
    steps = range(40)
    balancer = ScriptedBalancer([make_batch(step, 2, num_tokens=100_000) for step in steps])
    told: dict[str, list[Any]] = {}
    with anyio.fail_after(GUARD_S):
        async with sb.TorchTransport.listen(dp_size=2) as transport, anyio.create_task_group() as tasks:
            address = transport.address
            tasks.start_soon(partial(sb.serve, balancer, transport, rejoin_timeout_s=GUARD_S))
            healthy = [Process(address, rank) for rank in range(2)]
            first = [Process(address, rank, "slow") for rank in (2, 3)]
            while len(balancer.acknowledged) < 3:
                await anyio.sleep(0.005)
            for process in first:
                process.kill()
            told["victim"] = await in_thread(first[1].all)
            again = [Process(address, rank, incarnation=1) for rank in (2, 3)]
            told["healthy"], told["healthy peer"] = [await in_thread(process.all) for process in healthy]
            told["again"], told["again peer"] = [await in_thread(process.all) for process in again]
    assert told["healthy"] == told["healthy peer"] == expected(steps, 0, 100_000)
    resumed = told["again"][0][0]
    assert told["again"] == told["again peer"] == expected(range(resumed, 40), 1, 100_000)
    assert 3 <= resumed <= told["victim"][-1][0] + 1
    assert balancer.acknowledged == list(steps)


@pytest.mark.parametrize(
    ("names", "dp_dim", "places"),
    [
        (("pp", "dp", "tp"), "dp", [Seat(r // 2 % 2, 2, r // 4 * 2 + r % 2, 4) for r in range(8)]),
        (("rep", "shard", "tp"), ("rep", "shard"), [Seat(r // 2, 4, r % 2, 2) for r in range(8)]),
        (("rep", "cp", "shard"), ["rep", "shard"], [Seat(r // 4 * 2 + r % 2, 4, r // 2 % 2, 2) for r in range(8)]),
        (("a", "b", "c"), ("a", "b", "c"), [Seat(r, 8, 0, 1) for r in range(8)]),
    ],
)
def test_places_in_a_mesh(names: tuple[str, ...], dp_dim: Any, places: list[Seat]) -> None:
    assert [seat_in(mesh_without_world(((2, 2, 2), names, dp_dim), rank), dp_dim) for rank in range(8)] == places


def test_what_cannot_be_a_place_is_refused() -> None:
    mesh = mesh_without_world(DP_TP, 0)
    with pytest.raises(ValueError, match=r"dp_dim='data' names dimensions of the mesh, which are \('dp', 'tp'\)"):
        sb.RankFeed("tcp://127.0.0.1:1", mesh=mesh, dp_dim="data")
    with pytest.raises(ValueError, match="either mesh= or rank= and dp_size="):
        sb.RankFeed("tcp://127.0.0.1:1", mesh=mesh, rank=0)
    with pytest.raises(ValueError, match="not part of the mesh"):
        seat_in(mesh_without_world(DP_TP, 7), "dp")
