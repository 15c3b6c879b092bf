"""The blocking face: threads put, a plain loop trains. Real threads, real time, no sleeps."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import stream_balancer as sb
from stream_balancer.testing import BACKENDS, make_rollout, make_rollouts


def config(**knobs: Any) -> sb.BalancerConfig:
    return sb.BalancerConfig(**{"dp_size": 2, "batch_size": 4, **knobs})


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_put_and_a_plain_loop_trains(backend: Any) -> None:
    with sb.blocking(config(), backend=backend) as balancer, ThreadPoolExecutor(8) as pool:

        def work(n: int) -> None:
            for rollout in make_rollouts(range(1, 11), prefix=f"{n}-"):
                balancer.put(rollout)

        def end_after(futures: list[Any]) -> None:
            for future in futures:
                future.result()
            balancer.end()

        ending = pool.submit(end_after, [pool.submit(work, n) for n in range(7)])
        names = [r.rollout_id for batch in balancer.batches() for r in batch.rollouts if not r.is_padding]
        ending.result()
        assert sorted(names) == sorted(f"{n}-{k}" for n in range(7) for k in range(10))
        assert balancer.statistics().acknowledged == 70


@pytest.mark.parametrize("backend", BACKENDS)
def test_errors_cross_the_threads(backend: Any) -> None:
    with sb.blocking(config(window=4, capacity=4), backend=backend) as balancer:
        for rollout in make_rollouts([2] * 4):
            balancer.put_nowait(rollout)
        with pytest.raises(sb.WouldBlock):
            balancer.put_nowait(make_rollout(2))
        with pytest.raises(sb.DuplicateRolloutError):
            balancer.put(make_rollout(2, "r0"))
        balancer.reconfigure(capacity=8)
        balancer.put_group([make_rollout(2, "a", group_id="g"), make_rollout(2, "b", group_id="g")])
        balancer.set_version(3)
        assert balancer.statistics().version == 3
        batch = next(iter(balancer.batches(auto_ack=False)))
        balancer.acknowledge(batch.step)
        balancer.end()
        with pytest.raises(sb.ClosedResourceError):
            balancer.put(make_rollout(2))


def test_closing_frees_a_thread_that_waits() -> None:
    told: list[type[BaseException]] = []
    with sb.blocking(config(window=4, capacity=4)) as balancer:
        for rollout in make_rollouts([2] * 4):
            balancer.put(rollout)

        def blocked() -> None:
            try:
                balancer.put(make_rollout(2, "blocked"))
            except sb.ClosedResourceError as error:
                told.append(type(error))

        thread = threading.Thread(target=blocked)
        thread.start()
        while not balancer.statistics().blocked_puts:
            pass
        balancer.close()
        thread.join()
    assert told == [sb.ClosedResourceError]


def test_background_errors_come_out_at_the_end() -> None:
    async def fail() -> None:
        await anyio.lowlevel.checkpoint()
        raise RuntimeError("from the background")

    def run() -> None:
        with sb.blocking(config()) as balancer:
            future = balancer.start(fail)
            while not future.done():
                pass

    with pytest.raises(RuntimeError, match="from the background"):
        run()


def test_use_outside_the_block_says_how() -> None:
    balancer = sb.blocking(config())
    with pytest.raises(RuntimeError, match="use it as `with"):
        balancer.end()
