"""A barrier that names no device: on a gloo CPU group of its own, after the accelerator is done.

``torch.distributed.barrier()`` in an NCCL group is a collective on a device, which it guesses unless it is given; a
wrong guess hangs (AReaL #607).
"""

from __future__ import annotations

import itertools
import weakref
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from stream_balancer.errors import BrokenResourceError
from stream_balancer.facade import refuse_in_event_loop
from stream_balancer.net.address import current_world

# its options are missing from torch's type stubs
_Gloo = cast("Any", dist).ProcessGroupGloo
_NO_EXPIRY = timedelta(days=3650)
# how often a group of these ranks has been made
_numbers: dict[tuple[int, ...], itertools.count[int]] = {}
_cpu_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def barrier(group: dist.ProcessGroup | None = None, *, timeout_s: float = 1800.0) -> None:
    """Return once every process of ``group`` (default: the world) has called this, and each one's accelerator, if it
    has any, has finished what was enqueued before. Blocks the thread.

    The CPU group is made at the first call, which all processes of ``group`` must make, and kept as long as ``group``
    is. Raises BrokenResourceError when not all have come within ``timeout_s`` (rank 0 of the group names the missing
    ones) or one died; the CPU group is then broken for good, so end the process. Raises ValueError before
    init_process_group and for a ``timeout_s`` that is not positive.
    """
    if not 0 < timeout_s < _NO_EXPIRY.total_seconds():
        raise ValueError(f"timeout_s must be positive and finite, not {timeout_s}")
    if not dist.is_initialized():
        raise ValueError("barrier() needs torch.distributed: call init_process_group first")
    refuse_in_event_loop("barrier()", "There, use `await asyncio.to_thread(sb.barrier)`")
    if torch.accelerator.is_available():
        # a process that has come here must be through with its device, or the barrier says nothing of it
        torch.accelerator.synchronize()
    try:
        cpu_group = _cpu_group(dist.group.WORLD if group is None else group)
        # True: name all that are missing
        cpu_group.monitored_barrier(timedelta(seconds=timeout_s), True)
    except RuntimeError as error:
        raise BrokenResourceError(
            f"barrier: not every process came within {timeout_s:g} s, or one of them died: {error}. Look at what the "
            "missing ranks were doing, and restart"
        ) from error


def _cpu_group(whole: Any) -> Any:
    """A gloo group of the same processes. Not by ``new_group``: that is a collective of the whole world."""
    found = _cpu_groups.get(whole)
    if found is None:
        ranks = tuple(dist.get_process_group_ranks(whole))
        # in the name: a group that is made again must not meet the keys of the one before
        number = next(_numbers.setdefault(ranks, itertools.count()))
        name = f"stream_balancer/barrier/{number}/{'.'.join(map(str, ranks))}"
        options = _Gloo._Options()
        # monitored_barrier has a timeout of its own; one of the pairs would break them
        options._timeout = _NO_EXPIRY
        options._devices = [_Gloo.create_default_device()]
        store = PrefixStore(name, current_world()[0])
        found = _cpu_groups[whole] = _Gloo(store, ranks.index(dist.get_rank()), len(ranks), options)
    return found
