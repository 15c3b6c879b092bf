"""Producers, ranks, controllers and worlds of ranks in processes of their own, and a balancer served on a port."""

from __future__ import annotations

import os
import signal
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import anyio
import torch
import torch.distributed as dist
from forked import forked, free_port, hear
from guard import GUARD_S
from helpers import attend
from scripted import Filled

import stream_balancer as sb

END = ("end", "")
Spec = tuple[Any, ...]


class Child:
    """``target(*args, pipe)`` in a process of its own, and what it says. As a context it is killed at its end."""

    def __init__(self, target: Callable[..., object], *args: Any, daemon: bool = True) -> None:
        self.process, self.pipe = forked(target, *args, daemon=daemon)

    def hear(self) -> Any:
        return hear(self.pipe)

    def told(self) -> list[Any]:
        """All it has said, once it has ended."""
        said = []
        try:
            while True:
                said.append(self.hear())
        except EOFError:
            self.process.join(GUARD_S)
        return said

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self.process.pid
        os.kill(self.process.pid, number)

    def leave(self) -> None:
        """Let it go, and see that it went well."""
        self.pipe.send("leave")
        self.process.join(GUARD_S)
        assert self.process.exitcode == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join(GUARD_S)
        self.pipe.close()


def is_running(pid: int) -> bool:
    """There, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children_of(pid: int) -> list[int]:
    """Its children, in the order they were started; none once they are children of another."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted({int(child) for task in tasks for child in task.read_text().split()})


def wait_until(condition: Callable[[], Any], otherwise: str) -> Any:
    """What ``condition`` says once that is true."""
    give_up = time.monotonic() + GUARD_S
    while not (said := condition()):
        assert time.monotonic() < give_up, otherwise
        time.sleep(0.05)
    return said


def world_of(size: int, job: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``job(rank, *args)`` returns on each rank of a gloo world."""
    port = free_port()
    ranks = [Child(_in_world, job, args, rank, size, port) for rank in range(size)]
    got = [rank.hear() for rank in ranks]
    for rank in ranks:
        rank.leave()
    return got


def _in_world(job: Callable[..., Any], args: Any, rank: int, size: int, port: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "RANK": str(rank)}
    dist.init_process_group("gloo")
    pipe.send(job(rank, *args))
    pipe.recv()  # nobody leaves while another is at work
    pipe.close()
    os._exit(0)  # a group whose collective has failed cannot be destroyed


@asynccontextmanager
async def served(
    serve: Callable[..., Awaitable[object]] = attend,
    *,
    listen: dict[str, Any] | None = None,
    guard_s: float = GUARD_S,
    **knobs: Any,
) -> AsyncIterator[tuple[sb.StreamBalancer, sb.TorchTransport]]:
    """To producers alone, until the test is through; with ``sb.serve`` to ranks too, until all is acknowledged.
    ``listen``: options of the transport."""
    config = sb.BalancerConfig(**{"dp_size": 1, "batch_size": 4, "window": 4, **knobs})
    with anyio.fail_after(guard_s):
        async with (
            sb.TorchTransport.listen(dp_size=config.dp_size, **(listen or {})) as transport,
            sb.StreamBalancer(config) as balancer,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(serve, balancer, transport)
            yield balancer, transport
            if serve is attend:
                tasks.cancel_scope.cancel()


def make(length: int, name: str, group: str | None = None, extra: str = "") -> sb.Rollout:
    """The rollout that a spec names, the same in every process."""
    tokens = {"input_ids": torch.arange(length) * 3 + len(name)}
    if extra == "rich":  # all that a rollout can have; columns in an order of each producer's own
        tokens = {"loss_mask": torch.arange(length) % 3 > 0, "logprobs": torch.arange(length) / len(name), **tokens}
        if zlib.crc32(name.encode()) % 2:
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


def fingerprint(rollout: sb.Rollout) -> tuple[Any, ...]:
    """All that must have arrived, in a few numbers."""
    columns = sorted((name, str(c.dtype), list(c.shape), _hash(c)) for name, c in rollout.tokens.items())
    tensors = sorted((name, str(t.dtype), list(t.shape), _hash(t)) for name, t in rollout.tensors.items())
    return columns, tensors, dict(rollout.scalars), rollout.metadata, rollout.num_loss_tokens, rollout.group_id


def given(filled: Filled, rank: int) -> list[tuple[int, Any]]:
    """What :func:`train` tells of all steps of a rank, as they were planned."""
    shares = [filled.share(step, rank) for step in range(filled.steps)]
    return [(one.step, {r.rollout_id: fingerprint(r) for r in one.rollouts}) for one in shares]


def _hash(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def names(rollouts: Iterable[sb.Rollout]) -> list[str]:
    return [r.rollout_id for r in rollouts]


class RemoteProducer(Child):
    """Puts these groups of specs one after the other, or for ever those that ``flood`` names; says how many it put, and
    stays until it is let go."""

    def __init__(
        self, address: str | None, groups: Sequence[list[Spec]] = (), flood: Spec | None = None, **options: Any
    ) -> None:
        super().__init__(_produce, address, groups, flood, options)


def _flood(name: str, length: int) -> Iterable[list[Spec]]:
    return ([(length, f"{name}.{n}.{i}", f"{name}.{n}") for i in range(2)] for n in range(10**6))


def _produce(address: str, groups: Sequence[list[Spec]], flood: Spec | None, options: Any, pipe: Any) -> None:
    torch.set_num_threads(1)

    async def main() -> None:
        async with sb.connect(address, **options) as producer:
            for specs in _flood(*flood) if flood else groups:
                rollouts = [make(*spec) for spec in specs]
                await (producer.put_group(rollouts) if len(rollouts) > 1 else producer.put(rollouts[0]))
            pipe.send(len(groups))
            await anyio.to_thread.run_sync(pipe.recv)

    anyio.run(main)


class Rank(Child):
    """A trainer's process. It tells (step, fingerprints by name) of each step, then ``END`` or an error's (type, text);
    neither if it is killed. ``join``: options of its feed."""

    def __init__(
        self, address: str | None, rank: int | None, dp_size: int | None = None, *, step_s: float = 0.0, **join: Any
    ) -> None:
        super().__init__(train, address, rank, dp_size, step_s, join)


def train(address: str, rank: int | None, dp_size: int | None, step_s: float, join: Any, pipe: Any) -> None:
    torch.set_num_threads(1)
    try:
        for batch in sb.RankFeed(address, rank=rank, dp_size=dp_size, **join):
            for mb in batch.micro_batches:
                packed = mb.packed()
                assert packed["input_ids"].equal(torch.cat([r.tokens["input_ids"] for r in mb.rollouts]))
            padding = [r for r in batch.rollouts if r.is_padding]
            assert all(not r.tokens["loss_mask"].any() for r in padding if "loss_mask" in r.tokens)
            real = {r.rollout_id: fingerprint(r) for r in batch.rollouts if not r.is_padding}
            time.sleep(step_s)
            pipe.send((batch.step, real))
            for mb in batch.micro_batches:
                mb.packed()["input_ids"].zero_()  # what a trainer does to its batch is its own business
        pipe.send(END)
    except Exception as error:
        pipe.send((type(error).__name__, str(error)))
