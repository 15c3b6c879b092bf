"""Model-parallel ranks: every process of a DP rank joins by itself, gets the same, and learns of every end."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import pytest
import torch
import torch.distributed as dist
from forked import free_port
from guard import GUARD_S
from processes import END, Child, given, train
from scripted import Filled
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


def _train(address: str, shape: Shape, world_rank: int, port: int | None, step_s: float, join: Any, pipe: Any) -> None:
    """One process of the mesh; of torch's own, in a world, where it has a port."""
    sizes, names, dp_dim = shape
    if port is None:
        mesh = mesh_without_world(shape, world_rank)
    else:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=world_rank, world_size=4)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    train(address, None, None, step_s, {"mesh": mesh, "dp_dim": dp_dim, **join}, pipe)
    if port is not None:
        dist.destroy_process_group()


def started(
    address: str | None, rank: int, shape: Shape = DP_TP, port: int | None = None, step_s: float = 0.0, **join: Any
) -> Child:
    return Child(_train, address, shape, rank, port, step_s, join)


async def told(process: Child) -> list[Any]:
    return await anyio.to_thread.run_sync(process.told)


@pytest.mark.processes
@pytest.mark.parametrize(
    "shape", [DP_TP, ((1, 2, 2), ("replicate", "shard", "tp"), ("replicate", "shard"))], ids=["dp_tp", "hsdp"]
)
async def test_all_peers_get_the_same_and_hear_the_end(shape: Shape) -> None:
    port = free_port()
    with anyio.fail_after(GUARD_S):
        async with Filled(10, 2, num_tokens=5000) as filled, sb.TorchTransport.listen(dp_size=2) as transport:
            processes = [started(transport.address, rank, port=port, shape=shape) for rank in range(4)]
            await sb.serve(filled.balancer, transport)
            said = [await told(process) for process in processes]
    for world_rank in range(4):
        assert said[world_rank] == [*given(filled, world_rank // 2), END], world_rank
    assert filled.acknowledged_steps == list(range(10))


@pytest.mark.processes
async def test_a_killed_process_comes_back_with_its_group() -> None:
    """Whoever is left of the rank would wait for it in a collective: a launcher starts all of them again."""
    with anyio.fail_after(GUARD_S):
        async with (
            Filled(16, 2, num_tokens=100_000) as filled,
            sb.TorchTransport.listen(dp_size=2) as transport,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(partial(sb.serve, filled.balancer, transport, rejoin_timeout_s=GUARD_S))
            healthy = [started(transport.address, rank) for rank in range(2)]
            first = [started(transport.address, rank, step_s=0.05) for rank in (2, 3)]
            while len(filled.acknowledged_steps) < 3:
                await anyio.sleep(0.005)
            for process in first:
                process.kill()
            victims = [await told(process) for process in first]
            # the newest step that all its processes have
            next_step = min(victim[-1][0] for victim in victims) + 1
            again = [started(transport.address, rank, incarnation=1, next_step=next_step) for rank in (2, 3)]
            one, peer, resumed, resumed_peer = [await told(process) for process in (*healthy, *again)]
    assert one == peer == [*given(filled, 0), END]
    assert resumed == resumed_peer == [*given(filled, 1)[next_step:], END]
    assert next_step >= 3
    assert filled.acknowledged_steps == list(range(16))


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
