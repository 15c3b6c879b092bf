"""Shares over torch.distributed: one two-member gloo group per (controller, rank, incarnation), over any c10d store.

How a rank finds its controller, all through the store::

    rank         claims the first free key ``join/<n>`` and writes there who it is; waits for ``reply/<token>``
    controller   waits for ``join/<n>``, n = 0, 1, 2, ...; answers; waits for ``here/<token>``
    rank         writes ``here/<token>``; then both build ``pair/<token>``

A group of its own for every pair: the controller need not belong to the trainer's world, a restarted rank joins under
the next incarnation, and one death cannot break another rank's link.
"""

from __future__ import annotations

import functools
import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Literal, Self, cast

import anyio
import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore, Work

from stream_balancer.errors import AlreadyInUseError, ClosedResourceError, RankLostError, to_raise
from stream_balancer.transport._descriptors import keep_sockets_from_children
from stream_balancer.transport._endpoint import Pair, Pending
from stream_balancer.transport._links import ControllerLink, Decode, PortBase
from stream_balancer.transport._loop import Arrivals, loop_caller
from stream_balancer.transport._producers import Door, Intake, Outlet, WayIn
from stream_balancer.transport._puts import Limits
from stream_balancer.transport._slabs import SlabPool
from stream_balancer.wire import PROTOCOL, decode

__all__ = ["GlooPort", "TorchTransport", "current_world", "open_outlet"]

_FOR_EVER = timedelta(days=3650)  # timedelta.max overflows in gloo
_SPARE_TAG, _TAG = 7, 1
_HERE = "here"
_PAIR_TIMEOUT_S = 5.0  # both are known to be there and take milliseconds; later waits have their own limit: none
_STORE_TIMEOUT_S = 5.0  # a connection that was just accepted answers at once, or its host has died
_gloo = cast("Any", dist).ProcessGroupGloo  # its options are missing from torch's type stubs


class _Work:
    """A posted gloo operation."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self) -> None:
        """Block for ever if need be; RuntimeError if the pair broke."""
        self._work.wait(_FOR_EVER)


class _GlooPair:
    """Two processes in a gloo group of their own. Member 0 is the controller."""

    def __init__(self, store: Store, me: Literal[0, 1], device: Any) -> None:
        options = _gloo._Options()
        options._timeout = timedelta(seconds=_PAIR_TIMEOUT_S)
        options._devices = [device]
        options._threads = 1
        self._group = _gloo(store, me, 2, options)
        keep_sockets_from_children(store.get("0/0") + store.get("0/1"))  # where the two ends told each other to connect
        self._peer = 1 - me
        self._poisoned = False

    def send(self, tensor: Tensor) -> object:
        return self._group.send([tensor], self._peer, _TAG)

    def receive(self, tensor: Tensor) -> Pending:
        return _Work(self._group.recv([tensor], self._peer, _TAG))

    def poison(self) -> None:
        """An expired wait closes the pair; nothing else wakes a thread that waits in gloo."""
        if not self._poisoned:
            self._poisoned = True
            with suppress(RuntimeError):
                self._group.recv([torch.zeros(1)], self._peer, _SPARE_TAG).wait(timedelta(milliseconds=1))


class _Announcement(msgspec.Struct):
    """What a rank writes under ``join/<n>``."""

    token: str
    protocol: int
    rank: int
    dp_size: int
    incarnation: int
    depth: int
    max_batch_bytes: int
    producer: bool = False
    """Not a rank: the numbers above mean nothing then."""


class _Reply(msgspec.Struct):
    """What the controller writes under ``reply/<token>``."""

    verdict: Literal["ok", "busy", "value", "closed"]
    message: str = ""
    way_in: WayIn | None = None
    """For a producer."""


def _write_reply(store: Store, guest: _Announcement, reply: _Reply) -> None:
    store.set(f"reply/{guest.token}", msgspec.json.encode(reply).decode())


def _in_name_space(store: Store, name: str) -> Store:
    """The balancer's own corner of a store whose waits do not expire. The connection must be nobody else's."""
    own = PrefixStore(name, store)
    own.set_timeout(_FOR_EVER)
    return own


class _Stores:
    """Connections to one store, lent to one thread each: a thread that waits in a store locks its connection.

    Connections are kept for reuse, because each costs c10d a reverse name lookup, and a slow name server takes seconds.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name
        self._idle: list[Store] = []
        self._lock = threading.Lock()

    @contextmanager
    def borrow(self) -> Iterator[Store]:
        """A connection for this thread."""
        with self._lock:
            own = self._idle.pop() if self._idle else None
        if own is None:
            own = _in_name_space(cast("Any", self._store).clone(), self._name)
        yield own
        with self._lock:
            self._idle.append(own)  # not after an error: it may hold half an answer


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


