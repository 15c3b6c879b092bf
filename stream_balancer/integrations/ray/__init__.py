"""The balancer as a Ray actor: put from any worker on any node, iterate on any trainer rank.

::

    balancer = host(sb.BalancerConfig(dp_size=8, batch_size=256), name="balancer")     # once, anywhere
    await balancer.put(rollout)                 # in any task or actor: the handle travels as an argument
    for batch in balancer.feed(rank=3): ...     # in each trainer rank
    balancer = find("balancer")                 # where nobody passed the handle

The contract of ``put`` is StreamBalancer's. docs/ray.md says what happens when a worker, a node, a rank or the actor
dies. ``actor`` is the process of the balancer, ``handle`` what all others have; the transport is ``transport.ray``.
"""

from stream_balancer.integrations.ray.actor import LostRollout
from stream_balancer.integrations.ray.handle import RayBalancer, find, host

__all__ = ["LostRollout", "RayBalancer", "find", "host"]
