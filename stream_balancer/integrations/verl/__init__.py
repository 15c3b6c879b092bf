"""verl: its partitioner and micro-batch former, its replay buffer. See docs/verl.md.

Importing this needs no verl; calling does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from stream_balancer.integrations.partitions import get_seqlen_balanced_partitions, replace
from stream_balancer.integrations.verl.seqlen_balancing import rearrange_micro_batches

__all__ = ["get_seqlen_balanced_partitions", "patch", "rearrange_micro_batches"]


def patch() -> Callable[[], None]:
    """Put both functions into ``verl.utils.seqlen_balancing`` and into every module that imported them by name. Returns
    a function that puts verl's back.

    Once per process, on every rank and in the trainer process: ranks that disagree on the implementation would wait for
    each other in different collectives. Modules imported later get ours by themselves.
    """
    import verl.utils.seqlen_balancing as theirs

    undo = ExitStack()
    for ours in (get_seqlen_balanced_partitions, rearrange_micro_batches):
        undo.callback(replace(theirs, ours.__name__, ours))
    return undo.close
