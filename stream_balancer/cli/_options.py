"""Options common to the commands: how they become values of the library, and what a user's mistake looks like.

A command is a dataclass whose fields are its options, beside the knobs that it takes. What ``BalancerConfig`` says of a
knob is its help here, too, and what a knob may be is ``config.checks.KINDS``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, get_args, get_origin, get_type_hints

import msgspec
import typer

from stream_balancer.config import BalancerConfig
from stream_balancer.config.checks import KINDS
from stream_balancer.errors import ConfigError, RolloutError, TraceError
from stream_balancer.field_docs import texts_below_fields
from stream_balancer.tools.length_models import generate_trace
from stream_balancer.tools.trace import Trace, load_trace

__all__ = ["Simulated", "as_command", "batch_text", "deadline_text", "fail", "value_of", "window_text"]

DEFAULTS = {"dp_size": 8, "batch_size": 32}
"""Knobs that a balancer needs, and a look at lengths need not be given."""
DEFAULT_GENERATED = 20_000  # rollouts of generate:NAME without a number: hundreds of dispatches, a second or two
GENERATE = "generate:"
USER_ERROR = 2  # typer's own code for bad usage
KNOBS = texts_below_fields(BalancerConfig)
METAVARS = {"batch_size_range": "LEAST:MOST", "cost": "MODEL", "cp_sizes": "N,N,...", "deadline_s": "SECONDS"}


def as_command(options: type[Any]) -> Callable[..., None]:
    """A function for typer: it takes the fields of the dataclass and the ``KNOBS`` that it names as options, and calls
    ``run()``. Help of a field is the text below it, and that of a knob what ``BalancerConfig`` says."""

    names: tuple[str, ...] = getattr(options, "KNOBS", ())

    def command(**given: Any) -> None:
        try:
            knobs = {name: value for name in names if (value := given.pop(name)) is not None}
            options(**given, **({"knobs": knobs} if names else {})).run()
        except (ConfigError, RolloutError, TraceError) as error:  # a value the user gave and the library refused
            fail(str(error))

    types, texts = get_type_hints(options, include_extras=True), texts_below_fields(options)
    signature = inspect.signature(options)
    own = [
        one.replace(annotation=_option(types[one.name], one.name, help=_help(one.name, texts)))
        for one in signature.parameters.values()
        if one.name != "knobs"
    ]
    knobs = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_knob(n)) for n in names]
    setattr(command, "__signature__", signature.replace(parameters=own + knobs))  # noqa: B010 - functions have none for type checkers
    command.__name__, command.__doc__ = options.__name__.lower(), options.__doc__
    return command


def _option(kind: Any, name: str, **how: Any) -> Any:
    if get_origin(kind) is Annotated:
        return kind
    flag = [f"--{name.replace('_', '-')}"] if kind in (bool, bool | None) else []  # else there would be --no-json
    return Annotated[kind, typer.Option(*flag, **how)]


def _help(name: str, texts: Mapping[str, str]) -> str:
    """The first sentence that BalancerConfig says of a knob, and the text of the command."""
    first, *_ = re.split(r"(?<=[^.]\.) ", " ".join(KNOBS.get(name, "").replace("``", "").split()))
    return f"{first} {texts.get(name) or ''}".strip()


def _knob(name: str) -> Any:
    kind = KINDS[name][0] if name in KINDS else str
    default = DEFAULTS.get(name, BalancerConfig.__dataclass_fields__[name].default)
    said = f"(default: {default})" if isinstance(default, int | float | str) and kind is not bool else ""
    choices = "|".join(get_args(kind)) if get_origin(kind) is Literal else None
    return _option(
        bool | None if kind is bool else str | None,
        name,
        help=_help(name, {name: said}),
        metavar=None if kind is bool else METAVARS.get(name, choices or "N"),
        rich_help_panel="Knobs",
    )


def value_of(option: str, text: str, kind: Any, words: str) -> Any:
    """A user's text as a value of this kind; several with commas or a colon between. Raises ConfigError."""
    many = get_origin(kind) is tuple or any(get_origin(one) is tuple for one in get_args(kind))
    parts = [None if part == "none" else part for part in (re.split("[,:]", text) if many else [text])]
    try:
        return msgspec.convert(parts if many else parts[0], kind, strict=False)
    except msgspec.ValidationError:
        raise ConfigError(f"{option} {text}: must be {words}") from None


def _value_of_knob(name: str, value: Any) -> Any:
    if not isinstance(value, str) or name not in KINDS:
        return value
    return value_of("--" + name.replace("_", "-"), value, *KINDS[name])


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Options of ``replay`` and ``tune``: lengths, knobs, and how fast rollouts come and go."""

    KNOBS: ClassVar[tuple[str, ...]] = (
        "dp_size", "batch_size", "batch_size_range", "batch_tokens", "cost", "counts", "sync",
        "max_tokens_per_micro_batch", "micro_batch_counts", "micro_batch_overhead_cost", "mini_batches", "cp_sizes",
        "cp_overhead", "cp_min_tokens", "group_size", "groups", "share_prefixes",
    )  # fmt: skip

    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE",
            help="A length trace (csv, csv.gz), or generate:NAME[:ROLLOUTS] for one made up (generate:help).",
        ),
    ]
    config: Path | None = None
    """Knobs from a file (.yaml, .json, .toml), as BalancerConfig.from_dict takes them; options come on top."""
    knobs: Mapping[str, Any] = field(default_factory=dict)
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
        if self.seed < 0:
            raise ConfigError(f"seed must be >= 0, not {self.seed}: numpy's generators take no other")
        trace = trace_of(self.trace, self.seed)
        if self.rollouts is not None:
            trace = trace.resampled(self.rollouts, self.seed)
        return trace.scaled(self.scale)

    def balancer(self) -> BalancerConfig:
        """The knobs that were given."""
        knobs = _read(self.config) if self.config is not None else {}
        knobs |= {name: _value_of_knob(name, value) for name, value in self.knobs.items()}
        needed = DEFAULTS if knobs.get("batch_tokens") is None else {"dp_size": DEFAULTS["dp_size"]}
        return BalancerConfig.from_dict(needed | knobs)

    def cost(self, config: BalancerConfig) -> str:
        """Name of the cost model."""
        return str(self.knobs.get("cost", "tokens" if self.config is None else config.cost))

    def simulation(self) -> dict[str, Any]:
        """Arguments of ``simulate`` and ``tune``."""
        words = "instant, matched, or a number of work units per second"
        return {
            "slots": self.slots,
            "tokens_per_second": self.tokens_per_second,
            "trainer": value_of("--trainer", self.trainer, Literal["instant", "matched"] | float, words),
            "seed": self.seed,
        }


def _read(path: Path) -> dict[str, Any]:
    decode = {".json": msgspec.json.decode, ".toml": msgspec.toml.decode}.get(path.suffix, msgspec.yaml.decode)
    try:
        return decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, ImportError, msgspec.MsgspecError) as error:
        raise ConfigError(f"--config {path}: {' '.join(str(error).split())}") from None


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


def batch_text(config: BalancerConfig) -> str:
    if config.batch_tokens is not None:
        return f"{config.batch_tokens:,} tokens"
    least_most = config.batch_size_range
    return f"{config.batch_size}" + ("" if least_most is None else " ({} to {})".format(*least_most)) + " rollouts"


def window_text(config: BalancerConfig) -> str:
    return str(config.window) if config.window_tokens is None else f"{config.window_tokens:,} tokens"


def deadline_text(deadline_s: float | None) -> str:
    return "none" if deadline_s is None else f"{deadline_s:g} s"
