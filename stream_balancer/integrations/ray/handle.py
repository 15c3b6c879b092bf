"""The handle of a balancer in an actor: what workers, ranks and whoever steers it hold, in any process."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from stream_balancer.config import BalancerConfig
from stream_balancer.core.accept import Accept
from stream_balancer.integrations.ray.actor import Host, LostRollout, Options
from stream_balancer.producer.client import BlockingProducer, Producer
from stream_balancer.producer.slots import RemoteReservation
from stream_balancer.rank.feed import RankFeed
from stream_balancer.statistics import Statistics
from stream_balancer.transport.event_loop import loop_caller
from stream_balancer.types import Rollout

if TYPE_CHECKING:
    from stream_balancer.transport.producer_port import ProducerPort
    from stream_balancer.transport.sockets.joiner import Entry, Lookup
    from stream_balancer.wire.messages import JoinRank

__all__ = ["RayBalancer", "find", "host"]

_MAX_CALLS = 10_000  # pending at a time; each rank and producer keeps two


def host(
    config: BalancerConfig,
    *,
    name: str | None = None,
    journal: str | os.PathLike[str] | None = None,
    accept: Accept | None = None,
    num_producers: int | None = None,
    roles: Mapping[str, Sequence[str]] | None = None,
    rejoin_timeout_s: float = float("inf"),
    report_after_s: float = 60.0,
    staged_bytes: int = 64 * 2**20,
    max_put_bytes: int = 2**30,
    actor_options: Mapping[str, Any] | None = None,
) -> RayBalancer:
    """Start the balancer as an actor; returns when it is up.

    ``name``: under which :func:`find` finds it, within Ray's namespace. ``journal``: a folder that the actor writes
    what it accepts to; then tokens travel through the actor, it restarts by itself after a crash, and goes on where it
    was. ``accept``, ``num_producers``: as for :class:`stream_balancer.StreamBalancer`. ``accept`` runs in the actor,
    so Ray pickles it; with tokens in the object store it sees a rollout's scalars, metadata and lengths, and no values
    of its columns. ``roles``, ``rejoin_timeout_s``, ``report_after_s``: as for :func:`stream_balancer.serve`; by
    default a lost rank is waited for.
    ``staged_bytes``, ``max_put_bytes``: what one worker may have on its way, and the largest put. ``actor_options``:
    for ``Actor.options(...)``: its namespace, its lifetime, another place than the caller's node
    (``scheduling_strategy``).
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options = Options(
        config=config,
        journal=None if journal is None else os.fspath(journal),
        rejoin_timeout_s=rejoin_timeout_s,
        report_after_s=report_after_s,
        staged_bytes=staged_bytes,
        max_put_bytes=max_put_bytes,
        accept=accept,
        num_producers=num_producers,
        roles=roles,
    )
    settings: dict[str, Any] = {
        "num_cpus": 0,
        "max_concurrency": _MAX_CALLS,
        "name": name,
        "max_restarts": 0 if journal is None else -1,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
    }
    actor = ray.remote(Host).options(**settings | dict(actor_options or {})).remote(options)
    balancer = RayBalancer(actor, config.dp_size, config.loss_mask_column, restarts=journal is not None)
    ray.get(actor._call.remote("statistics"))
    return balancer


def find(name: str, *, namespace: str | None = None) -> RayBalancer:
    """The balancer that was started under this name. Raises ValueError if there is none."""
    import ray

    actor = ray.get_actor(name, namespace=namespace)
    dp_size, loss_mask_column, restarts = ray.get(actor._call.remote("about"))
    return RayBalancer(actor, dp_size, loss_mask_column, restarts=restarts)


