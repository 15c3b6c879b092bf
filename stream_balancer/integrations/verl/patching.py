"""Our functions in the place of verl's, wherever verl has imported them; and verl's back again."""

from __future__ import annotations

from collections.abc import Callable

from stream_balancer.integrations.partitions import replace
from stream_balancer.integrations.verl import seqlen_balancing as ours


def patch() -> Callable[[], None]:
    """Put ``get_seqlen_balanced_partitions`` and ``rearrange_micro_batches`` into ``verl.utils.seqlen_balancing`` and
    into every module that imported them by name. Returns a function that puts verl's back.

    Once per process, on every rank and in the trainer process: ranks that disagree on the implementation would wait for
    each other in different collectives. Modules imported later get ours by themselves.
    """
    import verl.utils.seqlen_balancing as theirs

    undo = [replace(theirs, name, getattr(ours, name)) for name in ours.__all__]

    def put_back() -> None:
        for one in undo:
            one()

    return put_back
