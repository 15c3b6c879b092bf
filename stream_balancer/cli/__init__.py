"""The command line: ``stream-balancer demo | replay | tune | status``, a file for each command.

Commands only read options, call the library and print. A mistake of the user's ends in one line and exit code 2.
"""

from __future__ import annotations

from typing import Annotated

import typer

from stream_balancer.cli._options import as_command
from stream_balancer.cli.demo import Demo
from stream_balancer.cli.replay import Replay
from stream_balancer.cli.status import status
from stream_balancer.cli.tune import Tune

app = typer.Typer(
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


for command in (as_command(Demo), as_command(Replay), as_command(Tune), status):
    app.command()(command)
