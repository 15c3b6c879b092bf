"""Our functions in the place of verl's, wherever verl has imported them; and verl's back again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from stream_balancer.integrations.verl import seqlen_balancing as ours

__all__ = ["patch", "unpatch"]

_theirs: dict[str, Callable[..., Any]] = {}
"""verl's own functions by name, while ours are in their place."""


class _Patched(AbstractContextManager[None]):
    def __exit__(self, *_: object) -> None:
        unpatch()


def patch() -> AbstractContextManager[None]:
    """Put ``get_seqlen_balanced_partitions`` and ``rearrange_micro_batches`` into ``verl.utils.seqlen_balancing`` and
    into every module that imported them by name.

    From then on, or only inside ``with patch():``. Once per process, on every rank and in the trainer process: ranks
    that disagree on the implementation would wait for each other in different collectives. Modules imported later get
    ours by themselves. Calling it again does nothing.
    """
    import verl.utils.seqlen_balancing as theirs

    if not _theirs:
        _theirs.update({name: getattr(theirs, name) for name in ours.__all__})
        for name, function in _theirs.items():
            _replace(name, function, getattr(ours, name))
    return _Patched()


def unpatch() -> None:
    """verl's own functions again, everywhere. Does nothing if they are there."""
    for name, function in _theirs.items():
        _replace(name, getattr(ours, name), function)
    _theirs.clear()


def _replace(name: str, old: Callable[..., Any], new: Callable[..., Any]) -> None:
    own_package = __package__ or ""
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith(own_package) and getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)
