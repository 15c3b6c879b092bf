"""Options common to the commands: how they become values of the library, and what a user's mistake looks like.

A command is a dataclass whose fields are its options, beside the knobs that it takes, those of a group by their path:
``--groups.size``. What ``BalancerConfig`` says of a knob is its help here, too, and what it may be is the knob's kind.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NoReturn, get_args, get_origin, get_type_hints

import msgspec
import typer

from stream_balancer.errors import ConfigError, RolloutError, TraceError
from stream_balancer.field_docs import first_sentence, texts_below_fields

# the config and traces are imported where they are used: help of all commands needs neither, nor numpy
if TYPE_CHECKING:
    from stream_balancer.config import BalancerConfig
    from stream_balancer.tools.simulation_report import SimulationReport
    from stream_balancer.tools.trace import Trace

DEFAULTS = {"dp_size": 8, "batch_size": 32}
"""Knobs that a balancer needs, and a look at lengths need not be given."""
DEFAULT_GENERATED = 20_000  # rollouts of generate:NAME without a number: hundreds of steps, a second or two
GENERATE = "generate:"
USER_ERROR = 2  # typer's own code for bad usage


def as_command(options: type[Any]) -> Callable[..., None]:
    """Function for typer: the fields of the dataclass and the ``KNOBS`` that it names are its options, and it calls
    ``run()``. Help of a field is the text below it, and that of a knob what ``BalancerConfig`` says."""

    paths: tuple[str, ...] = getattr(options, "KNOBS", ())

    def command(**given: Any) -> None:
        try:
            # options that were not given stay out: a default must not go over a value of the file
            knobs = {path: value for path in paths if (value := given.pop(_identifier(path))) is not None}
            options(**given, **({"knobs": knobs} if paths else {})).run()
        except (ConfigError, RolloutError, TraceError) as error:  # a value the user gave and the library refused
            fail(str(error))

    types, texts = get_type_hints(options, include_extras=True), texts_below_fields(options)
    signature = inspect.signature(options)
    own = [
        one.replace(annotation=_option(types[one.name], one.name, help=texts.get(one.name)))
        for one in signature.parameters.values()
        if one.name != "knobs"
    ]
    setattr(command, "__signature__", signature.replace(parameters=own + [_knob(path) for path in paths]))  # noqa: B010 - functions have none for type checkers
    command.__name__, command.__doc__ = options.__name__.lower(), options.__doc__
    return command


def _option(kind: Any, name: str, **how: Any) -> Any:
    if get_origin(kind) is Annotated:
        return kind
    flag = [f"--{name.replace('_', '-')}"] if kind in (bool, bool | None) else []  # else there would be --no-json
    return Annotated[kind, typer.Option(*flag, **how)]


def _knob(path: str) -> inspect.Parameter:
    kind, text, default = _at(path)
    default = DEFAULTS.get(path, default)
    said = f" (default: {default})" if isinstance(default, int | float | str) and kind is not bool else ""
    choices = "|".join(get_args(kind)) if get_origin(kind) is Literal else "VALUE"
    how = typer.Option(
        _flag(path),
        help=first_sentence(text) + said,
        metavar=None if kind is bool else choices,
        rich_help_panel="Knobs",
    )
    return inspect.Parameter(
        _identifier(path),
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        # text, whatever its kind: typer's own errors do not know what a knob may be
        annotation=Annotated[bool | None if kind is bool else str | None, how],
    )


def _at(path: str) -> tuple[Any, str, Any]:
    """Kind, text and default of a knob."""
    from stream_balancer.config import BalancerConfig
    from stream_balancer.config.values import knob_at

    return knob_at(BalancerConfig, path)


def _flag(path: str) -> str:
    return "--" + path.replace("_", "-")


def _identifier(path: str) -> str:
    # Python's names have no dots
    return path.replace(".", "__")


def value_of(option: str, text: str, kind: Any, words: str) -> Any:
    """A user's text as a value of this kind; several with commas or a colon between. Raises ConfigError."""
    many = any(
        get_origin(get_args(one)[0] if get_origin(one) is Annotated else one) is tuple
        for one in (kind, *get_args(kind))
    )
    parts = [None if part == "none" else part for part in (re.split("[,:]", text) if many else [text])]
    try:
        return msgspec.convert(parts if many else parts[0], kind, strict=False)
    except msgspec.ValidationError:
        raise ConfigError(f"{option} {text}: must be {words}") from None


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Options of ``replay`` and ``tune``: lengths, knobs, and how fast rollouts come and go."""

    KNOBS: ClassVar[tuple[str, ...]] = (
        "dp_size", "batch_size", "mini_batches", "cost", "equal_rollouts", "sync", "micro_batches.max_tokens",
        "micro_batches.equal_number", "micro_batches.overhead_cost", "groups.size", "groups.min_size",
        "groups.patience",
    )  # fmt: skip

    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE",
            help="A length trace (csv, csv.gz), or generate:NAME[:ROLLOUTS] for one made up (generate:help).",
        ),
    ]
    config: Path | None = None
    """Knobs from a file (.yaml, .json, .toml), as BalancerConfig.from_dict takes them. Options override it; tune
    overrides its window, capacity, max_skips, deadline_s and policy by those that it tries."""
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

    @cached_property
    def given(self) -> dict[str, Any]:
        """Knobs of the file, with those of the options on top, as ``from_dict`` takes them."""
        from stream_balancer.config.values import in_words

        given = _read(self.config) if self.config is not None else {}
        for path, value in self.knobs.items():
            kind, *_ = _at(path)
            if isinstance(value, str) and kind is not Any:
                value = value_of(_flag(path), value, kind, in_words(kind))
            group, _, name = path.rpartition(".")
            before = given.get(group)
            if not group:
                given[name] = value
            elif before is None or isinstance(before, Mapping):  # else from_dict says what it must be
                given[group] = {**(before or {}), name: value}
        return given

    def balancer(self) -> BalancerConfig:
        """The config of these knobs."""
        from stream_balancer.config import BalancerConfig

        return BalancerConfig.from_dict(DEFAULTS | self.given)

    @property
    def cost(self) -> str:
        """The cost model, by the name that it was given by."""
        return str(self.given.get("cost", "quadratic"))

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
    reader = {".json": msgspec.json, ".toml": msgspec.toml}.get(path.suffix.lower(), msgspec.yaml)
    try:
        text = path.read_text(encoding="utf-8")
        # YAML alone has a value for an empty text
        knobs: Any = reader.decode(text) if text.strip() else None
        if not (knobs and isinstance(knobs, dict)):
            found = f"a {type(knobs).__name__}" if knobs else "nothing"
            raise ValueError(
                f"holds {found} where a mapping from knobs to values should be. Write one, as in `dp_size: 8`, or "
                "leave --config out"
            )
    except (OSError, ValueError, ImportError) as error:
        # one line, as every mistake: parsers write several
        raise ConfigError(f"--config {path}: {' '.join(str(error).split())}") from None
    return knobs


def fail(message: str) -> NoReturn:
    typer.echo(f"stream-balancer: error: {message}", err=True)
    raise typer.Exit(USER_ERROR)


def trace_of(text: str, seed: int) -> Trace:
    from stream_balancer.tools.length_models import generate_trace
    from stream_balancer.tools.trace import load_trace

    if not text.startswith(GENERATE):
        return load_trace(text)
    name, _, number = text.removeprefix(GENERATE).partition(":")
    try:
        num_rollouts = int(number) if number else DEFAULT_GENERATED
    except ValueError:
        raise TraceError(f"{text}: {number!r} is not a number of rollouts. Write {GENERATE}{name}:20000") from None
    return generate_trace(num_rollouts, name, seed=seed)


def deadline_text(deadline_s: float | None) -> str:
    return "none" if deadline_s is None else f"{deadline_s:g} s"


def put_waited(report: SimulationReport) -> str:
    """Idle time of generation, of the slots' time where there are slots."""
    # NaN is not itself: recorded arrivals have no slots
    known = report.generation_idle == report.generation_idle
    return f"{report.generation_idle:.2%}" if known else f"{report.blocked_s:,.1f} s a rollout"