class RayBalancer:
    """A balancer in an actor. Pass it to tasks and actors as an argument; each process connects at its first put.

    Any number of tasks and threads may put. Under asyncio and trio.
    """

    def __init__(
        self, actor: Any, dp_size: int, loss_mask_column: str | None = "loss_mask", *, restarts: bool = False
    ) -> None:
        self.actor = actor
        """The actor's handle."""
        self.dp_size = dp_size
        """DP ranks that take part, as this handle knows: if another one changes it, find the balancer again."""
        self.loss_mask_column = loss_mask_column
        """The balancer's knob: masks are counted where the tokens are put."""
        self.restarts = restarts
        """Whether it has a journal: should the actor die, it comes back and goes on, and workers and ranks wait for it.
        Without one the tokens stay with the workers' nodes."""
        self._lock = threading.Lock()
        self._producer: Producer | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(RayBalancer, restarts=self.restarts), (self.actor, self.dp_size, self.loss_mask_column)

    # -- workers -------------------------------------------------------------------------------------------------------

    @property
    def producer(self) -> Producer:
        """This process's link; made when first asked for. All that :func:`stream_balancer.producer.client` gives."""
        with self._lock:
            if self._producer is None:
                self._producer = Producer(self._open_producer_port(), self.loss_mask_column)
            return self._producer

    @property
    def label(self) -> str:
        """Label of this process's rollouts in logs, should they be lost: host, process and Ray node."""
        return _label()

    async def put(self, rollout: Rollout) -> None:
        """As :meth:`stream_balancer.Producer.put`."""
        await self.producer.put(rollout)

    async def put_group(self, rollouts: Sequence[Rollout], *, complete: bool = False) -> None:
        """As :meth:`stream_balancer.Producer.put_group`."""
        await self.producer.put_group(rollouts, complete=complete)

    async def expect_group(self, group_id: str, size: int) -> None:
        """As :meth:`stream_balancer.Producer.expect_group`."""
        await self.producer.expect_group(group_id, size)

    async def close_group(self, group_id: str) -> None:
        """As :meth:`stream_balancer.Producer.close_group`."""
        await self.producer.close_group(group_id)

    async def abandon_group(self, group_id: str) -> None:
        """As :meth:`stream_balancer.Producer.abandon_group`."""
        await self.producer.abandon_group(group_id)

    def put_nowait(self, rollout: Rollout, *, timeout_s: float = 5.0) -> None:
        """As :meth:`stream_balancer.Producer.put_nowait`."""
        self.producer.put_nowait(rollout, timeout_s=timeout_s)

    def reserve(self, count: int = 1) -> RemoteReservation:
        """As :meth:`stream_balancer.Producer.reserve`."""
        return self.producer.reserve(count)

    @property
    def version(self) -> int | None:
        """As :attr:`stream_balancer.Producer.version`: of this process's link."""
        return self.producer.version

    async def version_after(self, version: int | None) -> int:
        """As :meth:`stream_balancer.Producer.version_after`."""
        return await self.producer.version_after(version)

    @property
    def blocking(self) -> BlockingProducer:
        """``put``, ``put_group`` and ``put_nowait`` for threads and plain tasks."""
        return self.producer.blocking

    # -- ranks ---------------------------------------------------------------------------------------------------------

    def feed(
        self,
        *,
        rank: int | None = None,
        auto_ack: bool = True,
        depth: int = 2,
        incarnation: int = 0,
        **options: Any,
    ) -> RankFeed:
        """A rank's batches, for ``for`` and ``async for``: give ``rank=`` or ``mesh=``. ``options``: as for
        :class:`stream_balancer.RankFeed`."""
        if rank is not None:
            options |= {"rank": rank, "dp_size": self.dp_size}
        return RankFeed(self, auto_ack=auto_ack, depth=depth, incarnation=incarnation, **options)

    def open_rank_port(self, request: JoinRank, **options: Any) -> Any:
        """For RankFeed."""
        from stream_balancer.transport.ray.rank import open_port

        return open_port(self.actor, request, **{"rejoin": self.restarts, **options})

    def peer_lookup(self) -> Lookup:
        """For RankFeed: where model-parallel peers of a rank find each other."""
        return _PeerLookup(self.actor, restarts=self.restarts)

    def _open_producer_port(self) -> ProducerPort:
        import ray

        from stream_balancer.transport.ray.producer import RayProducerPort

        node = ray.get_runtime_context().get_node_id()
        return RayProducerPort(self.actor, label=_label(), node=node, direct=not self.restarts, restarts=self.restarts)

    # -- control -------------------------------------------------------------------------------------------------------

    async def statistics(self) -> Statistics:
        """As :meth:`stream_balancer.StreamBalancer.statistics`."""
        answer: Statistics = await self._call("statistics")
        return answer

    async def lost_rollouts(self) -> list[LostRollout]:
        """Accepted rollouts that will not be trained on because their node or worker died, with its name."""
        answer: list[LostRollout] = await self._call("lost_rollouts")
        return answer

    async def why_no_batch(self) -> str:
        """As :meth:`stream_balancer.StreamBalancer.why_no_batch`."""
        answer: str = await self._call("why_no_batch")
        return answer

    async def set_version(self, version: int) -> None:
        """As :meth:`stream_balancer.StreamBalancer.set_version`."""
        await self._call("set_version", version)

    async def reconfigure(self, **changes: Any) -> None:
        """As :meth:`stream_balancer.StreamBalancer.reconfigure`."""
        await self._call("reconfigure", **changes)
        self.dp_size = changes.get("dp_size", self.dp_size)

    async def acknowledge_through(self, step: int) -> None:
        """As :meth:`stream_balancer.StreamBalancer.acknowledge_through`."""
        await self._call("acknowledge_through", step)

    async def state_dict(self) -> dict[str, Any]:
        """As :meth:`stream_balancer.StreamBalancer.async_state_dict`."""
        answer: dict[str, Any] = await self._call("async_state_dict")
        return answer

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As :meth:`stream_balancer.StreamBalancer.load_state_dict`; before the first put, and the first rank."""
        await self._call("load_state_dict", state)

    async def end(self) -> None:
        """As :meth:`stream_balancer.StreamBalancer.end`, whoever still puts. ``balancer.producer.end()`` says that
        this process puts no more."""
        await self._call("end")

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await _result(self.actor._call.remote(method, *args, **kwargs))


class _PeerLookup:
    """The actor's port for model-parallel peers; another one once the actor was started again."""

    def __init__(self, actor: Any, *, restarts: bool) -> None:
        self._actor, self._restarts = actor, restarts

    def read(self) -> Entry | None:
        import ray

        try:
            entry: Entry = ray.get(self._actor._call.remote("peer_entry"))
        except ray.exceptions.RayActorError as error:
            if self._restarts:
                return None
            raise RuntimeError(str(error)) from None
        return entry


async def _result(ref: Any) -> Any:
    """Result of a call, on either event loop."""
    event, in_loop = anyio.Event(), loop_caller()
    future = ref.future()
    future.add_done_callback(lambda _: in_loop(event.set))
    await event.wait()
    return future.result()


def _label() -> str:
    import ray

    return f"{socket.gethostname()}:{os.getpid()} on Ray node {ray.get_runtime_context().get_node_id()}"
