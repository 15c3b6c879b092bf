"""Our functions in the place of verl's, wherever verl has imported them; and verl's back again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from stream_balancer.integrations.partitions import replace
from stream_balancer.integrations.verl import seqlen_balancing as ours

__all__ = ["patch", "unpatch"]

_put_back: list[Callable[[], None]] = []
"""Functions that bring verl's own back, while ours are in their place."""


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

    # a second patch would take ours for verl's own, and bring it back at the end
    if not _put_back:
        _put_back.extend(replace(theirs, name, getattr(ours, name)) for name in ours.__all__)
    return _Patched()


def unpatch() -> None:
    """verl's own functions again, everywhere. Does nothing if they are there."""
    while _put_back:
        _put_back.pop()()
