"""The way of a put from another process: files, functions, calls and threads of the package, of both processes
together, from the call until it returns.

``python bench/way_of_a_put.py [--json] [--show]``. ``--show`` prints each function, too. Twenty puts go before the one
that is looked at; what a producer does once is not counted. Nothing is timed: a profiler is at work.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import anyio
from _common import Rows, arguments

import stream_balancer as sb
from stream_balancer.testing import make_rollout

PACKAGE = str(Path(sb.__file__).parent) + "/"
PROCESSES = multiprocessing.get_context("spawn")
QUIET_S = 0.5  # for what the puts before have set off

Called: TypeAlias = Counter[tuple[str, str, str]]
"""Calls by (thread, file, function)."""


class Way:
    """Calls of the package in this process while ``on``, in all of its threads that begin later than this."""

    def __init__(self) -> None:
        self.called: Called = Counter()
        self.on = False
        threading.setprofile(self._look)
        sys.setprofile(self._look)

    def _look(self, frame: FrameType, event: str, _: Any) -> None:
        if self.on and event == "call" and (file := frame.f_code.co_filename).startswith(PACKAGE):
            thread = threading.current_thread().name
            self.called[thread, file.removeprefix(PACKAGE), frame.f_code.co_qualname] += 1


def produce(address: str, pipe: Connection) -> None:
    way = Way()
    with sb.connect(address) as producer:
        for number in range(20):
            producer.put(make_rollout(8, f"before {number}"))
        looked_at = make_rollout(8, "looked at")
        time.sleep(QUIET_S)
        pipe.send("ready")
        pipe.recv()
        way.on = True
        producer.put(looked_at)
        way.on = False
        pipe.send(way.called)
        pipe.recv()


async def ways() -> dict[str, Called]:
    """By process."""
    way, (mine, theirs) = Way(), PROCESSES.Pipe()
    config = sb.BalancerConfig(dp_size=2, batch_size=32, window=48, capacity=1000)
    async with (
        sb.StreamBalancer(config) as balancer,
        sb.TorchTransport.listen(dp_size=2) as transport,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(sb.serve, balancer, transport)
        process = PROCESSES.Process(target=produce, args=(transport.address, theirs))
        process.start()
        await anyio.to_thread.run_sync(mine.recv)
        way.on = True
        mine.send("put")
        producers = await anyio.to_thread.run_sync(mine.recv)
        way.on = False
        mine.send("leave")
        await anyio.to_thread.run_sync(process.join)
        tasks.cancel_scope.cancel()
    return {"producer": producers, "controller": way.called}


def main() -> None:
    options = arguments(__doc__, show=False)
    rows = Rows(options.json, options.results)
    found = {(process, *where): times for process, called in anyio.run(ways).items() for where, times in called.items()}
    if options.show:
        for (process, thread, file, function), times in sorted(found.items()):
            rows.text(f"{process:<10} {thread:<20} {file:<28} {function} x {times}")
    rows.add("a put until it returns: files", len({file for *_, file, _ in found}), "files")
    rows.add("a put until it returns: functions", len({where[2:] for where in found}), "functions")
    rows.add("a put until it returns: calls", sum(found.values()), "calls")
    rows.add("a put until it returns: threads", len({where[:2] for where in found}), "threads")


if __name__ == "__main__":
    main()
