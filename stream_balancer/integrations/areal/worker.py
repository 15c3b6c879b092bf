"""AReaL's RPC worker that knows the packing algorithm "balanced": what ``SchedulingSpec.cmd`` names.

::

    scheduling_spec:
      - cmd: python -m stream_balancer.integrations.areal.worker   # python -m areal.infra.rpc.rpc_server otherwise

AReaL starts its workers as processes of their own and sends them their config. A worker that was not patched goes on
with a dict in the place of a ``MicroBatchSpec`` with that name (AReaL 1.0), or fails at its first batch (2.0).
"""

from __future__ import annotations

from stream_balancer.integrations.areal import patch


def main() -> None:
    """AReaL's own server, with its own arguments, after :func:`~stream_balancer.integrations.areal.patch`."""
    from areal.infra.rpc import rpc_server

    patch()
    rpc_server.main()


if __name__ == "__main__":
    main()
