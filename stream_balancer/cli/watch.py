"""``stream-balancer watch``."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stream_balancer.cli._options import fail

if TYPE_CHECKING:
    from stream_balancer.watch.status import Status

__all__ = ["watch"]

_POLL_S = 0.25  # a new picture is there twice a second at most
_RATE_OVER = 20  # pictures: rates are means of about ten seconds


def watch(
    source: Annotated[
        str | None,
        typer.Argument(help="Process id, socket, or a recording. (default: the newest balancer that publishes here)"),
    ] = None,
    record: Annotated[Path | None, typer.Option(help="Also write every picture to this file, one JSON a line.")] = None,
    once: Annotated[bool, typer.Option(help="Print one picture (of a recording: the last) and exit.")] = False,
    speed: Annotated[float, typer.Option(min=0.01, help="How fast to play a recording.")] = 1.0,
    json: Annotated[bool, typer.Option("--json", help="Print pictures as JSON, one a line.")] = False,
) -> None:
    """Look at a running balancer: what waits, by length and waiting time, the next batch's balance, ranks, rates,
    warnings.

    Shows a process of yours on this machine that runs `async with publish_status(balancer)`; see docs/observing.md.
    """
    try:
        path = _find(source)
        live = path.is_socket()
        pictures = _live(path) if live else _played(path, math.inf if once else speed)
        if once:
            pictures = islice(pictures, 1) if live else iter(deque(pictures, maxlen=1))
        if record is not None:
            pictures = _recorded(pictures, record)
        found = _print(pictures) if json else _show(pictures)
    except (OSError, ValueError, LookupError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit from None
    if not found:
        fail(f"{path} holds no picture")
    if live and not (once or json):
        typer.echo("the balancer is gone")


def _find(source: str | None) -> Path:
    """Where the pictures come from. Removes what dead processes have left."""
    from stream_balancer.watch.status import SUFFIX, fetch, folder

    if source is not None and not source.isdecimal():
        return Path(source)
    found = folder().glob(f"{'*' if source is None else source}-*{SUFFIX}")
    for path in sorted(found, key=lambda p: p.stat().st_mtime, reverse=True):
        try:
            fetch(path)
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        else:
            return path
    who = "no balancer publishes" if source is None else f"process {source} does not publish a balancer"
    fail(f"{who} here: run `async with publish_status(balancer)` in it (stream_balancer.watch.publish)")


def _live(path: Path) -> Iterator[Status]:
    """Each new picture, until the balancer is gone."""
    from stream_balancer.watch.status import fetch

    last: Status | None = None
    while True:
        try:
            status = fetch(path)
        except (ConnectionError, FileNotFoundError):
            if last is None:
                raise
            return
        if last is None or status.time_s != last.time_s:
            yield status
        last = status
        time.sleep(_POLL_S)


def _played(path: Path, speed: float) -> Iterator[Status]:
    from stream_balancer.watch.status import recording

    before: Status | None = None
    for status in recording(path):
        if before is not None:
            time.sleep(max(status.time_s - before.time_s, 0.0) / speed)
        yield status
        before = status


def _recorded(pictures: Iterator[Status], record: Path) -> Iterator[Status]:
    with record.open("ab", buffering=0) as file:
        for status in pictures:
            file.write(status.line())
            yield status


def _print(pictures: Iterator[Status]) -> bool:
    """As JSON; whether there was any."""
    found = False
    for status in pictures:
        typer.echo(status.line(), nl=False)
        found = True
    return found


def _show(pictures: Iterator[Status]) -> bool:
    """Each in the place of the one before; whether there was any."""
    from rich.live import Live

    from stream_balancer.watch.view import picture

    recent: deque[Status] = deque(maxlen=_RATE_OVER)
    with Live(auto_refresh=False, screen=False) as live:
        for status in pictures:
            live.update(picture(status, recent[0] if recent else None), refresh=True)
            recent.append(status)
    if not live.console.is_terminal:
        typer.echo()  # rich ends the line on a terminal only
    return bool(recent)
