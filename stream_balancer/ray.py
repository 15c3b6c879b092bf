"""The balancer as a Ray actor: put from any worker on any node, iterate on any trainer rank.

::

    balancer = host(sb.BalancerConfig(dp_size=8, batch_size=256), name="balancer")     # once, anywhere
    await balancer.put(rollout)                 # in any task or actor: the handle travels as an argument
    for batch in balancer.feed(rank=3): ...     # in each trainer rank
    balancer = find("balancer")                 # where nobody passed the handle

Ray keeps the actor alive, starts it again, and says where it listens; workers and ranks talk with it over a connection
of their own, as everywhere. Ray's object store keeps tokens: a second actor is given the references of what workers put
there, so that Ray counts them, and hands them to the ranks that fetch. docs/ray.md says what happens when a worker, a
node, a rank or the actor dies.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import socket
import threading
from collections.abc import Awaitable, Generator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import anyio

import stream_balancer as sb
from stream_balancer.client.object_store import InStore, Keeper
from stream_balancer.client.producer import Producer, connect
from stream_balancer.core.accept import Accept
from stream_balancer.net.address import Entry
from stream_balancer.net.listener import split_address
from stream_balancer.net.loops import in_loop
from stream_balancer.rollouts import Batch, EvictReason, Rollout
from stream_balancer.wire.codec import RemoteRollout

__all__ = ["LostRollout", "RayBalancer", "find", "host"]

_Keeper: TypeAlias = "tuple[Any, str, str | None] | None"
"""The actor that keeps references, its name, and the tensor transport; None where tokens travel to the balancer."""
_MAX_CALLS = 10_000  # pending at a time
_MAX_LOST = 100_000  # names kept

logger = logging.getLogger("stream_balancer.ray")


class LostRollout(NamedTuple):
    """An accepted rollout that will not be trained on, because its tokens are gone."""

    rollout_id: str
    holder: str
    """Process that had put it: host, process and Ray node."""
    step: int | None
    """The step it was dispatched in; None if it still waited."""


# --- the actors ------------------------------------------------------------------------------------------------------


class _BalancerActor(sb.Observer):
    """The actor: one process whose event loop runs the balancer and ``serve``."""

    def __init__(
        self, config: sb.BalancerConfig, keeper: _Keeper, balancer: dict[str, Any], serve: dict[str, Any],
        transport: dict[str, Any],
    ) -> None:  # fmt: skip
        """The options of each, as :func:`host` was given them."""
        import ray

        # A hundred thousand waiting rollouts are a million objects without cycles: looking through them again and again
        # takes three times as long as making them.
        gc.freeze()
        gc.set_threshold(100_000, 20, 20)
        self._keeper, self._options, self._token = keeper, serve, secrets.token_hex(16)
        address = ray.util.get_node_ip_address()
        self._transport = sb.TorchTransport.listen(dp_size=config.dp_size, host=address, token=self._token, **transport)
        self._balancer = sb.StreamBalancer(config, **balancer)
        self._balancer.observers.append(self)
        self._lost: dict[str, LostRollout] = {}
        self._serving: asyncio.Task[None] | None = None
        self._up = asyncio.Event()
        self._failure: Exception | None = None

    async def _ready(self) -> None:
        """Begin with the first call, after a restart too."""
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        await self._up.wait()

    async def _serve(self) -> None:
        try:
            async with self._transport, self._balancer:
                self._up.set()
                await sb.serve(self._balancer, self._transport, **self._options)
        except Exception as error:
            self._failure = error
            logger.exception("the balancer stopped")
        finally:
            self._up.set()

    def evicted(self, rollout: Rollout, reason: EvictReason) -> None:
        """As :meth:`stream_balancer.Observer.evicted`."""
        if reason == "lost" and isinstance(rollout, RemoteRollout) and len(self._lost) < _MAX_LOST:
            lost = LostRollout(rollout.rollout_id, rollout.handle.owner.label, None)
            self._lost.setdefault(rollout.rollout_id, lost)

    def acknowledged(self, batch: Batch) -> None:
        """As :meth:`stream_balancer.Observer.acknowledged`: of what was lost, the step is known now."""
        if not self._lost:
            return
        for rollout in batch.rollouts:
            lost = self._lost.get(rollout.rollout_id)
            if lost is not None and lost.step is None:
                self._lost[rollout.rollout_id] = lost._replace(step=batch.step)

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        await self._ready()
        if method == "lost_rollouts":
            return list(self._lost.values())
        if self._failure is not None:
            raise sb.errors.BrokenResourceError(f"the balancer stopped: {self._failure}")
        if method == "entry":
            if self._serving is not None and self._serving.done():
                raise sb.errors.ClosedResourceError(
                    "the balancer has ended: it takes no more rollouts, and gives no batches"
                )
            host, port = split_address(self._transport.address)
            return host, port, self._token
        if method == "about":
            config = self._balancer.config
            return config.dp_size, config.loss_mask_column, self._keeper
        if method == "producers":
            peers = self._transport.service.peers.values()
            return [peer.name for peer in peers if peer.kind == "producer" and peer.connection is not None]
        answer = getattr(self._balancer, method)(*args, **kwargs)
        return await answer if asyncio.iscoroutine(answer) else answer


# --- the handle ------------------------------------------------------------------------------------------------------


def host(
    config: sb.BalancerConfig,
    *,
    name: str | None = None,
    journal: str | os.PathLike[str] | None = None,
    accept: Accept | None = None,
    num_producers: int | None = None,
    rejoin_timeout_s: float = float("inf"),
    report_after_s: float = 60.0,
    staged_bytes: int = 64 * 2**20,
    max_put_bytes: int = 2**30,
    tensor_transport: str | None = None,
    actor_options: Mapping[str, Any] | None = None,
) -> RayBalancer:
    """Start the balancer as an actor; returns when it is up.

    ``name``: under which :func:`find` finds it, within Ray's namespace. ``journal``: a folder that the actor writes
    what it accepts to; then tokens travel to the actor, Ray starts it again after a crash, and it goes on where it
    was. ``accept``, ``num_producers``, ``report_after_s``: as for :class:`stream_balancer.StreamBalancer`. ``accept``
    runs in the actor, so Ray pickles it; with tokens in the object store it sees a rollout's scalars, metadata and
    lengths, and no values of its columns. ``rejoin_timeout_s``: as for :func:`stream_balancer.serve`; by default
    a lost rank is waited for. ``staged_bytes``, ``max_put_bytes``: what one worker may have on its way, and the largest
    put. ``tensor_transport``: of Ray Direct Transport, "nixl"; then tokens stay in the workers' memory, and
    ranks read them there, past the object stores (docs/ray.md). ``actor_options``: for ``Actor.options(...)``: its
    namespace, its lifetime, another place than the caller's node (``scheduling_strategy``).

    Raises ValueError for a tensor transport that Ray does not know, or that both ends take part in ("gloo", "nccl"):
    a worker cannot put into it. ConfigError for one beside a journal, where tokens travel to the actor.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if tensor_transport is not None:
        if journal is not None:
            raise sb.errors.ConfigError(
                f"tensor_transport={tensor_transport!r} with a journal: tokens travel to the actor then, which writes "
                "them down, and nothing is left for Ray to carry. Leave out one of the two"
            )
        # nothing of it needs a transport, so Ray looks at the name only
        ray.put(None, _tensor_transport=tensor_transport)

    context = ray.get_runtime_context()
    settings: dict[str, Any] = {
        "num_cpus": 0,
        "max_concurrency": _MAX_CALLS,
        # a journal's folder is on this node
        "scheduling_strategy": NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False),
        **{key: value for key, value in (actor_options or {}).items() if key in _OF_BOTH},
    }
    keeper: _Keeper = None
    if journal is None:
        name_of_it = f"stream_balancer-{secrets.token_hex(8)}"
        its_actor = ray.remote(Keeper).options(**settings, name=name_of_it, max_restarts=-1).remote()
        keeper = its_actor, f"{settings.get('namespace') or context.namespace}/{name_of_it}", tensor_transport
    # without a journal a new actor would know nothing of what the old one had accepted
    of_host = {"name": name, "max_restarts": 0 if journal is None else -1, **(actor_options or {})}
    actor = (
        ray.remote(_BalancerActor)
        .options(**settings | of_host)
        .remote(
            config,
            keeper,
            {
                **{"journal": journal and os.fspath(journal), "accept": accept},
                **{"num_producers": num_producers, "report_after_s": report_after_s},
            },
            {"rejoin_timeout_s": rejoin_timeout_s},
            {"staged_bytes": staged_bytes, "max_put_bytes": max_put_bytes},
        )
    )
    # an actor that cannot start fails here, not at somebody's first put
    ray.get(actor._call.remote("statistics"))
    return RayBalancer(actor, config.dp_size, config.loss_mask_column, keeper)


