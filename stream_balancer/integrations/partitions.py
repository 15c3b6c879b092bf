"""The partition seam of verl, slime, ROLL, OpenRLHF and TransferQueue: ``get_seqlen_balanced_partitions``.

All carry the same function, with the same Karmarkar-Karp behind it. Here is ours with their signature, and a patch
that puts it in theirs::

    import openrlhf.utils.seqlen_balancing
    from stream_balancer.integrations.partitions import patch

    patch(openrlhf.utils.seqlen_balancing)      # once, before training, in every process that partitions

Only the seam: the partition itself is ``planning.split``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from stream_balancer import planning
from stream_balancer.integrations._plans import UnplannableError

__all__ = ["get_seqlen_balanced_partitions", "patch", "replace"]

_NAME = "get_seqlen_balanced_partitions"


def get_seqlen_balanced_partitions(
    seqlen_list: ArrayLike, k_partitions: int, equal_size: bool = False
) -> list[list[int]]:
    """Indices of ``seqlen_list`` in ``k_partitions`` ascending lists whose sums are alike; none is empty.

    ``seqlen_list``: [n] lengths or any other work, finite and >= 0. ``equal_size``: every list has the same number of
    indices. Deterministic: every process that asks gets the same answer.

    Raises UnplannableError (a ValueError, and an AssertionError as the original's) if there are fewer items than
    partitions, or if ``equal_size`` and the number of items is not a multiple of the number of partitions; ValueError
    for work that is not finite and >= 0.
    """
    work = np.asarray(seqlen_list, dtype=np.float64)
    if work.size < k_partitions:
        raise UnplannableError(
            f"{work.size} items cannot fill {k_partitions} partitions. Give at least one each: a larger batch, or "
            "fewer ranks or micro-batches"
        )
    if equal_size and work.size % k_partitions:
        raise UnplannableError(
            f"{work.size} items cannot be split equally over {k_partitions} partitions. Pad or trim the batch to a "
            "multiple, or pass equal_size=False"
        )
    shares = planning.split(work, k_partitions, equal_rollouts=equal_size)
    return [share.tolist() for share in shares]


def patch(module: ModuleType) -> Callable[[], None]:
    """Put our function in place of ``module``'s, and of every copy that modules loaded so far have imported by name.

    Returns a function that puts the original back. Patch in every process that partitions, before it imports more:
    afterwards they find ours. Raises AttributeError if ``module`` has no ``get_seqlen_balanced_partitions``.
    """
    return replace(module, _NAME, get_seqlen_balanced_partitions)


def replace(module: ModuleType, name: str, new: Callable[..., Any]) -> Callable[[], None]:
    """``new`` in place of ``module``'s function of that name, and of every copy of it in modules loaded so far.

    Returns a function that puts the original back there, and in modules of ``module``'s package that came to have
    ``new`` since.
    """
    old = getattr(module, name)
    package = module.__name__.partition(".")[0]
    # by identity: another project may have a function of this name
    holders = [label for label, function in _loaded(name) if function is old]
    for label in holders:
        setattr(sys.modules[label], name, new)

    # modules imported since then have taken ours by name
    def put_back() -> None:
        for label, function in _loaded(name):
            if function is new and (label in holders or label.partition(".")[0] == package):
                setattr(sys.modules[label], name, old)

    return put_back


def _loaded(name: str) -> list[tuple[str, object]]:
    """Functions of this name in all loaded modules; lazy ones are not loaded."""
    return [(label, getattr(module, "__dict__", {}).get(name)) for label, module in list(sys.modules.items())]
