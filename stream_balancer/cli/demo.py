"""``stream-balancer demo``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from stream_balancer.cli._options import one_line_errors
from stream_balancer.demo.options import Backend, DemoOptions

__all__ = ["demo"]

_Option = typer.Option


def demo(
    ranks: Annotated[int, _Option(help="Trainer ranks, each a process.")] = DemoOptions.ranks,
    workers: Annotated[int, _Option(help="Concurrent rollout workers.")] = DemoOptions.workers,
    rollouts: Annotated[int, _Option(help="Rollouts in each of the two runs.")] = DemoOptions.rollouts,
    batch_size: Annotated[int, _Option(help="Rollouts per step, over all ranks.")] = DemoOptions.batch_size,
    window: Annotated[int | None, _Option(help="Rollouts to wait for. (default: 2 x batch size)")] = None,
    deadline_s: Annotated[
        float, _Option(help="Longest wait of a rollout before a batch leaves.")
    ] = DemoOptions.deadline_s,
    trace: Annotated[Path | None, _Option(help="Length trace, csv or csv.gz. (default: generated)")] = None,
    scale: Annotated[
        float | None, _Option(help="Multiply lengths by this. (default: so that a CPU can train on them)")
    ] = None,
    generator: Annotated[str, _Option(help="Length model, where there is no --trace.")] = DemoOptions.generator,
    backend: Annotated[Backend, _Option(help="Event loop of the controller.")] = DemoOptions.backend,
    seed: Annotated[int, _Option(help="Seed of lengths, order and model.")] = DemoOptions.seed,
    json: Annotated[bool, _Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Watch real processes train the same rollouts twice: in the usual way (arrival order, round-robin), then balanced.

    Starts one trainer process per rank, connected by torch.distributed over gloo to a controller with rollout workers.
    """
    given = locals()
    with one_line_errors():
        options = DemoOptions(**given)
        from stream_balancer.demo.main import run_demo

        log = logging.getLogger("stream_balancer")
        level = log.level
        # ranks share cores here: one that looks slow, of which the log would warn, waits for its turn
        log.setLevel(logging.ERROR)
        try:
            code = run_demo(options)
        finally:
            log.setLevel(level)
    raise typer.Exit(code)
