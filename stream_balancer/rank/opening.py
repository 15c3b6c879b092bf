"""Which port a rank feed reads from: one that was given, one to the controller, or one of a model-parallel rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from msgspec import structs

from stream_balancer.rank.device import Uploader
from stream_balancer.transport import Port
from stream_balancer.transport.rank_port import Decode
from stream_balancer.wire.messages import JoinRank

__all__ = ["given_port", "in_world", "open_in_mesh", "open_port"]

_LEADERS_OPTIONS = ("shared_memory", "connect_timeout_s", "rejoin")  # between leader and controller only


def given_port(port: Any, mesh: Any, uploader: Uploader | None) -> Port:
    """A port that is open already. Raises ValueError for what must be given when a port is opened."""
    if mesh is not None or uploader is not None:
        raise ValueError(
            "mesh= and device= need the address of a controller or a store, not a port that is open already"
        )
    return cast("Port", port)


def in_world(source: Any, rank: int | None, dp_size: int | None) -> tuple[Any, int, int]:
    """What was given, and what the initialised torch.distributed world says of the rest."""
    from stream_balancer.transport.gloo import torch_dist

    if source is None:
        source, world_rank, world_size = torch_dist.current_world()
        rank = world_rank if rank is None else rank
        dp_size = world_size if dp_size is None else dp_size
    if rank is None or dp_size is None:
        raise ValueError(
            "RankFeed needs rank= and dp_size=, or mesh=, unless it runs inside an initialised torch.distributed world"
        )
    if not 0 <= rank < dp_size:
        raise ValueError(f"rank must be in [0, dp_size): rank={rank}, dp_size={dp_size}")
    return source, rank, dp_size


def open_port(
    source: Any, request: JoinRank, uploader: Uploader | None, options: dict[str, Any], decode: Decode | None = None
) -> Port:
    """A port to the controller at ``source``; ``decode``: how batches are wanted, if not as the uploader does it."""
    from stream_balancer.transport.gloo import torch_dist
    from stream_balancer.transport.sockets.payloads import Fetcher

    options = {**options, **_decoding(uploader)} | ({} if decode is None else {"decode": decode})
    if hasattr(source, "open_rank_port"):
        return cast("Port", source.open_rank_port(request, **options))
    if uploader is not None:
        options["shared_memory"] = False  # an accelerator does not read it by itself
    return torch_dist.open_port(source, request, payloads=Fetcher(), **options)


def open_in_mesh(
    source: Any,
    mesh: Any,
    dp_dim: str | Sequence[str],
    request_as: Callable[[int, int], JoinRank],
    uploader: Uploader | None,
    options: dict[str, Any],
) -> Port:
    """This process's port in a DeviceMesh: to the controller where it leads its DP rank, else to its leader."""
    from stream_balancer.rank import mesh as _mesh
    from stream_balancer.transport.gloo import torch_dist

    place = _mesh.place_in(mesh, dp_dim)
    request = request_as(place.rank, place.dp_size)
    if source is None:
        source = torch_dist.current_world()[0]
    if place.num_peers == 1:
        return open_port(source, request, uploader, options)
    if request.role:
        raise ValueError(
            f"role {request.role!r} over a mesh with {place.num_peers} processes to a DP rank: a role is for ranks of "
            "one process each. Let one process of each open the feed, with rank= and dp_size="
        )
    among = {key: value for key, value in options.items() if key not in _LEADERS_OPTIONS}
    among |= {"incarnation": request.incarnation, "max_batch_bytes": request.max_batch_bytes}
    meeting = source.peer_lookup() if hasattr(source, "peer_lookup") else source
    if place.peer > 0:
        return _mesh.PeerPort(meeting, place, **_decoding(uploader), **among)
    received = _mesh.Received(**({} if uploader is None else {"decode": uploader.decode}))
    # The leader holds one more itself, on its way to the peers: together as many as were asked for.
    own = structs.replace(request, depth=max(request.depth - 1, 1))
    inner = open_port(source, own, uploader, options, received.decode)
    return _mesh.LeaderPort(inner, received, meeting, place, **among)


def _decoding(uploader: Uploader | None) -> dict[str, Any]:
    """An accelerator reads pinned memory by itself."""
    return {} if uploader is None else {"decode": uploader.decode, "pinned": True}
