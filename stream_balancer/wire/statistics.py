"""A balancer's statistics as bytes, for a producer or rank in another process: plain values, bounded in size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from stream_balancer.statistics import Statistics
from stream_balancer.wire.payload import reader

MAX_STATISTICS_BYTES = 2**20


def encode_statistics(statistics: Statistics) -> bytes:
    """As msgpack. Raises ValueError for more than ``MAX_STATISTICS_BYTES``."""
    raw = _encoder.encode(statistics)
    # it goes into one message, between those that ranks wait for
    if len(raw) > MAX_STATISTICS_BYTES:
        raise ValueError(
            f"statistics() of {len(statistics.rank_busy_seconds)} ranks take {len(raw)} bytes, more than the "
            f"{MAX_STATISTICS_BYTES} that travel to other processes. Ask for them where the balancer is"
        )
    return raw


def _plain(value: Any) -> Any:
    """Views of mappings, and numpy's numbers."""
    return dict(value) if isinstance(value, Mapping) else value.item()


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
decode_statistics: Callable[[bytes], Statistics] = reader(
    Statistics, "statistics (install one stream_balancer everywhere)"
)
"""Statistics that :func:`encode_statistics` wrote. Raises WireError for anything else."""