class TorchTransport:
    """Where ranks connect: ``async with TorchTransport.listen(dp_size=8) as transport: await serve(balancer,
    transport)``."""

    def __init__(
        self,
        store: Store,
        *,
        dp_size: int,
        host: str = "127.0.0.1",
        name: str = "stream_balancer",
        connect_timeout_s: float = 30.0,
        keepalive_s: float = 10.0,
        linger_s: float = 5.0,
        narrow: bool = True,
        shared_memory: bool = True,
        staged_bytes: int = Limits().staged_bytes,
        max_put_bytes: int = Limits().max_put_bytes,
    ) -> None:
        """Serve ranks that use ``store`` (any c10d store; in a trainer's world, that world's).

        ``host``: the address ranks reach this process under; loopback unless you say otherwise, because links are
        neither authenticated nor encrypted. ``name``: two balancers may share a store under different names.
        ``connect_timeout_s``: how long a rank that has announced itself may take to connect. ``keepalive_s``: how often
        an idle link says so; after three times that without a word a peer is reported as stalled, and waited for.
        ``linger_s``: how long a closing end waits for the other's good-bye. ``narrow``: int64 columns travel as int32
        where the values fit. ``shared_memory``: ranks on this machine read batches where they were packed, instead of
        through a socket. ``staged_bytes``: puts of one producer that have arrived and are not accepted yet;
        ``max_put_bytes``: the largest single put, which may exceed that if it travels alone.
        """
        self._limits = Limits(staged_bytes, max_put_bytes).check()
        self._stores = _Stores(store, name)
        self.dp_size = dp_size
        self._host = host
        self._connect_timeout_s = connect_timeout_s
        self._keepalive_s = keepalive_s
        self._linger_s = linger_s
        self._narrow = narrow
        self._shared_memory = shared_memory
        self._pool = SlabPool(keep=2 * dp_size)  # per rank one on its way and one being packed
        self._token = uuid.uuid4().hex
        self._waiting: list[ControllerLink] = []
        self._links: dict[int, ControllerLink] = {}
        self._joining: set[ControllerLink] = set()
        self._on_hold: list[_Announcement] = []
        self._producers: Arrivals[Intake] = Arrivals()
        self._door: Door | None = None  # made for the first producer
        self._arrival = anyio.Event()
        self._error: Exception | None = None
        self._in_loop: Callable[[Callable[[], object]], None] | None = None
        self._doorman = threading.Thread(target=self._admit_all, name="sb-doorman", daemon=True)
        self.address: str | None = None
        """``tcp://host:port`` for ranks, if this transport owns its store."""

    @classmethod
    def listen(cls, *, dp_size: int, host: str = "127.0.0.1", port: int = 0, **options: Any) -> Self:
        """A transport with a store of its own, listening on ``host:port`` (0 = any free one). See :attr:`address`."""
        listener = socket.create_server((host, port), backlog=1024)
        bound = listener.getsockname()[1]
        store = TCPStore(
            host,
            bound,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            timeout=timedelta(days=1),
        )
        transport = cls(store, dp_size=dp_size, host=host, **options)
        transport.address = f"tcp://{host}:{bound}"
        return transport

    @classmethod
    def in_world(cls, **options: Any) -> Self:
        """A transport in the store of the initialised torch.distributed world, for as many ranks as that has.

        For single-controller mode: run it in a thread of one of the ranks (``anyio.run`` there), and let every rank,
        that one included, iterate ``RankFeed()``.
        """
        store, _, world_size = current_world()
        return cls(store, **{"dp_size": world_size, "host": _own_address(_master()), **options})

    async def accept_producer(self) -> Intake:
        """The next producer. If cancelled, none is lost. Raises ClosedResourceError once closed."""
        self._open()
        return await self._producers.next()

    def readmit(self, link: Any) -> None:
        """Give a producer back, for the next ``attend``."""
        self._producers.add(link)

    async def accept(self) -> ControllerLink:
        """See :class:`~stream_balancer.transport.Transport`."""
        self._open()
        while not self._waiting:
            if self._error is not None:
                raise to_raise(self._error)
            self._arrival = anyio.Event()
            await self._arrival.wait()
        return self._waiting.pop(0)

    async def aclose(self) -> None:
        """See :class:`~stream_balancer.transport.Transport`."""
        if self._error is None:
            self._error = ClosedResourceError()
        self._arrival.set()
        self._producers.fail(self._error)
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as group:
                for link in [*self._links.values(), *self._joining]:
                    group.start_soon(link.aclose)
                for job in [self._dismiss] if self._door is None else [self._dismiss, self._door.close]:
                    group.start_soon(functools.partial(anyio.to_thread.run_sync, job, limiter=anyio.CapacityLimiter(1)))

    async def __aenter__(self) -> Self:
        self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _open(self) -> None:
        if self._in_loop is None:
            self._in_loop = loop_caller()
            self._doorman.start()
            _DOORS.add(self)

    # the doorman's thread: one blocking wait in the store per arrival

    def _admit_all(self) -> None:
        try:
            with self._stores.borrow() as store:
                number = store.add("joined", 0)
                while (raw := store.get(f"join/{number}")) != self._token.encode():
                    number = store.add("joined", 1)
                    with suppress(msgspec.MsgspecError):  # not an announcement of ours: nobody to answer
                        self._admit(msgspec.json.decode(raw, type=_Announcement))
                store.add("joined", 1)  # past our own good-bye, for a controller that comes after us
        except RuntimeError as error:  # the store is gone
            self._to_loop(functools.partial(self._fail, error))

    def _admit(self, guest: _Announcement) -> None:
        reply = self._judge(guest)
        if reply is None:
            self._to_loop(functools.partial(self._welcome, guest))
        else:
            self._answer(guest, reply)

    def _answer(self, guest: _Announcement, reply: _Reply) -> None:
        with suppress(RuntimeError), self._stores.borrow() as store:
            _write_reply(store, guest, reply)

    def _judge(self, guest: _Announcement) -> _Reply | None:
        who = f"rank {guest.rank} announces"
        if guest.producer:
            who = "a producer announces"
        if guest.protocol != PROTOCOL:
            problem = f"protocol {guest.protocol}, but the controller speaks {PROTOCOL}. Install one version everywhere"
        elif guest.producer:
            return None
        elif guest.dp_size != self.dp_size:
            problem = (
                f"dp_size={guest.dp_size}, but the controller balances for dp_size={self.dp_size}. "
                "Give both the same number of data-parallel ranks"
            )
        elif not 0 <= guest.rank < self.dp_size or guest.depth < 1 or guest.incarnation < 0:
            problem = (
                f"depth={guest.depth}, incarnation={guest.incarnation}, but ranks go from 0 to {self.dp_size - 1}, "
                "depth is at least 1 and incarnation at least 0"
            )
        else:
            return None
        return _Reply("value", f"{who} {problem}")

    def _to_loop(self, function: Callable[[], object]) -> None:
        if self._in_loop is not None:
            self._in_loop(function)

    def _dismiss(self) -> None:
        """Make the doorman's wait end, and join him."""
        if self._doorman.ident is not None:
            with suppress(RuntimeError), self._stores.borrow() as store:
                _claim(store, self._token)
            self._doorman.join()
        _DOORS.discard(self)

    # in the loop

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = RankLostError(
                f"the store ranks meet in went away: {error}. Restart the process that hosts it",
                rank=-1,
                cause=str(error),
            )
        self._producers.fail(self._error)
        self._arrival.set()

    def _welcome(self, guest: _Announcement) -> None:
        if self._error is not None or self._in_loop is None:
            return
        if guest.producer:
            self._show_in(guest, self._in_loop)
            return
        before = self._links.get(guest.rank)
        if before is not None and before.live and before.incarnation >= guest.incarnation:
            refusal = (
                f"rank {guest.rank} is already connected (incarnation {before.incarnation}). One RankFeed per rank: "
                "close the other one first, or start the rank again under a higher incarnation"
            )
            self._in_background(functools.partial(self._answer, guest, _Reply("busy", refusal)))
        elif any(link.rank == guest.rank and link.incarnation >= guest.incarnation for link in self._joining):
            self._on_hold.append(guest)  # until that one is connected, or has failed
        else:
            self._begin(guest, self._in_loop)

    def _show_in(self, guest: _Announcement, in_loop: Callable[[Callable[[], object]], None]) -> None:
        if self._door is None:
            self._door = Door(
                self._host, self._limits, in_loop=in_loop, arrived=self.readmit, linger_s=self._linger_s
            )  # fmt: skip
        self._in_background(functools.partial(self._answer, guest, _Reply("ok", way_in=self._door.way_in)))

    def _begin(self, guest: _Announcement, in_loop: Callable[[Callable[[], object]], None]) -> None:
        link = ControllerLink(
            rank=guest.rank,
            incarnation=guest.incarnation,
            depth=guest.depth,
            max_bytes=guest.max_batch_bytes,
            connect=functools.partial(self._join, guest),
            cancel_connect=functools.partial(self._uninvite, guest),
            settled=self._on_settled,
            in_loop=in_loop,
            pool=self._pool,
            narrow=self._narrow,
            shared_memory=self._shared_memory,
            keepalive_s=self._keepalive_s,
            linger_s=self._linger_s,
        )
        self._joining.add(link)
        link._start()

    def _on_settled(self, link: ControllerLink) -> None:
        self._joining.discard(link)
        if link.ready and self._error is None:
            self._install(link)
        else:
            self._in_background(link._shut)
        held = [guest for guest in self._on_hold if guest.rank == link.rank]
        self._on_hold = [guest for guest in self._on_hold if guest.rank != link.rank]
        for guest in held:
            self._welcome(guest)

    def _install(self, link: ControllerLink) -> None:
        before = self._links.get(link.rank)
        if before is not None and before.live and before.incarnation > link.incarnation:
            self._in_background(link._shut)  # a newer one was faster
            return
        if before is not None:
            before.supersede(link.incarnation)
            self._in_background(before._shut)
        self._links[link.rank] = link
        self._waiting.append(link)
        self._arrival.set()

    @staticmethod
    def _in_background(function: Callable[[], object]) -> None:
        threading.Thread(target=function, name="sb-errand", daemon=True).start()

    # in a link's thread

    def _join(self, guest: _Announcement) -> Pair:
        with self._stores.borrow() as store:
            _write_reply(store, guest, _Reply("ok"))
            here = f"here/{guest.token}"
            store.wait([here], timedelta(seconds=self._connect_timeout_s))
            if store.get(here) != _HERE.encode():
                raise ClosedResourceError
            device = _gloo.create_device(hostname=self._host)
            return _GlooPair(PrefixStore(f"pair/{guest.token}", store), 0, device)

    def _uninvite(self, guest: _Announcement) -> None:
        """Wake a thread that waits for a rank which announced itself and may never come."""
        with suppress(RuntimeError), self._stores.borrow() as store:
            store.set(f"here/{guest.token}", "closed")


