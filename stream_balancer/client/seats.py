"""Seats: the processes of one DP rank (tensor, context, pipeline parallel). Each joins by itself, and gets the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Seat(NamedTuple):
    """Where a process stands."""

    rank: int
    """DP rank."""
    dp_size: int
    seat: int
    """Number within its DP rank."""
    seats: int
    """Processes of this DP rank."""


def seat_in(mesh: Any, dp_dim: str | Sequence[str]) -> Seat:
    """Place of this process in a DeviceMesh. ``dp_dim``: the dimension, or dimensions (HSDP: replicate, shard), along
    which data differs; along all others it is the same. Raises ValueError for a dimension the mesh has not."""
    names: tuple[str, ...] = mesh.mesh_dim_names or ()
    along = (dp_dim,) if isinstance(dp_dim, str) else tuple(dp_dim)
    if not along or not set(along) <= set(names):
        raise ValueError(f"dp_dim={dp_dim!r} names dimensions of the mesh, which are {names}")
    at: list[int] | None = mesh.get_coordinate()
    if at is None:
        raise ValueError("this process is not part of the mesh: only its members iterate a RankFeed over it")
    # along the data's dimensions ranks differ; along all others they get the same
    places = [(name in along, here, mesh.size(dim)) for dim, (name, here) in enumerate(zip(names, at, strict=True))]
    rank, dp_size = _flatten([(here, size) for is_data, here, size in places if is_data])
    seat, seats = _flatten([(here, size) for is_data, here, size in places if not is_data])
    return Seat(rank, dp_size, seat, seats)


def _flatten(dims: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Coordinate and size of several dimensions taken as one, the first varying slowest."""
    at, total = 0, 1
    for here, size in dims:
        at, total = at * size + here, total * size
    return at, total
