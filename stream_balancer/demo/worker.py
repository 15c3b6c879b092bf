"""The controller process: concurrent rollout workers, the balancer, and one link per rank.

::

    worker 1 --.
    worker 2 ---> balancer.put --> StreamBalancer --> serve() --> one link per rank
    ...        |   (a full buffer makes workers wait)
    worker 64 -'
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import cast

import anyio

from stream_balancer.config import BalancerConfig, Policy
from stream_balancer.controller.balancer import StreamBalancer
from stream_balancer.controller.batches import Batches
from stream_balancer.controller.serve import serve
from stream_balancer.demo.meeting import FEED_NAME, connect_store
from stream_balancer.demo.messages import Dispatched, Message, Put, RolloutSpec, Task
from stream_balancer.demo.model import training_cost
from stream_balancer.demo.rollouts import checksum, make_rollout
from stream_balancer.transport.gloo.torch_dist import TorchTransport
from stream_balancer.types import Batch

__all__ = ["balancer_config", "generate", "run_controller"]


def balancer_config(task: Task) -> BalancerConfig:
    """The knobs of a run: the usual way sends rollouts ``batch_size`` by ``batch_size`` as they come; the balanced one
    has a window to choose from."""
    options = task.options
    return BalancerConfig(
        dp_size=options.ranks,
        batch_size=options.batch_size,
        window=options.balanced_window if task.policy == "window" else options.batch_size,
        deadline_s=options.deadline_s,
        max_tokens_per_micro_batch=options.max_tokens_per_micro_batch,
        cost=training_cost(options),
        policy=cast("Policy", task.policy),
    )


def run_controller(task: Task, say: Callable[[Message], None]) -> None:
    """Generate everything, serve every rank, return once all of it has been acknowledged."""
    anyio.run(_control, task, say, backend=task.options.backend)


async def _control(task: Task, say: Callable[[Message], None]) -> None:
    store = connect_store(task)
    transport = TorchTransport(store, dp_size=task.options.ranks, name=FEED_NAME, token=task.token)
    async with StreamBalancer(balancer_config(task)) as balancer, transport, anyio.create_task_group() as group:
        watched = _Watched(balancer, say)
        group.start_soon(serve, watched, transport)
        await generate(task, balancer, watched.on_put)
        balancer.end()


async def generate(task: Task, balancer: StreamBalancer, on_put: Callable[[Put], None]) -> None:
    """All workers at once, until every rollout was put."""
    queue = iter(task.specs)
    async with anyio.create_task_group() as workers:
        for _ in range(task.options.workers):
            workers.start_soon(_work, task, queue, balancer, on_put)


async def _work(
    task: Task, queue: Iterator[RolloutSpec], balancer: StreamBalancer, on_put: Callable[[Put], None]
) -> None:
    """One worker: pick a prompt up, take as long over it as its output is long, put the rollout, and again."""
    for spec in queue:
        await anyio.sleep(spec.output_tokens / task.options.tokens_per_second)
        rollout = make_rollout(spec, task.options.vocab_size)
        await balancer.put(rollout)
        on_put(Put(spec.rollout_id, checksum(rollout), rollout.num_tokens))


class _Watched:
    """A balancer as ``serve`` sees it, which reports every batch that leaves."""

    def __init__(self, balancer: StreamBalancer, say: Callable[[Message], None]) -> None:
        self._balancer = balancer
        self._say = say
        self._accepted_at: dict[str, float] = {}

    def on_put(self, put: Put) -> None:
        """Note when a rollout was accepted."""
        self._accepted_at[put.rollout_id] = anyio.current_time()
        self._say(put)

    def batches(self, *, auto_ack: bool = True) -> AsyncIterator[Batch]:
        """The balancer's batches."""
        return _WatchedBatches(self._balancer.batches(auto_ack=auto_ack), self._on_batch)

    def acknowledge(self, step: int) -> None:
        """Pass on."""
        self._balancer.acknowledge(step)

    def in_flight(self) -> tuple[Batch, ...]:
        """Pass on."""
        return self._balancer.in_flight()

    def _on_batch(self, batch: Batch) -> None:
        now = anyio.current_time()
        delays = [now - self._accepted_at[r.rollout_id] for r in batch.rollouts if not r.is_padding]
        self._say(Dispatched(batch.step, batch.reason, tuple(delays), batch.loads))


class _WatchedBatches:
    """An iterator that shows each batch to a function; not a generator, so cancelling it loses nothing."""

    def __init__(self, batches: Batches, on_batch: Callable[[Batch], None]) -> None:
        self._batches = batches
        self._on_batch = on_batch

    def __aiter__(self) -> AsyncIterator[Batch]:
        return self

    async def __anext__(self) -> Batch:
        batch = await anext(self._batches)
        self._on_batch(batch)
        return batch
