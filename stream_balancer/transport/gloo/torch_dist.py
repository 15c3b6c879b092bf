"""Rank batches over torch.distributed: one two-member gloo group per (controller, rank, incarnation).

::

    rank, producer   find the controller's address (given, or in a c10d store), connect, prove themselves
    controller       one listening socket and one thread for all who come; the event loop judges ranks
    both             a rank's gloo pair meets over that connection (``pair``), which then ends

A group of its own for every pair: the controller need not belong to the trainer's world, a restarted rank joins under
the next incarnation, and one death cannot break another rank's link.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal, Self, cast

import anyio
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from stream_balancer.errors import BrokenResourceError, ClosedResourceError, RankLostError, RefusedError, WireError
from stream_balancer.transport.admission import CLOSED, AdmittingTransport
from stream_balancer.transport.buffers import BufferPool
from stream_balancer.transport.channel import PayloadSource
from stream_balancer.transport.event_loop import InLoop, loop_caller
from stream_balancer.transport.gloo.channel import GlooChannel, LinkOptions
from stream_balancer.transport.gloo.packets import Pair
from stream_balancer.transport.gloo.pair import PAIR_TIMEOUT_S, meet
from stream_balancer.transport.handshake import pack, token_bytes
from stream_balancer.transport.producer_port import ProducerPort
from stream_balancer.transport.rank_port import Decode, RankPort
from stream_balancer.transport.rank_session import RankSession
from stream_balancer.transport.request_ledger import Limits
from stream_balancer.transport.sockets.acceptor import Acceptor, Meetings, refuse
from stream_balancer.transport.sockets.hub import Hub, is_loopback, listen
from stream_balancer.transport.sockets.joiner import Directory, Entry, Joiner, Where
from stream_balancer.transport.sockets.producers import connect_producer, welcome_producer
from stream_balancer.wire.messages import Join, JoinPeer, JoinProducer, JoinRank, WelcomeRank
from stream_balancer.wire.rank_batch import decode

__all__ = ["TorchTransport", "current_world", "join_pair", "open_port", "open_producer", "reach"]

_EVERYWHERE = ("", "0.0.0.0", "::")
_MAX_LABEL = 200

logger = logging.getLogger("stream_balancer.transport")


def current_world() -> tuple[Store, int, int]:
    """Store, rank and world size of the initialised default group. Raises ValueError if there is none."""
    if not dist.is_initialized():
        raise ValueError(
            "RankFeed() and connect() without a source take the store from torch.distributed, which is not "
            "initialised. Call init_process_group first, or give a store or 'tcp://host:port'"
        )
    store = cast("Store", cast("Any", dist.distributed_c10d)._get_default_store())
    return store, dist.get_rank(), dist.get_world_size()


# --- the controller --------------------------------------------------------------------------------------------------


class TorchTransport(AdmittingTransport):
    """Where ranks connect: ``async with TorchTransport.listen(dp_size=8) as transport: await serve(balancer,
    transport)``."""

    def __init__(
        self,
        store: Store | None = None,
        *,
        dp_size: int,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
        token: str | None = None,
        name: str = "stream_balancer",
        connect_timeout_s: float = 30.0,
        keepalive_s: float = 10.0,
        linger_s: float = 5.0,
        narrow: bool = True,
        shared_memory: bool = True,
        staged_bytes: int = Limits().staged_bytes,
        max_put_bytes: int = Limits().max_put_bytes,
    ) -> None:
        """Serve ranks that find this process through ``store`` (any c10d store; in a trainer's world, that world's), or
        are given :attr:`address` (None; see :meth:`listen`).

        The store holds one key, the address, and is not needed once a rank has joined. ``host``, ``port``: where to
        listen for ranks and producers; loopback and any free port unless you say otherwise. ``advertise``: the name or
        address to be written into the store, if it is not ``host``. ``token``: what ranks and producers must know
        (default: the environment's ``STREAM_BALANCER_TOKEN``; without one, a new one is written into the store, so that
        whoever reads the store may come in). See docs/security.md.

        ``name``: two balancers may share a store under different names. ``connect_timeout_s``: how long a rank that was
        let in may take to build its link. ``keepalive_s``: how often an idle link says so; after three times that
        without a word a peer is reported as stalled, and waited for. ``linger_s``: how long a closing end waits for the
        other's answer. ``narrow``: int64 columns travel as int32 where the values fit. ``shared_memory``: ranks on
        this machine read batches where they were packed, instead of through a socket. ``staged_bytes``: puts of one
        producer that have arrived and are not accepted yet; ``max_put_bytes``: the largest single put, which may exceed
        that if it travels alone.
        """
        super().__init__(dp_size)
        self._limits = Limits(staged_bytes, max_put_bytes).check()
        self._token = token_bytes(token)
        self._connect_timeout_s = connect_timeout_s
        self._options = LinkOptions(keepalive_s, linger_s, narrow, shared_memory)
        self._pool = BufferPool(keep=2 * dp_size)  # per rank one on its way and one being packed
        self._joining: set[RankSession] = set()
        self._in_loop: InLoop | None = None
        self._early: list[Callable[[], None]] = []  # who came before there was an event loop
        host_for_others = _advertised(host, advertise)
        self._socket = listen(host, port)
        port = self._socket.getsockname()[1]
        self._address = (
            f"tcp://[{host_for_others}]:{port}" if ":" in host_for_others else f"tcp://{host_for_others}:{port}"
        )
        self._directory = None if store is None else Directory(store, name)
        self._entry = Entry(host_for_others, port)
        if self._directory is not None:
            if not self._token:
                self._entry = Entry(host_for_others, port, secrets.token_hex(16))
                self._token = (self._entry.token or "").encode()
            self._directory.write(self._entry)
        self._hub = Hub("sb-acceptor", self._begin_listening)
        self._hub.start()

    @classmethod
    def listen(
        cls, *, dp_size: int, host: str = "127.0.0.1", port: int = 0, insecure: bool = False, **options: Any
    ) -> Self:
        """A transport that ranks reach at ``host:port`` (0 = any free one), without a store. See :attr:`address`.

        Raises ValueError for a host that other machines reach, without a ``token``: give one, or ``insecure=True`` if
        everybody who reaches that port may put rollouts, read them and stop this process. ``host="0.0.0.0"`` needs
        ``advertise=``, the name or address under which ranks reach this machine.
        """
        if not (insecure or token_bytes(options.get("token")) or is_loopback(host)):
            raise ValueError(
                f"listen(host={host!r}) without a token: whoever reaches that port could put rollouts, read them and "
                "stop this process. Set STREAM_BALANCER_TOKEN to the same secret in all processes, or pass token=; or "
                "insecure=True if the network keeps everybody else out. See docs/security.md"
            )
        return cls(dp_size=dp_size, host=host, port=port, **options)

    @classmethod
    def in_world(cls, **options: Any) -> Self:
        """A transport in the store of the initialised torch.distributed world, for as many ranks as that has.

        For single-controller mode: run it in a thread of one of the ranks (``anyio.run`` there), and let every rank,
        that one included, iterate ``RankFeed()``.
        """
        store, _, world_size = current_world()
        return cls(store, **{"dp_size": world_size, "host": _own_address(_master()), **options})

    @property
    def address(self) -> str:
        """``"tcp://host:port"``, for ranks (``RankFeed(address, ...)``) and producers (``connect(address)``)."""
        return self._address

    @property
    def sessions(self) -> Mapping[int, RankSession]:
        """By the trainer's rank, the newest incarnation that has come in, lost or not."""
        return {rank: session for (role, rank), session in self.admission.sessions.items() if not role}

    async def aclose(self) -> None:
        self.admission.close()
        self._producers.fail(ClosedResourceError())
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as group:
                for session in [*self.admission.sessions.values(), *self._joining]:
                    group.start_soon(session.aclose)
                group.start_soon(
                    functools.partial(anyio.to_thread.run_sync, self._leave, limiter=anyio.CapacityLimiter(1))
                )

    def _open(self) -> None:
        if self._in_loop is None:
            self._in_loop = loop_caller()
            self._hub.do(self._let_in_who_came_early)

    def _leave(self) -> None:
        if self._directory is not None:
            self._directory.remove(self._entry)
        self._hub.close()

    @property
    def received_bytes(self) -> int:
        """Bytes that came from producers, ever."""
        return self._hub.received_bytes

    # in the hub's thread

    def _begin_listening(self) -> bool:
        meetings = Meetings(self._hub)
        joins: dict[type[Join], Callable[[socket.socket, Any], None]] = {
            JoinRank: self._on_rank,
            JoinProducer: self._on_producer,
            JoinPeer: meetings.arrive,
        }
        Acceptor(self._hub, self._socket, self._token, joins)
        return True

    def _let_in_who_came_early(self) -> None:
        early, self._early = self._early, []
        for come in early:
            come()

    def _on_rank(self, sock: socket.socket, request: JoinRank) -> None:
        if self._in_loop is None:
            self._early.append(functools.partial(self._on_rank, sock, request))
        else:
            self._in_loop(functools.partial(self._judge, sock, request))

    def _on_producer(self, sock: socket.socket, request: JoinProducer) -> None:
        in_loop = self._in_loop
        if self.admission.closed:
            refuse(sock, CLOSED)
            return
        if in_loop is None:
            self._early.append(functools.partial(self._on_producer, sock, request))
            return
        try:
            session = welcome_producer(self._hub, sock, request, self._limits, in_loop, linger_s=self._options.linger_s)
        except OSError:
            sock.close()
            return
        in_loop(functools.partial(self.readmit, session))

    # in the loop

    def _judge(self, sock: socket.socket, request: JoinRank) -> None:
        refused = self.admission.refusal(request)
        if refused is not None:
            refuse(sock, refused)
        elif self._in_loop is not None and self.admission.begin(request, functools.partial(self._judge, sock, request)):
            self._begin(sock, request, self._in_loop)

    def _begin(self, sock: socket.socket, request: JoinRank, in_loop: InLoop) -> None:
        """Build the pair. The rank is in once that has worked out."""

        def connect() -> Pair:
            try:
                pair = self._pair_with(sock)
            except BaseException:
                in_loop(lambda: self._on_connected(session, request, ready=False))
                raise
            in_loop(lambda: self._on_connected(session, request, ready=True))
            return pair

        channel = GlooChannel(
            f"sb-rank{request.rank}.{request.incarnation}",
            connect,
            functools.partial(_shut_down, sock),
            self._options,
            pool=self._pool,
            offer=request.depth + 1,
        )
        session = RankSession(channel, request, in_loop)
        self._joining.add(session)
        channel.start(session)

    def _on_connected(self, session: RankSession, request: JoinRank, *, ready: bool) -> None:
        self._joining.discard(session)
        if not (ready and self.admission.admit(session)):
            threading.Thread(target=session.channel.abort, name="sb-errand", daemon=True).start()
        self.admission.settle(request)

    # in a channel's thread

    def _pair_with(self, sock: socket.socket) -> Pair:
        with sock:
            sock.settimeout(self._connect_timeout_s)
            sock.sendall(pack(WelcomeRank()))
            return meet(sock, 0, token=self._token, hostname=sock.getsockname()[0])


