"""Sweep: many simulations of one trace, in this process or spread over several. Processes, and no decision.

Children are spawned, never forked: whoever calls may have threads. What a child sends back is what ``digest`` made of
its report, in the order of the settings, so the result does not depend on the number of processes.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeAlias, TypeVar

from stream_balancer.config import BalancerConfig
from stream_balancer.errors import ConfigError
from stream_balancer.tools.processes import exit_with_parent
from stream_balancer.tools.simulate import simulate
from stream_balancer.tools.simulation_report import SimulationReport
from stream_balancer.tools.trace import Trace

__all__ = ["Progress", "run_all"]

T = TypeVar("T")

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the settings that are done, and how many there are."""


def run_all(
    digest: Callable[[SimulationReport], T],
    trace: Trace,
    configs: Sequence[BalancerConfig],
    how: dict[str, Any],
    processes: int,
    progress: Progress | None,
) -> list[T]:
    """``digest(simulate(trace, config, **how))`` for each config, in their order."""
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        raise ConfigError(f"processes must be an int >= 1, not {processes!r}")
    one, found = partial(_one, digest, trace, how), dict[int, T]()
    with ExitStack() as stack:
        done: Iterable[tuple[int, T]] = (one(index, config) for index, config in enumerate(configs))
        if processes > 1:
            # a fork would copy locks that another thread holds
            spawn = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(min(processes, len(configs)), spawn, exit_with_parent)
            stack.callback(pool.shutdown, cancel_futures=True)
            # the largest windows take longest: begun first, they do not end alone
            futures = [pool.submit(one, index, configs[index]) for index in reversed(range(len(configs)))]
            done = (future.result() for future in as_completed(futures))
        for index, result in done:
            found[index] = result
            if progress is not None:
                progress(len(found), len(configs))
    return [found[index] for index in range(len(configs))]


def _one(
    digest: Callable[[SimulationReport], T], trace: Trace, how: dict[str, Any], index: int, config: BalancerConfig
) -> tuple[int, T]:
    return index, digest(simulate(trace, config, **how))