def find(name: str, *, namespace: str | None = None) -> RayBalancer:
    """The balancer that was started under this name. Raises ValueError if there is none."""
    import ray

    actor = ray.get_actor(name, namespace=namespace)
    return RayBalancer(actor, *ray.get(actor._call.remote("about")))


class RayBalancer:
    """A balancer in an actor. Pass it to tasks and actors as an argument; each process connects at its first put.

    Any number of tasks and threads may put. Under asyncio and trio.
    """

    def __init__(
        self, actor: Any, dp_size: int, loss_mask_column: str | None = "loss_mask", keeper: _Keeper = None
    ) -> None:
        self.actor = actor
        """The actor's handle."""
        self.dp_size = dp_size
        """DP ranks that take part, as this handle knows: if another one changes it, find the balancer again."""
        self.loss_mask_column = loss_mask_column
        """The balancer's knob: masks are counted where the tokens are put."""
        self._keeper = keeper
        self._lock = threading.Lock()
        self._producer: Producer | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # the connection stays behind: each process makes its own
        return RayBalancer, (self.actor, self.dp_size, self.loss_mask_column, self._keeper)

    @property
    def restarts(self) -> bool:
        """True if it has a journal: should the actor die, it comes back and goes on, and workers and ranks wait for it.
        Without one the tokens stay with the workers' nodes."""
        return self._keeper is None

    def read(self) -> Entry | None:
        """Where the actor listens, for who dials; None while Ray starts it again. Raises RuntimeError once it is
        gone, ClosedResourceError once it has ended."""
        import ray

        try:
            return Entry(*ray.get(self.actor._call.remote("entry")))
        except ray.exceptions.RayActorError as error:
            if self.restarts:
                return None
            raise RuntimeError(str(error)) from None
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None

    # -- workers -------------------------------------------------------------------------------------------------------

    @property
    def producer(self) -> Producer:
        """Connection of this process; made when first asked for. All that :class:`stream_balancer.Producer` gives."""
        with self._lock:
            if self._producer is None:
                self._producer = connect(
                    self,
                    hand_over="balancer" if self._keeper is None else InStore(*self._keeper, self.label),
                    loss_mask_column=self.loss_mask_column,
                    label=self.label,
                    rejoin=self.restarts,
                )
            return self._producer

    @property
    def label(self) -> str:
        """Label of this process's rollouts in logs, should they be lost: host, process and Ray node."""
        import ray

        return f"{socket.gethostname()}:{os.getpid()} on Ray node {ray.get_runtime_context().get_node_id()}"

    async def put(self, rollout: Rollout) -> None:
        """As :meth:`stream_balancer.Producer.put`."""
        await self.producer.put(rollout)

    async def put_group(self, rollouts: Sequence[Rollout], *, complete: bool = False) -> None:
        """As :meth:`stream_balancer.Producer.put_group`."""
        await self.producer.put_group(rollouts, complete=complete)

    def __getattr__(self, name: str) -> Any:
        """Further names of producers, and methods of the balancer: ``expect_group``, ``reserve``, ``put_nowait``,
        ``version``, ``blocking``; ``set_version``, ``end`` (whoever still puts; ``balancer.producer.end()`` says that
        this process puts no more), ``load_state_dict`` (before the first put, and the first rank),
        ``acknowledge_through``, which take effect whether they are awaited or not; and, to be awaited, ``statistics``,
        ``why_no_batch`` and ``lost_rollouts``: a list of :class:`LostRollout`, accepted rollouts that will not be
        trained on because their node or worker died."""
        if name in _OF_BALANCER:
            return partial(self._call, name)
        # not all of them: to ask for the producer connects this process
        if name not in _OF_PRODUCER:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.producer, name)

    # -- ranks ---------------------------------------------------------------------------------------------------------

    def feed(self, *, rank: int | None = None, **options: Any) -> sb.RankFeed:
        """A rank's steps, for ``for`` and ``async for``: give ``rank=`` or ``mesh=``. ``options``: as for
        :class:`stream_balancer.RankFeed`."""
        if rank is not None:
            options |= {"rank": rank, "dp_size": self.dp_size}
        # the actor is in no torch.distributed world, so there is no send/recv to carry payloads
        return sb.RankFeed(self, **{"rejoin": self.restarts, "movers": ("shared_memory",), **options})

    # -- control -------------------------------------------------------------------------------------------------------

    def reconfigure(self, **changes: Any) -> Awaitable[None]:
        """As :meth:`stream_balancer.StreamBalancer.reconfigure`; await it for its errors."""
        sent = self._call("reconfigure", **changes)
        if "dp_size" in changes:
            sent.future.add_done_callback(partial(self._note_dp_size, changes["dp_size"]))
        return sent

    async def state_dict(self) -> dict[str, Any]:
        """As :meth:`stream_balancer.StreamBalancer.async_state_dict`."""
        answer: dict[str, Any] = await self._call("async_state_dict")
        return answer

    def _note_dp_size(self, dp_size: int, future: Future[Any]) -> None:
        if future.exception() is None:
            self.dp_size = dp_size

    def _call(self, method: str, *args: Any, **kwargs: Any) -> _Sent:
        return _Sent(method, self.actor._call.remote(method, *args, **kwargs).future())