def _shut_down(sock: socket.socket) -> None:
    """Wake a thread that waits on it."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


# --- ranks and producers ---------------------------------------------------------------------------------------------


def join_pair(joiner: Joiner, request: Join, side: Literal[0, 1]) -> Pair:
    """Join, and build the pair with whom the controller says; again, if that did not work out. Raises as
    :meth:`Joiner.join` does."""
    while True:
        sock, _ = joiner.join(lambda _: request)
        with sock:
            try:
                sock.settimeout(PAIR_TIMEOUT_S)
                return meet(sock, side, token=joiner.token, hostname=joiner.host or sock.getsockname()[0])
            except (RuntimeError, OSError) as error:
                logger.warning("a link was not built, trying again: %s", str(error).split("\n", 1)[0])


def reach(source: Where, options: Mapping[str, Any]) -> tuple[Joiner, LinkOptions]:
    """How to find the controller, and how to talk with it, out of a feed's ``options``: those of :class:`Joiner` and of
    :class:`LinkOptions`. Raises TypeError for any other."""
    link = {key: value for key, value in options.items() if key in LinkOptions._fields}
    return Joiner(source, **{key: value for key, value in options.items() if key not in link}), LinkOptions(**link)


def open_port(
    source: Store | str,
    request: JoinRank,
    *,
    decode: Decode = decode,
    pinned: bool = False,
    payloads: PayloadSource | None = None,
    rejoin: bool = False,
    **options: Any,
) -> RankPort:
    """A rank's end, over a store or the address of a controller; connects in the background. ``rejoin``: the
    controller has a journal and is started again, should it die. ``options``: as for :func:`reach`."""
    joiner, link = reach(source, options)
    rank = request.rank

    def connect() -> Pair:
        try:
            return join_pair(joiner, request, 1)
        except (RefusedError, WireError):
            raise
        except BrokenResourceError as error:
            raise RankLostError(f"rank {rank}: {error}", rank=rank, cause=str(error)) from None

    def channel() -> GlooChannel:
        name = f"sb-feed{rank}.{request.incarnation}"
        return GlooChannel(name, connect, joiner.cancel, link, pool=BufferPool(keep=0))

    port = RankPort(
        channel(),
        request,
        decode=decode,
        pinned=pinned,
        payloads=payloads,
        linger_s=link.linger_s,
        reconnect=channel if rejoin else None,
    )
    port.start()
    return port


def open_producer(
    source: Store | str,
    *,
    direct: bool = False,
    label: str | None = None,
    linger_s: float = 5.0,
    rejoin: bool = False,
    **options: Any,
) -> ProducerPort:
    """A producer's end, over a store or the address of a controller. ``rejoin``: as :func:`open_port`'s. ``options``:
    those of :class:`Joiner`."""
    joiner = Joiner(source, **options)
    label = (label or f"{socket.gethostname()}:{os.getpid()}")[:_MAX_LABEL]
    return connect_producer(joiner, label, linger_s=linger_s, direct=direct, rejoin=rejoin)


def _advertised(host: str, advertise: str | None) -> str:
    """The name or address that others are given."""
    if advertise is None and host in _EVERYWHERE:
        raise ValueError(
            f"host={host!r} listens on every address of this machine, and ranks need one of them: pass "
            "advertise='<name or address of this machine>' too"
        )
    return advertise or host


def _master() -> str:
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def _own_address(peer: str) -> str:
    """The address of this machine that ``peer`` would see. No packet is sent."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return cast("str", probe.getsockname()[0])
    return "127.0.0.1"
