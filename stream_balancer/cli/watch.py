"""``stream-balancer watch``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stream_balancer.cli._options import fail

if TYPE_CHECKING:
    from stream_balancer.watch.status import Status

__all__ = ["watch"]

_RATE_OVER = 20  # pictures: rates are means of about ten seconds


def watch(
    source: Annotated[
        str | None,
        typer.Argument(help="Process id, socket, or a recording. (default: the newest balancer that publishes here)"),
    ] = None,
    record: Annotated[Path | None, typer.Option(help="Also write every picture to this file, one JSON a line.")] = None,
    once: Annotated[bool, typer.Option(help="Print one picture (of a recording: the last) and exit.")] = False,
    speed: Annotated[float, typer.Option(min=0.01, help="How fast to play a recording.")] = 1.0,
) -> None:
    """Look at a running balancer: what waits, by length and waiting time, the next batch's balance, ranks, rates,
    warnings.

    Shows a process of yours on this machine that runs `async with publish_status(balancer)`; see docs/observing.md.
    """
    try:
        path, recorded = _find(source)
        pictures = _pictures(path, recorded=recorded, speed=speed, paced=recorded and not once)
        if once:
            _print_one(pictures, last=recorded)
        else:
            _show(pictures if record is None else _recorded(pictures, record))
    except (OSError, ValueError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit from None


def _find(source: str | None) -> tuple[Path, bool]:
    """-> (where the pictures come from, whether that is a recording)."""
    from stream_balancer.watch.status import publishing

    if source is not None and not source.isdecimal():
        path = Path(source)
        return path, not path.is_socket()
    found = publishing()
    mine = [path for path in found if source is None or path.name.startswith(f"{source}-")]
    if not mine:
        who = "no balancer publishes" if source is None else f"process {source} does not publish a balancer"
        fail(f"{who} here: run `async with publish_status(balancer)` in it (stream_balancer.watch.publish)")
    return mine[-1], False


def _pictures(path: Path, *, recorded: bool, speed: float, paced: bool) -> Iterator[Status]:
    from stream_balancer.watch.status import attach, recording

    before: Status | None = None
    for status in recording(path) if recorded else attach(path):
        if paced and before is not None:
            time.sleep(max(status.time_s - before.time_s, 0.0) / speed)
        yield status
        before = status


def _recorded(pictures: Iterator[Status], record: Path) -> Iterator[Status]:
    with record.open("ab", buffering=0) as file:
        for status in pictures:
            file.write(status.line())
            yield status


def _print_one(pictures: Iterator[Status], *, last: bool) -> None:
    from rich.console import Console

    from stream_balancer.watch.view import picture

    shown: Status | None = None
    before: Status | None = None
    for status in pictures:
        before, shown = shown, status
        if not last:
            break
    if shown is None:
        fail("the recording holds no picture")
    Console().print(picture(shown, before))


def _show(pictures: Iterator[Status]) -> None:
    from rich.live import Live

    from stream_balancer.watch.view import picture

    recent: deque[Status] = deque(maxlen=_RATE_OVER)
    with Live(auto_refresh=False, screen=False) as live:
        for status in pictures:
            live.update(picture(status, recent[0] if recent else None), refresh=True)
            recent.append(status)
    typer.echo("the balancer is gone" if recent else "there was nothing to see")
