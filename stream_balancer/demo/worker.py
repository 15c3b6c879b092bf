"""The controller process: concurrent rollout workers, the balancer, and the links to the ranks.

::

    worker 1 --.
    worker 2 ---> balancer.put --> StreamBalancer --> serve() --> one link per rank
    ...        |   (a full buffer makes workers wait)
    worker 64 -'
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import monotonic

import anyio

from stream_balancer.balancer import StreamBalancer
from stream_balancer.config import BalancerConfig
from stream_balancer.cost import QuadraticCost
from stream_balancer.demo.messages import Dispatched, Message, Put, RolloutSpec, Task
from stream_balancer.demo.rollouts import checksum, make_rollout
from stream_balancer.types import Batch

__all__ = ["balancer_config", "generate", "run_controller"]


def balancer_config(task: Task) -> BalancerConfig:
    """The knobs of a run: the usual way sends each ``batch_size`` rollouts as they came, the balanced one has a window."""
    options = task.options
    linear, quadratic = task.cost
    return BalancerConfig(
        dp_size=options.ranks,
        batch_size=options.batch_size,
        window=options.balanced_window if task.policy == "window" else options.batch_size,
        deadline_s=options.deadline_s,
        max_tokens_per_micro_batch=task.max_tokens_per_micro_batch,
        cost=QuadraticCost(linear=linear, quadratic=quadratic),
        policy=task.policy,
    )


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