_DOORS: set[TorchTransport] = set()


def _claim(store: Store, value: str) -> None:
    """Write ``value`` under the first free ``join/<n>``. Claiming and writing is one step, so nobody can leave a hole
    behind."""
    number = store.add("joined", 0)
    while bytes(store.compare_set(f"join/{number}", "", value)).decode() != value:
        number += 1


# --- ranks and producers ---------------------------------------------------------------------------------------------


class _Visit:
    """One announcement to a controller, and its answer."""

    def __init__(self, source: Store | str, name: str, announcement: _Announcement) -> None:
        self._source, self._name, self._announcement = source, name, announcement
        self._asked = self._answered = False
        self._cancelled = threading.Event()

    def ask(self) -> tuple[_Reply, Store, str]:
        """Announce and wait: the answer, a connection to the store, and the address of this machine that the
        controller sees. Raises what a refusal says, ClosedResourceError once cancelled."""
        store, host = _reach_store(self._source, self._name, self._cancelled)
        _claim(store, msgspec.json.encode(self._announcement).decode())
        self._asked = True
        if self._cancelled.is_set():
            raise ClosedResourceError
        reply = msgspec.json.decode(store.get(f"reply/{self._announcement.token}"), type=_Reply)
        self._answered = True
        if reply.verdict == "busy":
            raise AlreadyInUseError(reply.message)
        if reply.verdict == "value":
            raise ValueError(reply.message)
        if reply.verdict == "closed":
            raise ClosedResourceError
        return reply, store, host

    def cancel(self) -> None:
        """Make :meth:`ask` raise, wherever it waits. From any thread."""
        self._cancelled.set()
        if self._asked and not self._answered:  # it waits for the answer: give it one
            with suppress(RuntimeError), _stores_of(self._source, self._name).borrow() as store:
                _write_reply(store, self._announcement, _Reply("closed"))


