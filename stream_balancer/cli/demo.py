"""``stream-balancer demo``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from stream_balancer.cli._options import fail, one_line_errors

__all__ = ["demo"]


class Backend(StrEnum):
    asyncio = "asyncio"
    trio = "trio"


def demo(
    ranks: Annotated[int | None, typer.Option(help="Trainer ranks, each a process. (default: 4)")] = None,
    workers: Annotated[int | None, typer.Option(help="Concurrent rollout workers. (default: 64)")] = None,
    rollouts: Annotated[int | None, typer.Option(help="Rollouts in each of the two runs.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rollouts per step, over all ranks.")] = None,
    window: Annotated[int | None, typer.Option(help="Rollouts to wait for. (default: 2 x batch size)")] = None,
    deadline_s: Annotated[float | None, typer.Option(help="Longest wait of a rollout before a batch leaves.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Length trace, csv or csv.gz. (default: generated)")] = None,
    scale: Annotated[
        float | None, typer.Option(help="Multiply lengths by this. (default: so that a CPU can train on them)")
    ] = None,
    generator: Annotated[
        str | None, typer.Option(help="Length model, where there is no --trace. (default: lrm)")
    ] = None,
    backend: Annotated[Backend | None, typer.Option(help="Event loop of the controller. (default: asyncio)")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of lengths, order and model. (default: 0)")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Watch real processes train the same rollouts twice: in the usual way (arrival order, round-robin), then balanced.

    Starts a controller with rollout workers and one trainer process per rank, connected by torch.distributed over gloo.
    """
    from stream_balancer.demo.options import DemoOptions

    given: dict[str, Any] = {
        "ranks": ranks,
        "workers": workers,
        "rollouts": rollouts,
        "batch_size": batch_size,
        "window": window,
        "deadline_s": deadline_s,
        "trace": trace,
        "scale": scale,
        "generator": generator,
        "backend": None if backend is None else backend.value,
        "seed": seed,
    }
    try:
        options = DemoOptions(json=json_, **{name: value for name, value in given.items() if value is not None})
    except ValueError as error:
        fail(str(error))
    from stream_balancer.demo.main import run_demo

    with one_line_errors():
        code = run_demo(options)
    raise typer.Exit(code)
