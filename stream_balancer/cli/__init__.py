"""The command line: ``stream-balancer demo | replay | tune | status``, a file for each command.

Commands only read options, call the library and print. A mistake of the user's ends in one line and exit code 2.
"""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from stream_balancer.cli._options import as_command
from stream_balancer.cli.demo import Demo
from stream_balancer.cli.replay import Replay
from stream_balancer.cli.status import status
from stream_balancer.cli.tune import Tune

_WITH_KNOBS = {options.__name__.lower(): options for options in (Demo, Replay, Tune)}


class _Commands(TyperGroup):
    """Commands whose options are made once one is to run: help of all of them reads no knob."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name in _WITH_KNOBS:
            alone = typer.Typer(add_completion=False)
            alone.command(name)(as_command(_WITH_KNOBS[name]))
            command = typer.main.get_command(alone)
        return name, command, rest


app = typer.Typer(
    cls=_Commands,
    help="Balance finished RL rollouts over data-parallel ranks. See it work, and what it would do for your lengths.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point of ``stream-balancer``."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        from stream_balancer import __version__

        typer.echo(f"stream-balancer {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


for name, options in _WITH_KNOBS.items():
    app.command(name, help=inspect.getdoc(options))(lambda: None)
app.command()(status)