def _stores_of(source: Store | str, name: str) -> _Stores:
    """Connections to the store at ``source``."""
    if isinstance(source, str):
        host, port = _parse(source)
        source = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=5))
    return _Stores(source, name)


def _reach_store(source: Store | str, name: str, cancelled: threading.Event) -> tuple[Store, str]:
    """A connection of one's own to the store, and the address of this machine that its host sees. Waits for a
    controller that starts later; raises ClosedResourceError once ``cancelled``."""
    if not isinstance(source, str):
        return _in_name_space(cast("Any", source).clone(), name), _own_address(_master())
    host, port = _parse(source)
    delay_s = 0.05
    while True:
        try:
            with socket.create_connection((host, port), timeout=5.0) as probe:
                own = probe.getsockname()[0]
            # a controller that dies just now would otherwise be waited for, in C++, where nothing can be cancelled
            store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_STORE_TIMEOUT_S))
            store.set_timeout(timedelta(days=1))
            return _in_name_space(store, name), own
        except (OSError, RuntimeError):
            if cancelled.wait(delay_s):
                raise ClosedResourceError from None
            delay_s = min(2 * delay_s, 1.0)


class GlooPort(PortBase):
    """The rank's end, over a store or the address of one."""

    def __init__(
        self,
        source: Store | str,
        *,
        rank: int,
        dp_size: int,
        incarnation: int,
        depth: int,
        max_batch_bytes: int,
        host: str | None = None,
        name: str = "stream_balancer",
        connect_timeout_s: float = 30.0,
        keepalive_s: float = 10.0,
        linger_s: float = 5.0,
        decode: Decode = decode,
        pinned: bool = False,
        shared_memory: bool = True,
    ) -> None:
        super().__init__(
            rank=rank,
            dp_size=dp_size,
            incarnation=incarnation,
            depth=depth,
            max_batch_bytes=max_batch_bytes,
            decode=decode,
            pinned=pinned,
            shared_memory=shared_memory,
            keepalive_s=keepalive_s,
            linger_s=linger_s,
        )
        self._host = host
        self._connect_timeout_s = connect_timeout_s
        self._token = uuid.uuid4().hex
        announcement = _Announcement(self._token, PROTOCOL, rank, dp_size, incarnation, depth, max_batch_bytes)
        self._visit = _Visit(source, name, announcement)
        self._start()

    def _connect(self) -> Pair:
        _, store, host = self._visit.ask()
        device = _gloo.create_device(hostname=self._host or host)
        store.set(f"here/{self._token}", _HERE)
        return _GlooPair(PrefixStore(f"pair/{self._token}", store), 1, device)

    def _cancel_connect(self) -> None:
        self._visit.cancel()


