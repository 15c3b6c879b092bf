"""``stream-balancer demo``."""

from __future__ import annotations

import logging

import typer
from stream_balancer_demo.options import DemoOptions


class Demo(DemoOptions):
    """Watch real processes train the same rollouts twice: in the usual way (arrival order, round-robin), then balanced.

    Starts one trainer process per rank, connected by torch.distributed over gloo to a controller with rollout workers.
    """

    def run(self) -> None:
        from stream_balancer_demo.main import run_demo

        log = logging.getLogger("stream_balancer")
        level = log.level
        # ranks share cores here: one that looks slow, of which the log would warn, waits for its turn
        log.setLevel(logging.ERROR)
        try:
            code = run_demo(self)
        finally:
            log.setLevel(level)
        raise typer.Exit(code)