class _Sent:
    """A call of the actor that is on its way, whether it is awaited or not. ``await`` gives its result, or raises what
    the actor raised, on either event loop; an error that nobody awaits is logged."""

    def __init__(self, method: str, future: Future[Any]) -> None:
        self._method, self.future, self._is_awaited = method, future, False
        future.add_done_callback(self._log)

    def __await__(self) -> Generator[Any, Any, Any]:
        self._is_awaited = True
        return self._wait().__await__()

    async def _wait(self) -> Any:
        import ray

        event, soon = anyio.Event(), in_loop()
        self.future.add_done_callback(lambda _: soon(event.set))
        await event.wait()
        try:
            return self.future.result()
        except ray.exceptions.RayTaskError as error:  # what it tells is the actor's own, behind a traceback
            raise error.cause from None

    def _log(self, future: Future[Any]) -> None:
        if not self._is_awaited and (error := future.exception()) is not None:
            logger.error("%s() of the balancer failed: %s", self._method, getattr(error, "cause", error))


_OF_PRODUCER = {
    "expect_group", "close_group", "abandon_group", "put_nowait", "reserve", "version", "version_after", "blocking"
}  # fmt: skip
_OF_BALANCER = {
    "statistics", "why_no_batch", "set_version", "end", "load_state_dict", "acknowledge_through", "lost_rollouts"
}  # fmt: skip
_OF_BOTH = {"namespace", "lifetime", "scheduling_strategy"}
"""Options of the actor that the keeper of its references has, too."""
