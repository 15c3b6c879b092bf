"""Meeting place of the demo's processes: a key-value store that the parent hosts."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from stream_balancer.demo.messages import Task

__all__ = ["FEED_NAME", "connect_store", "host_store", "join_trainers"]

FEED_NAME = "feed"
"""Prefix of the feed's keys."""

_HOST = "127.0.0.1"


def host_store() -> tuple[Store, int]:
    """A store on any free port, and the port. It lives as long as the returned object."""
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    return store, store.port


def connect_store(task: Task) -> Store:
    """The parent's store, from a child."""
    store: Store = TCPStore(_HOST, task.store_port, is_master=False, timeout=timedelta(minutes=2))
    return store


def join_trainers(task: Task, store: Store) -> None:
    """The ranks' own process group, for their gradients. The controller has no part in it."""
    assert task.rank is not None
    trainers = PrefixStore("trainers", store)
    dist.init_process_group("gloo", store=trainers, rank=task.rank, world_size=task.options.ranks)
