"""Stubs for type checkers: of the names that ``stream_balancer`` imports when they are first used, and of the classes
that :func:`stream_balancer.facade.facade` makes. ``python tests/stubs.py`` writes them, and a test compares."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import stream_balancer as sb
from stream_balancer import facade
from stream_balancer.client import producer
from stream_balancer.host import blocking

FOLDER = Path(sb.__file__).parent
MADE: dict[type, type] = {
    facade.BlockingSlot: facade.Slot,
    facade.BlockingReservation: facade.Reservation,
    blocking.BlockingBatches: sb.Batches,
    producer.BlockingProducer: sb.Producer,
    blocking.BlockingBalancer: sb.StreamBalancer,
}
WRITTEN = "# Written by `python tests/stubs.py`.\n"
HEAD = """# ruff: noqa: E501

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

from stream_balancer.config import BalancerConfig
from stream_balancer.core.accept import Accept
from stream_balancer.core.diagnosis import RankState
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.facade import Facade
from stream_balancer.host.blocking import OwnLoop
from stream_balancer.host.journal import Recovered
from stream_balancer.host.recorder import Recorder
from stream_balancer.rollouts import Batch, EvictReason, Rollout
from stream_balancer.statistics import Statistics, Straggler
"""
RETURNS = {"Slot": "BlockingSlot", "Reservation": "BlockingReservation", "Batches": "BlockingBatches"}


def files() -> dict[Path, str]:
    """Text of each file."""
    facades = HEAD + "".join(stub(made, target) for made, target in MADE.items())
    homes = {("." + sb._MODULE_OF[name], name) for name in sb._MODULE_OF} | {(".", name) for name in sb._MODULES}
    names = "".join(f"from {home} import {name} as {name}\n" for home, name in sorted(homes))
    listed = "".join(f'    "{name}",\n' for name in sb.__all__)
    return {
        FOLDER / "facades.pyi": WRITTEN + facades,
        FOLDER / "__init__.pyi": f"{WRITTEN}\n{names}\n__version__: str\n__all__ = [\n{listed}]\n",
    }


def stub(made: type, target: type) -> str:
    lines = [f"\nclass {made.__name__}({made.__base__.__name__}):"]  # type: ignore[union-attr]
    if made is blocking.BlockingBalancer:  # its options, by name
        options = _parameters(target.__init__).removesuffix(")")  # type: ignore[misc]
        lines.append(f'    def __init__{options}, backend: Literal["asyncio", "trio"] = ...) -> None: ...')
    for name, member in vars(made).items():
        if name in ("__enter__", "__iter__", "__next__"):
            lines.append(f"    def {name}(self) -> {_special(target, name)}: ...")
        elif name == "__exit__":
            lines.append("    def __exit__(self, *exc: object) -> None: ...")
        elif isinstance(member, property):
            lines += ["    @property", f"    def {name}(self) -> {_returned(member.fget)}: ..."]
        elif inspect.isfunction(member) and not name.startswith("_"):
            lines.append(f"    def {name}{_parameters(member)} -> {_returned(member)}: ...")
    return "\n".join(lines) + "\n"


def _special(target: type, name: str) -> str:
    if name == "__iter__":
        return "Self"
    method = vars(target)["__aenter__" if name == "__enter__" else "__anext__"]
    return _returned(method)


def _parameters(member: Any) -> str:
    signature = inspect.signature(member).replace(return_annotation=inspect.Signature.empty)
    given = inspect.Parameter.empty
    bare = [one.replace(default=given if one.default is given else ...) for one in signature.parameters.values()]
    written = str(signature.replace(parameters=bare)).replace("Ellipsis", "...")
    return re.sub(r"'([^']*)'", r"\1", written)


def _returned(member: Any) -> str:
    annotation = str(inspect.signature(member).return_annotation).strip("'")
    return RETURNS.get(annotation, annotation)


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
