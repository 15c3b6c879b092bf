"""Options common to the commands: how they become values of the library, and what a user's mistake looks like.

A command is a dataclass whose fields are its options. What ``BalancerConfig`` says of a knob is its help here, too.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar, get_origin, get_type_hints

import typer

from stream_balancer.config import BalancerConfig
from stream_balancer.cost import CostModel, PaddedCost, QuadraticCost, TokenCost, TransformerCost
from stream_balancer.errors import ConfigError, RolloutError, TraceError
from stream_balancer.field_docs import texts_below_fields
from stream_balancer.planning.arrays import Counts, Sync
from stream_balancer.planning.plan import Groups
from stream_balancer.tools.length_models import generate_trace
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
    "listed",
    "or_none",
    "progress",
    "stdout",
    "window_text",
]

T = TypeVar("T")

DEFAULT_GENERATED = 20_000  # rollouts of generate:NAME without a number: hundreds of dispatches, a second or two
DEFAULT_BATCH_SIZE = 32
GENERATE = "generate:"
USER_ERROR = 2  # typer's own code for bad usage
KNOBS = texts_below_fields(BalancerConfig)


def as_command(options: type[Any]) -> Callable[..., None]:
    """A function for typer: it takes the fields of the dataclass as options, and calls ``run()``. Help of a field that
    is not ``Annotated`` is the text below it, after what ``BalancerConfig`` says where it is a knob."""

    def command(**given: Any) -> None:
        try:
            options(**given).run()
        except (ConfigError, RolloutError, TraceError) as error:  # a value the user gave and the library refused
            fail(str(error))

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
    flag = [f"--{name.replace('_', '-')}"] if kind is bool else []  # else there would be --no-json
    if name not in KNOBS:
        return Annotated[kind, typer.Option(*flag, help=text)]
    first, *_ = re.split(r"(?<=[^.]\.) ", " ".join(KNOBS[name].replace("``", "").split()))
    said = f"{first} {text or ''}".strip()
    return Annotated[kind, typer.Option(*flag, help=said, metavar=_METAVARS.get(name), rich_help_panel="Knobs")]


_METAVARS = {"batch_size_range": "LEAST:MOST", "cost": "MODEL", "cp_sizes": "N,N,...", "max_skips": "N"}


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
    dp_size: int = 8
    batch_size: int | None = None
    """(default: 32)"""
    batch_size_range: str | None = None
    batch_tokens: int | None = None
    cost: str = "tokens"
    """One of tokens, quadratic, quadratic:LINEAR:QUADRATIC, padded, or a Hugging Face config.json (its FLOPs)."""
    counts: Counts = "free"
    sync: Sync = "step"
    max_tokens_per_micro_batch: int | None = None
    micro_batch_counts: Counts = "equal"
    micro_batch_overhead_cost: float | None = None
    mini_batches: int = 1
    cp_sizes: str = "1"
    cp_overhead: float = 0.15
    cp_min_tokens: int = 2048
    group_size: int | None = None
    """(default: groups play no part)"""
    groups: Groups = "same_batch"
    """With --group-size."""
    share_prefixes: bool = False
    """Where all of a group have one prompt length."""
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

    def config(self) -> BalancerConfig:
        """The knobs that were given."""
        knobs: dict[str, Any] = {
            one.name: _PARSERS.get(one.name, _as_it_is)(value)
            for one in fields(self)
            if one.name in KNOBS and (value := getattr(self, one.name)) is not None
        }
        if self.batch_tokens is None:
            knobs.setdefault("batch_size", DEFAULT_BATCH_SIZE)
        return BalancerConfig(**knobs)

    def simulation(self) -> dict[str, Any]:
        """Arguments of ``simulate`` and ``tune``."""
        return {
            "slots": self.slots,
            "tokens_per_second": self.tokens_per_second,
            "trainer": trainer_of(self.trainer),
            "seed": self.seed,
        }


def fail(message: str) -> NoReturn:
    typer.echo(f"stream-balancer: error: {message}", err=True)
    raise typer.Exit(USER_ERROR)


def trace_of(text: str, seed: int) -> Trace:
    if not text.startswith(GENERATE):
        return load_trace(text)
    name, _, number = text.removeprefix(GENERATE).partition(":")
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


def listed(option: str, text: str, of: Callable[[str], T], say: str, separator: str = ",") -> tuple[T, ...]:
    """An option's values, as a user writes them."""
    try:
        return tuple(of(part) for part in text.split(separator))
    except ValueError:
        fail(f"{option} {text}: write {say}")


def or_none(of: Callable[[str], T]) -> Callable[[str], T | None]:
    return lambda text: None if text == "none" else of(text)


def _range_of(text: str) -> tuple[int, ...]:
    say = "the least and the most rollouts of a step, 16:64 for example"
    found = listed("--batch-size-range", text, int, say, ":")
    return found if len(found) == 2 else fail(f"--batch-size-range {text}: write {say}")


def _as_it_is(value: Any) -> Any:
    return value


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "batch_size_range": _range_of,
    "cost": cost_of,
    "cp_sizes": lambda text: listed(
        "--cp-sizes", text, int, "numbers of ranks with commas between, as in --cp-sizes 1,2,4,8"
    ),
    "max_skips": lambda text: listed(
        "--max-skips", text, or_none(int), "a whole number of dispatches, or none for no bound"
    )[0],
}
"""Knobs that a user writes as text."""


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