def open_outlet(
    source: Store | str,
    *,
    direct: bool = False,
    label: str | None = None,
    host: str | None = None,
    name: str = "stream_balancer",
    linger_s: float = 5.0,
) -> Outlet:
    """A producer's end, over a store or the address of one."""
    visit = _Visit(source, name, _Announcement(uuid.uuid4().hex, PROTOCOL, 0, 0, 0, 1, 0, producer=True))

    def ask() -> WayIn:
        reply, _, _ = visit.ask()
        if reply.way_in is None:
            raise ValueError("the controller did not say where producers come in. Install one version everywhere")
        return reply.way_in

    label = label or f"{socket.gethostname()}:{os.getpid()}"
    return Outlet(label, ask=ask, cancel_ask=visit.cancel, linger_s=linger_s, direct=direct, host=host)


def _master() -> str:
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def _parse(address: str) -> tuple[str, int]:
    host, colon, port = address.removeprefix("tcp://").rpartition(":")
    if not (address.startswith("tcp://") and colon and port.isdecimal()):
        raise ValueError(
            f"{address!r} is not an address of a controller: expected 'tcp://host:port', as TorchTransport.address"
        )
    return host.strip("[]"), int(port)


def _own_address(peer: str) -> str:
    """The address of this machine that ``peer`` would see. No packet is sent."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return cast("str", probe.getsockname()[0])
    return "127.0.0.1"
