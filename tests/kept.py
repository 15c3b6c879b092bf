"""Payloads that stay with a producer, of ranks in one event loop: what is gone, how often it was read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from stream_balancer.client.payloads import PayloadOwner
from stream_balancer.rollouts import Rollout
from stream_balancer.testing.network import MemoryNetwork
from stream_balancer.wire.codec import Handle, Leases, decode_rollouts, encode_rollouts


class Kept(PayloadOwner):
    """A producer's payloads. ``gone`` are not there any more; ``die()`` instead of an answer to who fetches."""

    def __init__(self, network: MemoryNetwork, die: Callable[[], object] | None = None) -> None:
        self._die, self._network = die, network
        self.payloads: list[Rollout] = []
        self.gone: set[int] = set()
        self.num_reads = 0
        self.num_bytes = 0
        super().__init__(network.dialer().listen, b"", "worker 3")

    def remote(self, rollout: Rollout) -> Rollout:
        """The rollout, as the controller has it."""
        self.payloads.append(rollout)
        encoded = encode_rollouts([rollout], handles=[Handle(self.owner, len(self.payloads) - 1)])
        return decode_rollouts(encoded.header, None, lambda _: Leases())[0]

    def port(self, network: MemoryNetwork, rank: int, **join: Any) -> Any:
        """Where the rank connects, which fetches here."""
        peer = network.connect(rank, **join)
        peer.elsewhere = lambda _: network.dialer(self.owner.address)  # type: ignore[method-assign]
        return peer

    def without(self, *gone: int) -> Self:
        """The same payloads, of which these are gone for whoever fetches here."""
        other = type(self)(self._network)
        other.payloads, other.gone = self.payloads, {*gone}
        return other

    def _fetch(self, peer: Any, asked: Any) -> Any:
        if self._die is not None:
            self._die()
        self.num_reads += 1
        self._kept = {key: one for key, one in enumerate(self.payloads) if key not in self.gone}
        answer = super()._fetch(peer, asked)
        self.num_bytes += answer.payload.total
        return answer
