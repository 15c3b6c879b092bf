"""Options common to the commands: how they become values of the library, and what a user's mistake looks like."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeAlias

import typer

if TYPE_CHECKING:
    from stream_balancer.config import BalancerConfig
    from stream_balancer.cost import CostModel
    from stream_balancer.tools.trace import Trace

__all__ = [
    "BatchSize",
    "Cost",
    "Counts",
    "CountsOption",
    "DpSize",
    "GroupSize",
    "Groups",
    "GroupsOption",
    "Json",
    "NumRollouts",
    "Scale",
    "Seed",
    "Slots",
    "Sync",
    "SyncOption",
    "TokenCap",
    "TokensPerSecond",
    "TraceArgument",
    "Trainer",
    "config_of",
    "cost_of",
    "fail",
    "lengths_of",
    "one_line_errors",
    "skips_of",
    "trace_of",
    "trainer_of",
]

DEFAULT_GENERATED = 20_000  # rollouts of generate:NAME without a number: hundreds of dispatches, a second or two
GENERATE = "generate:"
USER_ERROR = 2  # typer's own code for bad usage


class Counts(StrEnum):
    free = "free"
    equal = "equal"


class Sync(StrEnum):
    step = "step"
    micro_batch = "micro_batch"


class Groups(StrEnum):
    free = "free"
    same_batch = "same_batch"
    same_rank = "same_rank"


TraceArgument: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="TRACE",
        help="A length trace (csv, csv.gz), or generate:NAME[:ROLLOUTS] for one made up (generate:help).",
    ),
]
DpSize: TypeAlias = Annotated[int, typer.Option(help="Data-parallel ranks.")]
BatchSize: TypeAlias = Annotated[int, typer.Option(help="Rollouts per dispatch, over all ranks.")]
Cost: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="MODEL",
        help="tokens, quadratic, quadratic:LINEAR:QUADRATIC, padded, or a Hugging Face config.json (its FLOPs).",
    ),
]
CountsOption: TypeAlias = Annotated[Counts, typer.Option(help="Rollouts per rank.")]
SyncOption: TypeAlias = Annotated[Sync, typer.Option(help="Where ranks meet: micro_batch under FSDP / ZeRO-3.")]
TokenCap: TypeAlias = Annotated[int | None, typer.Option(help="Hard token cap of a micro-batch.")]
GroupSize: TypeAlias = Annotated[int | None, typer.Option(help="Siblings per group. (default: groups play no part)")]
GroupsOption: TypeAlias = Annotated[Groups, typer.Option(help="Where siblings go; with --group-size.")]
Slots: TypeAlias = Annotated[int, typer.Option(help="Rollouts generated at a time (where no arrivals were recorded).")]
TokensPerSecond: TypeAlias = Annotated[float, typer.Option(help="Generation speed of one slot.")]
Trainer: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="SPEED",
        help="instant: always free, so the window decides. matched: as fast as generation, if perfectly balanced. "
        "Or work per second and rank, in the cost model's unit.",
    ),
]
NumRollouts: TypeAlias = Annotated[
    int | None, typer.Option("--rollouts", help="Draw so many rollouts with replacement, whole groups.")
]
Scale: TypeAlias = Annotated[float, typer.Option(help="Multiply lengths by this.")]
Seed: TypeAlias = Annotated[
    int, typer.Option(help="Seed of the generator, of the draw and of the order of generation.")
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")]


@contextmanager
def one_line_errors() -> Iterator[None]:
    """A value the user gave and the library refused (its errors are ValueErrors): one line, exit code 2."""
    from stream_balancer.errors import ConfigError, RolloutError, TraceError

    try:
        yield
    except (ConfigError, RolloutError, TraceError) as error:
        fail(str(error))


def fail(message: str) -> NoReturn:
    typer.echo(f"stream-balancer: error: {message}", err=True)
    raise typer.Exit(USER_ERROR)


def trace_of(text: str, seed: int) -> Trace:
    from stream_balancer.errors import TraceError
    from stream_balancer.tools.length_models import PRESETS, generate_trace
    from stream_balancer.tools.trace import load_trace

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


def lengths_of(text: str, seed: int, rollouts: int | None, scale: float) -> Trace:
    """The trace that ``--rollouts`` and ``--scale`` make of it."""
    trace = trace_of(text, seed)
    if rollouts is not None:
        trace = trace.resampled(rollouts, seed)
    return trace.scaled(scale)


def cost_of(text: str) -> CostModel:
    from stream_balancer.cost import PaddedCost, QuadraticCost, TokenCost, TransformerCost
    from stream_balancer.errors import ConfigError

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
    from stream_balancer.errors import ConfigError

    if text == "instant":
        return "instant"
    if text == "matched":
        return "matched"
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--trainer {text}: use instant, matched, or a number of work units per second") from None


def skips_of(text: str) -> int | None:
    """``max_skips`` as a user writes it."""
    try:
        return None if text == "none" else int(text)
    except ValueError:
        fail(f"--max-skips {text}: write a whole number of dispatches, or none for no bound")


def config_of(**knobs: Any) -> BalancerConfig:
    from stream_balancer.config import BalancerConfig

    return BalancerConfig(**{name: value for name, value in knobs.items() if value is not None})
