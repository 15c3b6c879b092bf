"""Checks of dataclasses of knobs: names and values, with errors that name the knob and its legal values.

A dataclass of knobs stands below ``@checked``. The constructor then compares each value with the type at its field:

    BalancerConfig(dp_size=8, batch_size=32, windw=64)   ConfigError: no such knob: windw. Did you mean window?
    MicroBatches(max_tokens=0)                           ConfigError: micro_batches.max_tokens must be an int >= 1 ...
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, wraps
from types import NoneType
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from stream_balancer.errors import ConfigError
from stream_balancer.field_docs import texts_below_fields

T = TypeVar("T", bound=type)

Count: TypeAlias = Annotated[int, Meta(ge=1, description="an int >= 1")]
DERIVED: Any = None
"""Default of a knob that the config computes from the other knobs."""


class Knobs:
    """Base of the dataclasses of knobs."""

    def __repr__(self) -> str:
        """Only values that differ from the defaults."""
        given = ((one.name, getattr(self, one.name)) for one in fields(self))  # type: ignore[arg-type]
        differ = [f"{name}={value!r}" for name, value in given if value != kinds_of(type(self))[name][1]]
        return f"{type(self).__name__}({', '.join(differ)})"


def checked(group: str = "") -> Callable[[T], T]:
    """Class decorator: the constructor takes knobs by name and checks them. ``group``: the knob of ``BalancerConfig``
    that holds values of this class; errors name its knobs ``group.knob``."""

    def decorate(cls: T) -> T:
        make = vars(cls)["__init__"]

        @wraps(make)
        def __init__(self: Any, *unnamed: Any, **given: Any) -> None:  # noqa: N807 - it takes the place of one
            if unnamed:
                raise ConfigError(f"{cls.__name__} takes knobs by name, as in {cls.__name__}({_first(cls)}=...)")
            make(self, **_checked(cls, group and f"{group}.", given))

        setattr(cls, "__init__", __init__)  # noqa: B010 - type checkers keep the dataclass's own
        return cls

    return decorate


def kinds_of(cls: type) -> dict[str, tuple[Any, Any]]:
    """Type and default of each knob."""
    return _kinds_of(cls)


@cache
def _kinds_of(cls: Any) -> dict[str, tuple[Any, Any]]:  # Any: mypy takes a dataclass for no Hashable
    hints = get_type_hints(cls, include_extras=True)
    return {
        one.name: (hints[one.name], one.default if one.default_factory is MISSING else one.default_factory())
        for one in fields(cls)
    }


def knob_at(cls: type, path: str) -> tuple[Any, str, Any]:
    """Type, text and default of the knob at ``name`` or ``group.name``."""
    group, _, name = path.rpartition(".")
    owner = kinds_of(cls)[group][0] if group else cls
    kind, default = kinds_of(owner)[name]
    return kind, texts_below_fields(owner)[name], default


def in_words(kind: Any) -> str:
    """A type as an error names it."""
    if is_dataclass(kind) and isinstance(kind, type):
        return f"{kind.__name__}(...), or a mapping with some of {', '.join(kinds_of(kind))}"
    if get_origin(kind) is Annotated:
        return str(kind.__metadata__[0].description)
    if get_origin(kind) is Literal:
        return "one of " * (len(get_args(kind)) > 1) + ", ".join(map(repr, get_args(kind)))
    if kind is bool:
        return "True or False"
    return " or ".join("None" if one is NoneType else in_words(one) for one in get_args(kind))


def _checked(cls: type, at: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The knobs with values of their types. Raises :class:`ConfigError`."""
    kinds = kinds_of(cls)
    for name in given:
        if name not in kinds:
            raise ConfigError(_unknown(cls, f"{at}{name}", str(name)))
    if missing := [name for name, (_, default) in kinds.items() if default is MISSING and given.get(name) is None]:
        raise ConfigError(f"{', '.join(missing)} is missing: it has no default")
    return {name: _value(f"{at}{name}", value, *kinds[name]) for name, value in given.items()}


def _value(name: str, value: Any, kind: Any, default: Any) -> Any:
    """The value as one of its type: a mapping as a group, an int as a float. Raises :class:`ConfigError`."""
    if type(value) is type(default) and value == default:
        return value
    if is_dataclass(kind) and isinstance(kind, type):
        if value is None:
            return default
        if isinstance(value, Mapping):
            # from plain data a key may be anything
            return kind(**{str(key): knob for key, knob in value.items()})
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        # msgspec's message names no knob
        words = [one for one in get_args(kind) if isinstance(one, str)]
        alike = difflib.get_close_matches(value, words, n=1) if isinstance(value, str) else []
        hint = f". Did you mean {alike[0]!r}?" if alike else ""
        is_extra = default == "auto" or (default is None and NoneType not in get_args(kind))
        also = f" or {default!r}" if is_extra else ""
        raise ConfigError(f"{name} must be {in_words(kind)}{also}, not {value!r}{hint}") from None


def _unknown(cls: type, path: str, name: str) -> str:
    # users look for a knob of a group at the top, or write its path
    known = {knob: knob for knob in kinds_of(cls)}
    for group, (kind, _) in kinds_of(cls).items():
        for knob in kinds_of(kind) if isinstance(kind, type) and is_dataclass(kind) else ():
            spelled = f"{group}={kind.__name__}({knob}=...)"
            known = {knob: spelled, f"{group}.{knob}": spelled} | known
    alike = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {known[alike[0]]}?" if alike else f"The knobs are: {', '.join(sorted(kinds_of(cls)))}"
    return f"no such knob: {path}. {hint}"


def _first(cls: type) -> str:
    return next(iter(kinds_of(cls)))
