"""Classes of knobs: frozen values that are checked when they are made, against the kinds that stand at their fields."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    Literal,
    Never,
    NoReturn,
    TypeAlias,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from stream_balancer.errors import ConfigError
from stream_balancer.field_docs import described, texts_below_fields

Given = TypeVar("Given", contravariant=True)
Read = TypeVar("Read", covariant=True)
T = TypeVar("T")

if TYPE_CHECKING:

    class Knob(Generic[Given, Read]):
        """A knob that may be given as more than what it is read as, once the others are known."""

        def __get__(self, config: object, owner: object) -> Read: ...
        def __set__(self, config: object, value: Given) -> None: ...

    Group: TypeAlias = Knob[T | Mapping[str, Any] | None, T]
else:
    # what is given is what is checked
    Knob = type("Knob", (), {"__class_getitem__": lambda _, kinds: kinds[0]})
    Group = type("Group", (), {"__class_getitem__": lambda _, kind: kind})

Count: TypeAlias = Annotated[int, Meta(ge=1, description="an int >= 1")]


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class Values(type):
    """Type of the classes of knobs, which it makes dataclasses. A knob whose kind is such a class is a group, and may
    be given as a mapping."""

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> None:
        super().__init__(name, bases, namespace)
        made: Any = cls
        dataclass(frozen=True, kw_only=True, repr=False, match_args=False)(made)
        made.__repr__, made.__setattr__ = _shown, _refuse_to_set
        hints = get_type_hints(cls, include_extras=True)
        cls._kinds: dict[str, Any] = {one.name: hints[one.name] for one in fields(made) if one.init}
        """Type of each knob, as msgspec judges it."""
        cls._groups: dict[str, Values] = {knob: kind for knob, kind in cls._kinds.items() if isinstance(kind, Values)}
        """Knobs that are groups."""
        cls._at = ""
        """Where its knobs are found in a config."""
        # a message about a knob of a group names it by its path
        for group, kind in cls._groups.items():
            kind._at = f"{group}."
        cls._required = {one.name for one in fields(made) if one.init and one.default is MISSING}

    if not TYPE_CHECKING:  # type checkers know the knobs

        def __call__(cls, /, **knobs):
            return cls.of(knobs)

    def of(cls, knobs: Mapping[Any, Any]) -> Any:
        """A value of the class. Raises :class:`ConfigError`."""
        for name in knobs:
            if name not in cls._kinds:
                raise ConfigError(cls._unknown(str(name)))
        # None stands for a group of defaults
        given = {name: value for name, value in knobs.items() if value is not None or name not in cls._groups}
        for name in cls._groups.keys() & given.keys():
            if isinstance(given[name], Mapping):
                given[name] = cls._groups[name].of(given[name])
        if missing := cls._required - given.keys():
            raise ConfigError(f"{', '.join(missing)} is missing: it has no default")
        values = {name: _checked(f"{cls._at}{name}", value, cls._kinds[name]) for name, value in given.items()}
        return super().__call__(**values)

    def _unknown(cls, name: str) -> str:
        # a knob is often looked for at the top although it is in a group, or by the last part of its name
        within = [(group, kind, knob) for group, kind in cls._groups.items() for knob in kind._kinds]
        spelled = {f"{group}.{knob}": f"{group}={kind.__name__}({knob}=...)" for group, kind, knob in within}
        known = {path.partition(".")[2]: text for path, text in spelled.items()} | spelled
        known |= {knob: knob for knob in cls._kinds}
        alike = difflib.get_close_matches(name, known, n=1)
        hint = f"Did you mean {known[alike[0]]}?" if alike else f"The knobs are: {', '.join(sorted(cls._kinds))}"
        return f"no such knob: {cls._at}{name}. {hint}"

    # -- help() ----------------------------------------------------------------------------------------------------

    @property
    def __doc__(cls) -> str:  # type: ignore[override]
        """The docstring and the texts below the fields; only their first sentences where there are groups, so that all
        knobs fit on a screen."""
        text: str = vars(cls)["__doc__"]
        # dataclass() only asks whether there is one, and to read the source takes milliseconds
        return described(cls, text, brief=bool(cls._groups)) if "_kinds" in vars(cls) else text

    @property
    def __signature__(cls) -> inspect.Signature:
        # help() would print every annotation, and no screen would hold them
        (_, *knobs) = inspect.signature(vars(cls)["__init__"]).parameters.values()
        return inspect.Signature([knob.replace(annotation=knob.empty) for knob in knobs])

    def __dir__(cls) -> list[str]:  # help() shows what is listed here
        shown = set(super().__dir__()) - vars(cls)["__dataclass_fields__"].keys()
        return [name for name in shown if not name.startswith("_")]


def knob_at(cls: Values, path: str) -> tuple[Any, str, Any]:
    """Kind, text and default of a knob; that of a group has a dot in its path."""
    group, _, name = path.rpartition(".")
    owner = cls._groups[group] if group else cls
    return owner._kinds[name], texts_below_fields(owner)[name], vars(owner)["__dataclass_fields__"][name].default


def _checked(name: str, value: Any, kind: Any) -> Any:
    """The value as one of this kind: a list as a tuple, an int as a float. Raises :class:`ConfigError`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        # msgspec's message has its own words, ours says what the knob must be
        words = [one for one in get_args(kind) if isinstance(one, str)]
        alike = difflib.get_close_matches(value, words, n=1) if isinstance(value, str) else []
        hint = f". Did you mean {alike[0]!r}?" if alike else ""
        raise ConfigError(f"{name} must be {in_words(kind)}, not {value!r}{hint}") from None


def in_words(kind: Any) -> str:
    """A kind as a message has it."""
    if isinstance(kind, Values):
        return f"{kind.__name__}(...), or a mapping with some of {', '.join(kind._kinds)}"
    if get_origin(kind) is Annotated:
        return str(kind.__metadata__[0].description)
    if get_origin(kind) is Literal:
        return "one of " * (len(get_args(kind)) > 1) + ", ".join(map(repr, get_args(kind)))
    if kind is bool:
        return "True or False"
    return " or ".join("None" if one is NoneType else in_words(one) for one in get_args(kind))


def _shown(self: Any) -> str:
    """Only what differs from the defaults: six groups would fill a screen."""
    differ = (
        (one.name, value) for one in fields(self) if one.repr and (value := getattr(self, one.name)) != one.default
    )
    return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in differ)})"


def _refuse_to_set(self: Any, name: str, value: Never) -> NoReturn:
    raise FrozenInstanceError(f"{name} cannot be set: use replace(), or reconfigure() of the balancer")
