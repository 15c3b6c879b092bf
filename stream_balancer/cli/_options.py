"""Options common to the commands: how they become values of the library, and what a user's mistake looks like.

A command is a dataclass whose fields are its options. What ``BalancerConfig`` says of a knob is its help here, too.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, Protocol, get_origin, get_type_hints

import typer

from stream_balancer.config import BalancerConfig
from stream_balancer.cost import CostModel, PaddedCost, QuadraticCost, TokenCost, TransformerCost
from stream_balancer.errors import ConfigError, RolloutError, TraceError
from stream_balancer.field_docs import texts_below_fields
from stream_balancer.planning.arrays import Counts, Sync
from stream_balancer.planning.plan import Groups
from stream_balancer.tools.length_models import PRESETS, generate_trace
from stream_balancer.tools.trace import Trace, load_trace

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

__all__ = [
    "Simulated",
    "as_command",
    "batch_text",
    "deadline_text",
    "fail",
    "knob",
    "one_line_errors",
    "progress",
    "range_of",
    "skips_of",
    "stdout",
    "window_text",
]

DEFAULT_GENERATED = 20_000  # rollouts of generate:NAME without a number: hundreds of dispatches, a second or two
DEFAULT_BATCH_SIZE = 32
GENERATE = "generate:"
USER_ERROR = 2  # typer's own code for bad usage
KNOBS = texts_below_fields(BalancerConfig)


class Command(Protocol):
    def run(self) -> None: ...


def as_command(options: type[Command]) -> Callable[..., None]:
    """A function for typer: it takes the fields of the dataclass as options, and calls ``run()``. Help of a field that
    is not ``Annotated`` is the text below it."""

    def command(**given: Any) -> None:
        with one_line_errors():
            options(**given).run()

    types, texts = get_type_hints(options, include_extras=True), texts_below_fields(options)
    signature = inspect.signature(options)
    parameters = [
        one.replace(annotation=_option(one.name, types[one.name], texts.get(one.name)))
        for one in signature.parameters.values()
    ]
    setattr(command, "__signature__", signature.replace(parameters=parameters))  # noqa: B010 - functions have none for type checkers
    command.__name__, command.__doc__ = options.__name__.lower(), options.__doc__
    return command


def _option(name: str, kind: Any, text: str | None) -> Any:
    if get_origin(kind) is Annotated:
        return kind
    flag = [f"--{name}"] if kind is bool else []  # else there would be --no-json
    return Annotated[kind, typer.Option(*flag, help=text)]


def knob(name: str, note: str = "", *flags: str, **shown: Any) -> Any:
    """An option for a knob of ``BalancerConfig``. Its help: the knob's first sentence, and ``note``. ``flags``: how it
    is called, where that is not the knob's name."""
    text = " ".join(KNOBS.get(name, "").replace("``", "").split())
    first, *_ = re.split(r"(?<=[^.]\.) ", text)
    return typer.Option(*flags, help=f"{first} {note}".strip(), rich_help_panel="Knobs", **shown)


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Options of ``replay`` and ``tune``: lengths, knobs, and how fast rollouts come and go."""

    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE",
            help="A length trace (csv, csv.gz), or generate:NAME[:ROLLOUTS] for one made up (generate:help).",
        ),
    ]
    dp_size: Annotated[int, knob("dp_size")] = 8
    batch_size: Annotated[int | None, knob("batch_size", "(default: 32)")] = None
    batch_size_range: Annotated[str | None, knob("batch_size_range", metavar="LEAST:MOST")] = None
    batch_tokens: Annotated[int | None, knob("batch_tokens")] = None
    cost: Annotated[
        str,
        knob(
            "cost",
            "One of tokens, quadratic, quadratic:LINEAR:QUADRATIC, padded, or a Hugging Face config.json (its FLOPs).",
            metavar="MODEL",
        ),
    ] = "tokens"
    counts: Annotated[Counts, knob("counts")] = "free"
    sync: Annotated[Sync, knob("sync")] = "step"
    max_tokens_per_micro_batch: Annotated[int | None, knob("max_tokens_per_micro_batch")] = None
    micro_batch_counts: Annotated[Counts, knob("micro_batch_counts")] = "equal"
    micro_batch_overhead_cost: Annotated[float | None, knob("micro_batch_overhead_cost")] = None
    mini_batches: Annotated[int, knob("mini_batches")] = 1
    cp_sizes: Annotated[str, knob("cp_sizes", metavar="N,N,...")] = "1"
    cp_overhead: Annotated[float, knob("cp_overhead")] = 0.15
    cp_min_tokens: Annotated[int, knob("cp_min_tokens")] = 2048
    group_size: Annotated[int | None, knob("group_size", "(default: groups play no part)")] = None
    groups: Annotated[Groups, knob("groups", "With --group-size.")] = "same_batch"
    share_prefixes: Annotated[
        bool, knob("share_prefixes", "Where all of a group have one prompt length.", "--share-prefixes")
    ] = False
    slots: int = 128
    """Rollouts generated at a time (where no arrivals were recorded)."""
    tokens_per_second: float = 30.0
    """Generation speed of one slot."""
    trainer: Annotated[
        str,
        typer.Option(
            metavar="SPEED",
            help="instant: always free, so the window decides. matched: as fast as generation, if perfectly balanced. "
            "Or work per second and rank, in the cost model's unit.",
        ),
    ] = "instant"
    rollouts: int | None = None
    """Draw so many rollouts with replacement, whole groups."""
    scale: float = 1.0
    """Multiply lengths by this."""
    seed: int = 0
    """Seed of the generator, of the draw and of the order of generation."""
    json: bool = False
    """Print one JSON object instead of the table."""

    def lengths(self) -> Trace:
        """The trace that ``--rollouts`` and ``--scale`` make of it."""
        trace = trace_of(self.trace, self.seed)
        if self.rollouts is not None:
            trace = trace.resampled(self.rollouts, self.seed)
        return trace.scaled(self.scale)

    def config(self, **knobs: Any) -> BalancerConfig:
        """With ``knobs`` besides, those that were given."""
        in_rollouts = self.batch_tokens is None and self.batch_size is None
        return BalancerConfig(
            dp_size=self.dp_size,
            batch_size=DEFAULT_BATCH_SIZE if in_rollouts else self.batch_size,
            batch_size_range=None if self.batch_size_range is None else range_of(self.batch_size_range),
            batch_tokens=self.batch_tokens,
            cost=cost_of(self.cost),
            counts=self.counts,
            sync=self.sync,
            max_tokens_per_micro_batch=self.max_tokens_per_micro_batch,
            micro_batch_counts=self.micro_batch_counts,
            micro_batch_overhead_cost=self.micro_batch_overhead_cost,
            mini_batches=self.mini_batches,
            cp_sizes=sizes_of(self.cp_sizes),
            cp_overhead=self.cp_overhead,
            cp_min_tokens=self.cp_min_tokens,
            group_size=self.group_size,
            groups=self.groups,
            share_prefixes=self.share_prefixes,
            **{name: value for name, value in knobs.items() if value is not None},
        )

    def simulation(self) -> dict[str, Any]:
        """Arguments of ``simulate`` and ``tune``."""
        return {
            "slots": self.slots,
            "tokens_per_second": self.tokens_per_second,
            "trainer": trainer_of(self.trainer),
            "seed": self.seed,
        }


@contextmanager
def one_line_errors() -> Iterator[None]:
    """A value the user gave and the library refused (its errors are ValueErrors): one line, exit code 2."""
    try:
        yield
    except (ConfigError, RolloutError, TraceError) as error:
        fail(str(error))


def fail(message: str) -> NoReturn:
    typer.echo(f"stream-balancer: error: {message}", err=True)
    raise typer.Exit(USER_ERROR)


def trace_of(text: str, seed: int) -> Trace:
    if not text.startswith(GENERATE):
        return load_trace(text)
    name, _, number = text.removeprefix(GENERATE).partition(":")
    if name not in PRESETS:
        raise TraceError(f"{text}: no length model is called {name!r}; use one of {', '.join(PRESETS)}")
    try:
        num_rollouts = int(number) if number else DEFAULT_GENERATED
    except ValueError:
        raise TraceError(f"{text}: {number!r} is not a number of rollouts. Write {GENERATE}{name}:20000") from None
    return generate_trace(num_rollouts, name, seed=seed)


def cost_of(text: str) -> CostModel:
    name, _, rest = text.partition(":")
    simple: dict[str, Callable[[], CostModel]] = {"tokens": TokenCost, "quadratic": QuadraticCost, "padded": PaddedCost}
    if text in simple:
        return simple[text]()
    try:
        if name == "quadratic":
            linear, quadratic = (float(part) for part in rest.split(":"))
            return QuadraticCost(linear=linear, quadratic=quadratic)
        if text.endswith(".json"):
            return TransformerCost.from_hf_config(json.loads(Path(text).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"--cost {text}: {error}") from None
    raise ConfigError(
        f"--cost {text}: no such cost model. Use tokens, quadratic, quadratic:LINEAR:QUADRATIC, padded, or the path of "
        "a Hugging Face config.json"
    )


def trainer_of(text: str) -> float | Literal["instant", "matched"]:
    if text == "instant":
        return "instant"
    if text == "matched":
        return "matched"
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--trainer {text}: use instant, matched, or a number of work units per second") from None


def range_of(text: str) -> tuple[int, int]:
    """``batch_size_range`` as a user writes it."""
    try:
        least, most = (int(part) for part in text.split(":"))
    except ValueError:
        fail(f"--batch-size-range {text}: write the least and the most rollouts of a step, 16:64 for example")
    return least, most


def sizes_of(text: str) -> tuple[int, ...]:
    """``cp_sizes`` as a user writes them."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        fail(f"--cp-sizes {text}: write numbers of ranks with commas between, as in --cp-sizes 1,2,4,8")


def skips_of(text: str) -> int | None:
    """``max_skips`` as a user writes it."""
    try:
        return None if text == "none" else int(text)
    except ValueError:
        fail(f"--max-skips {text}: write a whole number of dispatches, or none for no bound")


def batch_text(config: BalancerConfig) -> str:
    if config.batch_tokens is not None:
        return f"{config.batch_tokens:,} tokens"
    least_most = config.batch_size_range
    return f"{config.batch_size}" + ("" if least_most is None else " ({} to {})".format(*least_most)) + " rollouts"


def window_text(config: BalancerConfig) -> str:
    return str(config.window) if config.window_tokens is None else f"{config.window_tokens:,} tokens"


def deadline_text(deadline_s: float | None) -> str:
    return "none" if deadline_s is None else f"{deadline_s:g} s"


def stdout() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def progress() -> Progress:
    """Bars, on a terminal only."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<14}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
