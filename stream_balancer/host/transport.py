"""Transports: one port of this process, at which ranks and producers connect over TCP."""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, Self

import anyio.lowlevel

from stream_balancer.net.address import Directory, Entry, current_world, token_bytes
from stream_balancer.net.listener import Listener
from stream_balancer.net.messages import Welcome
from stream_balancer.net.service import Service

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_EVERYWHERE = ("", "0.0.0.0", "::")


class Transport(Protocol):
    """Meeting point of controller and peers: a :class:`TorchTransport`, or a
    :class:`stream_balancer.testing.MemoryNetwork`."""

    dp_size: int
    """DP ranks that take part."""
    service: Service
    """Controller's end of all connections. Outlives a run of ``serve``."""

    def resize(self, dp_size: int) -> None:
        """Let so many ranks take part from now on. A rank that is in stays so."""
        ...


class TorchTransport:
    """Meeting point of ranks and controller: ``async with TorchTransport.listen(dp_size=8) as transport: await
    serve(balancer, transport)``."""

    def __init__(
        self, store: Store | None = None, *, dp_size: int, host: str = "127.0.0.1", port: int = 0,
        insecure: bool = False, advertise: str | None = None, token: str | None = None, name: str = "stream_balancer",
        movers: Sequence[str] | None = None, staged_bytes: int = 64 * 2**20,
        max_put_bytes: int = 2**30, most_staged_bytes: int = 2**32, tls: ssl.SSLContext | None = None,
    ) -> None:  # fmt: skip
        """Serve ranks that find this process through ``store`` (any c10d store; in a trainer's world, that world's), or
        are given :attr:`address` (None; see :meth:`listen`).

        The store holds one key, the address, and is not needed once a rank has joined. ``host``, ``port``: where to
        listen for ranks and producers; loopback and any free port unless you say otherwise. ``advertise``: the name or
        address to be written into the store, if it is not ``host``. ``token``: what ranks and producers must know
        (default: the environment's ``STREAM_BALANCER_TOKEN``; without one, a new one is written into the store, so that
        whoever reads the store may come in). ``tls``: encrypt what travels on sockets. See docs/security.md.

        ``name``: two balancers may share a store under different names. ``movers``: how bulk bytes travel, best first,
        where both ends can; sockets carry the rest. Default: shared memory with ranks on this machine, and through a
        ``store`` first torch.distributed's send/recv; none with ``tls``, which would not encrypt them. ``()``: sockets
        alone.

        ``staged_bytes``: puts of one producer that have arrived and are not accepted yet; ``max_put_bytes``: the
        largest single put, which may exceed that if it travels alone; ``most_staged_bytes``: of all producers, beyond
        which their sockets are not read.
        """
        for knob, value in {"staged_bytes": staged_bytes, "max_put_bytes": max_put_bytes}.items():
            if value < 1:
                raise ValueError(f"{knob} must be >= 1, not {value}: no put could ever be sent")
        self.dp_size = dp_size
        secret, in_store = token_bytes(token), None
        if store is None and not (insecure or secret or _is_loopback(host)):
            raise ValueError(
                f"listen(host={host!r}) without a token: whoever reaches that port could put rollouts, read them and "
                "stop this process. Set STREAM_BALANCER_TOKEN to the same secret in all processes, or pass token=; or "
                "insecure=True if the network keeps everybody else out. See docs/security.md"
            )
        if advertise is None and host in _EVERYWHERE:
            raise ValueError(
                f"host={host!r} listens on every address of this machine, and ranks need one of them: pass "
                "advertise='<name or address of this machine>' too"
            )
        if store is not None and not secret:
            # without a secret whoever reaches the port could come in: those who read the store are trusted
            in_store = secrets.token_hex(16)
            secret = in_store.encode()
        # send/recv leaves sockets to what is small, but a store is needed to form its groups; TLS covers sockets alone
        if movers is None:
            movers = () if tls else (("torch_dist",) if store is not None else ()) + ("shared_memory",)
        self.service = Service(
            lambda arrived: Listener(host, port, secret, arrived, tls=tls),
            limits=Welcome(staged_bytes=staged_bytes, max_call_bytes=max_put_bytes),
            movers=movers,
            most_staged_bytes=most_staged_bytes,
        )
        self._entry = Entry(advertise or host, int(self.service.address.rpartition(":")[2]), in_store)
        self._directory = None if store is None else Directory(store, name)
        if self._directory is not None:
            self._directory.write(self._entry)

    @classmethod
    def listen(cls, *, dp_size: int, **options: Any) -> Self:
        """A transport that ranks reach at ``host`` and ``port`` (0 = any free one), without a store. See
        :attr:`address`. The options are those of the class.

        Raises ValueError for a host that other machines reach, without a ``token``: give one, or ``insecure=True`` if
        everybody who reaches that port may put rollouts, read them and stop this process. ``host="0.0.0.0"`` needs
        ``advertise=``, the name or address under which ranks reach this machine.
        """
        return cls(dp_size=dp_size, **options)

    @classmethod
    def in_world(cls, **options: Any) -> Self:
        """A transport in the store of the initialised torch.distributed world, for as many ranks as that has.

        For single-controller mode: run it in a thread of one of the ranks (``anyio.run`` there), and let every rank,
        that one included, iterate ``RankFeed()``.
        """
        store, _, world_size = current_world()
        master = os.environ.get("MASTER_ADDR", "127.0.0.1")
        return cls(store, **{"dp_size": world_size, "host": _own_address(master), **options})

    @property
    def address(self) -> str:
        """``"tcp://host:port"``, for ranks (``RankFeed(address, ...)``) and producers (``connect(address)``)."""
        return self._entry.address

    def resize(self, dp_size: int) -> None:
        """Let so many ranks take part from now on; ``serve`` calls it when the balancer's ``dp_size`` changes. A rank
        that is in stays so."""
        self.dp_size = dp_size

    async def aclose(self) -> None:
        """Refuse further ranks and close every connection. Idempotent."""
        self.service.close("the controller has closed its transport")
        if self._directory is not None:
            # else the store would send ranks to a port that is closed
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._directory.remove, self._entry, limiter=anyio.CapacityLimiter(1))
        await anyio.lowlevel.checkpoint()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _is_loopback(host: str) -> bool:
    """Only this machine can reach ``host``."""
    try:
        # names, too: localhost, and what a hosts file makes of others
        found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ValueError(f"cannot listen on {host!r}, which is no name or address of this machine: {error}") from None
    return ipaddress.ip_address(found[4][0]).is_loopback


def _own_address(peer: str) -> str:
    """The address of this machine that ``peer`` would see. No packet is sent."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # the routing table chooses: a machine may have several addresses, and its own name may be loopback
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])
    return "127.0.0.1"
