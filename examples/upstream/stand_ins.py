"""A pytest plugin, and an import: packages named in UPSTREAM_ABSENT get a stand-in, or with a minus cannot be imported.

For packages that need a GPU, whose names a module wants when it is loaded and a test never uses.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

NAMES = [name for name in os.environ.get("UPSTREAM_ABSENT", "").split(",") if name]


class _Anything(type):
    """A class whose attributes, calls and subclasses are fine."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()

    def __call__(cls, *args: Any, **options: Any) -> Any:
        # a decorator leaves what it is given
        return args[0] if len(args) == 1 and callable(args[0]) and not options else MagicMock()


class StandIn(metaclass=_Anything):
    """A class to derive from."""

    def __class_getitem__(cls, _: Any) -> Any:
        return cls


class _Module(ModuleType):
    __version__ = "99.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = name.partition(".")[0]
        if f"-{package}" in NAMES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return ModuleSpec(name, self, is_package=True) if package in NAMES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


if NAMES:
    sys.meta_path.insert(0, _Finder())
