"""A producer in a process of its own that does what a test tells it, one order at a time."""

from __future__ import annotations

import os
import signal
import time
import zlib
from collections.abc import Sequence
from typing import Any, Self

import anyio
import torch
from forked import forked, hear
from guard import GUARD_S

import stream_balancer as sb

Spec = tuple[Any, ...]


def make(length: int, name: str, group: str | None = None, extra: str = "") -> sb.Rollout:
    """The rollout an order names; both sides make it alike."""
    tokens = {"input_ids": torch.arange(length) * 3 + len(name)}
    if extra == "rich":  # all that a rollout can have; columns in an order of each producer's own
        tokens = {"loss_mask": torch.arange(length) % 3 > 0, "logprobs": torch.arange(length) / len(name), **tokens}
        if hash_of(name) % 2:
            tokens = dict(reversed(tokens.items()))
        return sb.Rollout(
            tokens=tokens,
            scalars={"reward": float(length)},
            tensors={"pixels": torch.full((length % 3, 2), float(length)), "grid": torch.tensor(length)},
            metadata={"name": name},
            rollout_id=name,
            group_id=group,
        )
    if extra == "column":
        tokens["advantages"] = torch.ones(length)
    return sb.Rollout(tokens=tokens, rollout_id=name, group_id=group, is_padding=extra == "padding")


def hash_of(name: str) -> int:
    """The same in every process."""
    return zlib.crc32(name.encode())


def verdict_of(error: BaseException | None) -> tuple[str, str]:
    """(type, text) of an error, to compare across processes."""
    return ("accepted", "") if error is None else (type(error).__name__, str(error))


async def _put(producer: sb.Producer, spec: Spec) -> tuple[str, str]:
    try:
        await producer.put(make(*spec))
    except Exception as error:
        return verdict_of(error)
    return "accepted", ""


async def _obey(producer: sb.Producer, order: str, args: tuple[Any, ...], tasks: Any, ended: list[Any]) -> object:
    if order == "put":
        return await _put(producer, *args)
    if order == "start":  # a put in the background

        async def background() -> None:
            ended.append((args[0][1], *await _put(producer, args[0])))

        tasks.start_soon(background)
        return None
    if order == "ended":
        while len(ended) < args[0]:
            await anyio.sleep(0.002)
        return list(ended)
    calls = {
        "group": lambda: producer.put_group([make(*spec) for spec in args[0]]),
        "nowait": lambda: producer.put_nowait(make(*args[0])),
        "blocking": lambda: anyio.to_thread.run_sync(lambda: producer.blocking.put(make(*args[0]), timeout_s=args[1])),
        "close": producer.aclose,
    }
    try:
        awaitable = calls[order]()
        if awaitable is not None:
            await awaitable
    except Exception as error:
        return verdict_of(error)
    return "accepted", ""


def _main(address: str, backend: str, options: dict[str, Any], pipe: Any) -> None:
    torch.set_num_threads(1)

    async def main() -> None:
        ended: list[Any] = []
        async with sb.connect(address, **options) as producer, anyio.create_task_group() as tasks:
            while True:
                order, *args = await anyio.to_thread.run_sync(pipe.recv)
                if order == "leave":
                    tasks.cancel_scope.cancel()
                    break
                if order == "flood":  # until killed
                    for n in range(10**6):
                        names = [f"{args[0]}.{n}.{i}" for i in range(2)]
                        await producer.put_group([make(args[1], name, f"{args[0]}.{n}") for name in names])
                pipe.send(await _obey(producer, order, tuple(args), tasks, ended))

    anyio.run(main, backend=backend)


class RemoteProducer:
    """The test's end. ``with RemoteProducer(address) as remote: remote.do("put", (5, "a"))``."""

    def __init__(self, address: str | None, *, backend: str = "asyncio", **options: Any) -> None:
        self.process, self.pipe = forked(_main, address, backend, options)

    async def do(self, *order: Any) -> Any:
        """Give an order and wait for what comes of it."""
        self.tell(*order)
        return await anyio.to_thread.run_sync(self.answer)

    def tell(self, *order: Any) -> None:
        self.pipe.send(order)

    def answer(self) -> Any:
        return hear(self.pipe)

    def kill(self) -> None:
        assert self.process.pid
        os.kill(self.process.pid, signal.SIGKILL)

    def leave(self) -> None:
        """Let it go, and see that it went well."""
        self.tell("leave")
        self.process.join(GUARD_S)
        assert self.process.exitcode == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(GUARD_S)
        self.pipe.close()


def fingerprint(rollout: sb.Rollout) -> tuple[Any, ...]:
    """All that must have arrived, in a few numbers."""
    columns = sorted((name, str(c.dtype), list(c.shape), _hash(c)) for name, c in rollout.tokens.items())
    tensors = sorted((name, str(t.dtype), list(t.shape), _hash(t)) for name, t in rollout.tensors.items())
    return columns, tensors, dict(rollout.scalars), rollout.metadata, rollout.num_loss_tokens, rollout.group_id


def _hash(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def run_rank(
    address: str, rank: int, dp_size: int, incarnation: int, step_s: float, movers: Sequence[str] | None, pipe: Any
) -> None:
    """A trainer: tells every step it has done, and how it ended."""
    torch.set_num_threads(1)
    try:
        feed = sb.RankFeed(address, rank=rank, dp_size=dp_size, incarnation=incarnation, movers=movers)
        for batch in feed:
            for mb in batch.micro_batches:
                packed = mb.packed()
                assert packed["input_ids"].equal(torch.cat([r.tokens["input_ids"] for r in mb.rollouts]))
            padding = [r for r in batch.rollouts if r.is_padding]
            assert all(not r.tokens["loss_mask"].any() for r in padding if "loss_mask" in r.tokens)
            real = {r.rollout_id: fingerprint(r) for r in batch.rollouts if not r.is_padding}
            time.sleep(step_s)
            pipe.send((batch.step, real))
        pipe.send(("end", ""))
    except Exception as error:
        pipe.send(verdict_of(error))


class Rank:
    """A rank's process, and what it has told."""

    def __init__(
        self,
        address: str | None,
        rank: int,
        dp_size: int,
        incarnation: int = 0,
        step_s: float = 0.0,
        movers: Sequence[str] | None = None,
    ) -> None:
        self.process, self.pipe = forked(run_rank, address, rank, dp_size, incarnation, step_s, movers)

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self.process.pid
        os.kill(self.process.pid, number)

    def told(self) -> list[Any]:
        """All it has said, once it has ended: steps, then ("end", "") or an error's (type, text); neither if killed."""
        said = []
        try:
            while True:
                said.append(hear(self.pipe))
        except EOFError:
            self.process.join(GUARD_S)
        return said


def run_controller(capacity: int, pipe: Any) -> None:
    """A controller in a process of its own, to be killed."""

    async def main() -> None:
        config = sb.BalancerConfig(dp_size=1, batch_size=4, window=4, capacity=capacity)
        async with sb.TorchTransport.listen(dp_size=1) as transport, sb.StreamBalancer(config) as balancer:
            pipe.send(transport.address)
            await sb.serve(balancer, transport)

    anyio.run(main)


def start_controller(capacity: int) -> tuple[Any, str]:
    """The process and its address."""
    process, pipe = forked(run_controller, capacity)
    return process, hear(pipe)


def names(rollouts: Sequence[sb.Rollout]) -> list[str]:
    return [r.rollout_id for r in rollouts]
