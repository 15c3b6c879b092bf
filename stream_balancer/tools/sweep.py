"""Sweep: many simulations of one trace, in this process or spread over several. Processes, and no decision.

Children are spawned, never forked: whoever calls may have threads. What a child sends back is what ``digest`` made of
its report, in the order of the settings, so the result does not depend on the number of processes.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
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
    report = progress or (lambda done, total: None)
    if processes == 1:
        found = []
        for config in configs:
            found.append(digest(simulate(trace, config, **how)))
            report(len(found), len(configs))
        return found
    return _in_processes(digest, trace, configs, how, processes, report)


def _in_processes(
    digest: Callable[[SimulationReport], T],
    trace: Trace,
    configs: Sequence[BalancerConfig],
    how: dict[str, Any],
    processes: int,
    report: Progress,
) -> list[T]:
    pool = ProcessPoolExecutor(
        min(processes, len(configs)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(trace, how),
    )
    try:
        # the largest windows take longest: begun first, they do not end alone
        futures = [(index, pool.submit(_one, digest, configs[index])) for index in reversed(range(len(configs)))]
        for done, _ in enumerate(as_completed([future for _, future in futures]), 1):
            report(done, len(configs))
        return [future.result() for _, future in sorted(futures, key=lambda one: one[0])]
    finally:
        pool.shutdown(cancel_futures=True)


_TRACE: Trace | None = None
_HOW: dict[str, Any] = {}


def _begin(trace: Trace, how: dict[str, Any]) -> None:
    """In a child, once: what all its simulations share."""
    exit_with_parent()
    global _TRACE
    _TRACE = trace
    _HOW.update(how)


def _one(digest: Callable[[SimulationReport], T], config: BalancerConfig) -> T:
    assert _TRACE is not None
    return digest(simulate(_TRACE, config, **_HOW))
