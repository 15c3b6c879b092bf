"""The tests of behaviour against the new serving, before the package's names are switched:
``PYTHONPATH=tests pytest -p switch tests/aio/test_dispatch.py``. Goes with the old code."""

from __future__ import annotations

import helpers

import stream_balancer as sb
import stream_balancer.testing
from stream_balancer.client.feed import RankFeed
from stream_balancer.client.producer import Producer, connect
from stream_balancer.host.producers import attend
from stream_balancer.host.serve import serve
from stream_balancer.host.transport import TorchTransport, door_of
from stream_balancer.testing.network import MemoryNetwork

sb.serve = serve  # type: ignore[assignment]
sb.RankFeed = RankFeed  # type: ignore[misc, assignment]
sb.connect, sb.Producer = connect, Producer  # type: ignore[misc, assignment]
sb.TorchTransport = TorchTransport  # type: ignore[misc, assignment]
stream_balancer.testing.MemoryNetwork = MemoryNetwork  # type: ignore[misc, assignment]


async def _attend(balancer: sb.StreamBalancer, transport: object, *, direct: bool = False) -> None:
    await attend(balancer, door_of(transport).service, direct=direct)


helpers.attend = _attend  # type: ignore[assignment]
helpers.MemoryNetwork = MemoryNetwork  # type: ignore[attr-defined, assignment, misc]
