"""Texts of dataclass fields, for ``help()``: what stands below each field in the source.

Python drops the string below a field; editors and the documentation site read it from the source, ``help()`` cannot.
:func:`documented` appends those strings to the class docstring when it is first read, so that importing costs nothing
and there is one text. Where the source is not there (an archive of .pyc files) the docstring stays as it was.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from functools import cache
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T", bound=type)


def documented(cls: T) -> T:
    """Class decorator, above ``@dataclass``: ``help()`` shows the text of every field."""
    setattr(cls, "__doc__", _Docstring(cls.__doc__, brief=False))  # noqa: B010 - not a str, as type checkers want it
    return cls


def briefly_documented(cls: T) -> T:
    """Like :func:`documented`, with the first sentence of every text, so that many fields fit on a screen."""
    setattr(cls, "__doc__", _Docstring(cls.__doc__, brief=True))  # noqa: B010 - see documented
    return cls


class _Docstring:
    """``cls.__doc__``, made when asked for, since parsing takes milliseconds."""

    def __init__(self, text: str | None, *, brief: bool) -> None:
        self._text, self._brief = text, brief
        self._made: str | None = None

    def __get__(self, instance: object, owner: type) -> str | None:
        if self._made is None and self._text is not None:
            self._made = described(owner, self._text, brief=self._brief)
        return self._made


def described(cls: type, text: str, *, brief: bool = False) -> str:
    """A docstring with the texts below the fields, or ``brief``: the first sentence of each, on one line."""
    found = texts_below_fields(cls)
    entries = [f"{name}:\n{textwrap.indent(text, '    ')}" for name, text in found.items()]
    if brief:
        entries = [f"{name}: {first_sentence(text)}" for name, text in found.items()]
    fields = "\n\nFields:\n\n" + textwrap.indent("\n".join(entries), "    ")
    return inspect.cleandoc(text) + fields * bool(found)


def first_sentence(text: str) -> str:
    return re.split(r"(?<=[^.]\.) ", " ".join(text.replace("``", "").split()))[0]


def texts_below_fields(cls: type) -> dict[str, str]:
    """Text of each public field of a dataclass, in order, those of its bases first; empty where the source is not
    there."""
    found: dict[str, str] = {}
    for declaring in reversed(cls.__mro__):
        if "__dataclass_fields__" in vars(declaring):
            found |= _texts_in(declaring)
    return found


@cache
def _texts_in(cls: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return {}
    (declared,) = tree.body
    assert isinstance(declared, ast.ClassDef)
    found = {}
    for pair in pairwise(declared.body):
        match pair:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))) if not name.startswith("_"):
                found[name] = inspect.cleandoc(text)
    return found
