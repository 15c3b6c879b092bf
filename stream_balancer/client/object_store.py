"""Payloads in Ray's object store: what a producer puts there, and how a rank fetches it into its batch.

::

    worker   InStore   ray.put(rollouts of one put) --reference--> Keeper (an actor), so that Ray counts it
    rank     FromStore numbers --> Keeper --references--> ray.get: from this node's store, or over from another's

An object dies with the process that put it, and then no rank trains on what it held. Spilling, and one copy a node,
are Ray's. With a tensor transport (Ray Direct Transport), the same references are to memory of the worker, from which
``ray.get`` reads it into the rank, past both stores.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stream_balancer.client.payloads import SOURCES, KeepsPayloads
from stream_balancer.errors import BrokenResourceError, WouldBlock
from stream_balancer.net.loops import Io
from stream_balancer.rollouts import Rollout
from stream_balancer.wire.codec import Handle, Owner, Wanted, decode, encode_rollouts, payload_of

INLINE_BYTES = 2**16
"""Puts below that bring their tokens along: an object of Ray's costs more than they do."""
# rollouts of a put
_MAX_PLACES = 2**24
# a rank may ask for what a worker's call has not brought yet
_PUT_FIRST_S = 10.0
# a call to an actor costs it half a millisecond of CPU: references of puts within so long go in one
_GATHER_S = 0.02

# Ray makes a process's NIXL agent when it first needs it; two threads make two, and each lacks the other's memory
_one_agent = threading.Lock()
_log = logging.getLogger("stream_balancer.ray")


class Keeper:
    """The actor that holds references to what workers have put into the object store, for ranks."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], Any] = {}
        self._come = asyncio.Event()

    async def keep(self, owner: str, boxed: dict[int, list[Any]]) -> None:
        """``boxed``: references by number, each in a list, or Ray would send the objects themselves."""
        self._kept |= {(owner, number): box[0] for number, box in boxed.items()}
        self._come.set()
        # a new one: whoever waits looks again after each that comes
        self._come = asyncio.Event()

    async def give(self, owner: str, numbers: list[int]) -> list[Any]:
        """Boxed references; None for those that are not here and do not come."""
        try:
            async with asyncio.timeout(_PUT_FIRST_S):
                while not all((owner, number) in self._kept for number in numbers):
                    await self._come.wait()
        except TimeoutError:
            _log.warning("%s has announced payloads that have not come", owner)
        return [[found] if (found := self._kept.get((owner, number))) is not None else None for number in numbers]

    async def drop(self, owner: str, numbers: list[int]) -> None:
        """Payloads are not needed any more."""
        for number in numbers:
            self._kept.pop((owner, number), None)


class InStore(KeepsPayloads):
    """Payloads of one producer, in Ray's object store: what ``hand_over=`` of a producer takes. All rollouts of a put
    are one object; a key is the object's number and the rollout's place."""

    least_bytes = INLINE_BYTES
    blocks = True

    def __init__(self, keeper: Any, keeper_name: str, tensor_transport: str | None, label: str) -> None:
        """``tensor_transport``: as for :func:`stream_balancer.ray.host`."""
        super().__init__()
        self._transport = {} if tensor_transport is None else {"_tensor_transport": tensor_transport}
        self._keeper, self._name = keeper, secrets.token_hex(8)
        # what the keeper has not been told of: references, and numbers of objects that may go
        self._news: dict[int, list[Any]] = {}
        self._gone: list[int] = []
        self._lock = threading.Lock()
        self.owner = Owner(f"ray://{keeper_name}/{self._name}", b"", label)

    def keep(self, rollouts: Sequence[Rollout]) -> list[Handle]:
        """Put their bytes into the store of this node. Copies them twice, with a tensor transport once. Raises
        WouldBlock while the store is full."""
        import ray

        encoded = encode_rollouts(rollouts)
        # one array, which lies in the store in one piece
        memory = np.concatenate([np.frombuffer(piece, np.uint8) for piece in encoded.payload.views()])
        try:
            # transports carry tensors: anything else becomes an object in the store
            array = torch.from_numpy(memory) if self._transport else memory
            with _one_agent:
                reference = ray.put((bytes(encoded.header), array), **self._transport)
        except ray.exceptions.ObjectStoreFullError as error:
            raise WouldBlock(f"Ray's object store is full: {error}") from None
        number = next(self._keys)
        keys = range(number * _MAX_PLACES, number * _MAX_PLACES + len(rollouts))
        # an object holds all rollouts of a put: it may go when the last of them does
        shared = _StoredObject()
        weakref.finalize(shared, self._gone.append, number).atexit = False
        self._kept.update(dict.fromkeys(keys, shared))
        with self._lock:
            self._news[number] = [reference]
            first = len(self._news) == 1
        if first:
            io = Io.current()
            io.do(lambda: io.after(_GATHER_S, self._tell))
        return [Handle(self.owner, key) for key in keys]

    def drop(self, keys: Sequence[int]) -> None:
        """Payloads are not needed any more; an object goes with the last of its rollouts."""
        super().drop(keys)
        self._tell()

    def _tell(self) -> None:
        """The keeper, of what was put since it was told, and of what may go."""
        # one lock for both: a keeper that heard of an object after it may go would hold it for ever
        with self._lock:
            news, self._news = self._news, {}
            # one by one: other threads append meanwhile, without the lock
            gone = [self._gone.pop() for _ in range(len(self._gone))]
            # Ray was shut down, and the keeper with it
            with suppress(Exception):
                if news:
                    self._keeper.keep.remote(self._name, news)
                if gone:
                    self._keeper.drop.remote(self._name, gone)


class _StoredObject:
    """An object in the store, as the payloads in it have it in common."""


class _FromStore:
    """A rank's way to what one producer has in the object store."""

    def __init__(self, owner: Owner) -> None:
        where, _, self._owner = owner.address.removeprefix("ray://").rpartition("/")
        self._namespace, _, self._keeper = where.rpartition("/")

    def fetch(self, wanted: Sequence[Wanted], done: Callable[[Mapping[str, str]], object]) -> None:
        """In a thread: ``ray.get`` blocks, for as long as another node takes to send."""
        io = Io.current()

        def run() -> None:
            causes = self._fetched(wanted)
            io.do(lambda: done(causes))

        # one for each fetch: they would wait for each other's nodes
        threading.Thread(target=run, name="stream_balancer-ray", daemon=True).start()

    def close(self) -> None:
        """Nothing stays open."""

    def _fetched(self, wanted: Sequence[Wanted]) -> dict[str, str]:
        """Fills the places; why some could not be filled, by id."""
        try:
            # once for each object, however many of its rollouts are wanted
            boxes = self._boxes(list(dict.fromkeys(one.key // _MAX_PLACES for one in wanted)))
        except Exception as error:  # noqa: BLE001 - the step goes on without them
            return {one.rollout_id: f"Ray does not find it: {_short(error)}" for one in wanted}
        causes, opened = {}, dict[int, Sequence[Rollout]]()
        for one in wanted:
            number, at = divmod(one.key, _MAX_PLACES)
            try:
                if number not in opened:
                    opened[number] = _opened(boxes[number])
                one.fill(payload_of(opened[number][at]))
            except Exception as error:  # noqa: BLE001 - the step goes on without it
                causes[one.rollout_id] = _short(error)
        return causes

    def _boxes(self, numbers: list[int]) -> dict[int, list[Any] | None]:
        """Asks Ray once: it brings what lies on other nodes side by side."""
        import ray

        keeper = ray.get_actor(self._keeper, namespace=self._namespace or None)
        boxes = ray.get(keeper.give.remote(self._owner, numbers))
        if refs := [box[0] for box in boxes if box is not None]:
            # all at once, or each would be fetched from its node after the one before
            ray.wait(refs, num_returns=len(refs))
        return dict(zip(numbers, boxes, strict=True))


def _opened(box: list[Any] | None) -> Sequence[Rollout]:
    """Rollouts as they lie in this node's store, or as a tensor transport has brought them."""
    import ray

    if box is None:
        raise BrokenResourceError("it is not in the object store")
    # what Ray's store holds is here by now, so that nobody waits long for who comes before
    with _one_agent:
        header, memory = ray.get(box[0])
    array = memory.numpy() if isinstance(memory, Tensor) else np.asarray(_Writable(memory))
    return decode(header, array).rollouts


class _Writable:
    """The store's memory is read-only, which torch warns of at each view. It is only read here."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        at, _ = memory.__array_interface__["data"]
        self.__array_interface__ = {**memory.__array_interface__, "data": (at, False)}


def _short(error: BaseException) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]


SOURCES["ray"] = _FromStore
