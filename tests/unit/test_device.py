"""Copies to an accelerator: in which order, and how long the host's memory is kept. The accelerator is a fake, except
where there is a real one."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import numpy as np
import pytest
import torch
from codec_help import received
from scripted import Filled, same_rollout
from torch import Tensor

import stream_balancer as sb
from stream_balancer.client.device import Streams, Uploader
from stream_balancer.client.port import Arrived
from stream_balancer.net import messages
from stream_balancer.rollouts import Denominators, MicroBatch
from stream_balancer.testing import make_rollout
from stream_balancer.wire.codec import Decoded, decode, encode
from stream_balancer.wire.payload import Pool, aligned


class FakeEvent:
    done = False

    def query(self) -> bool:
        return self.done


class FakeStreams(Streams):
    """Remembers what it was asked; nothing is ever done before the test says so."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.events: list[FakeEvent] = []
        self.kept: list[Tensor] = []
        self.inside = False

    @contextmanager
    def side(self) -> Iterator[None]:
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def record(self) -> FakeEvent:  # type: ignore[override]
        assert self.inside, "the event must come behind the copy, on the same stream"
        self.events.append(FakeEvent())
        self.log.append("record")
        return self.events[-1]

    def wait(self, event: FakeEvent) -> None:  # type: ignore[override]
        self.log.append(f"wait {self.events.index(event)}")

    def keep(self, tensor: Tensor) -> None:
        self.kept.append(tensor)


@pytest.fixture
def streams() -> FakeStreams:
    return FakeStreams()


@pytest.fixture
def uploader(streams: FakeStreams) -> Uploader:
    return Uploader(torch.device("cpu"), streams)


class Work:
    """What a port does with the bytes of a message."""

    def __init__(self, step: int, uploader: Uploader, pool: Pool) -> None:
        encoded = encode(micro_batches_of(step))
        came = received(encoded)
        assert came is not None
        memory = pool.take(came.size)
        memory[:] = came
        self.decoded: Decoded = decode(encoded.header, memory)
        sizes = Denominators(2, 40_001, 40_001, 2)
        message = messages.Work(step, 1, (0,), 0, True, 1.0, sizes, header=encoded.header)
        self.arrived = Arrived(message, self.decoded, uploader)
        self.arrived.land()

    @property
    def memory(self) -> int:
        """Address of what its columns lie in, on the device."""
        return self.decoded.micro_batches[0].packed()["input_ids"].untyped_storage().data_ptr()


def micro_batches_of(step: int) -> tuple[MicroBatch, ...]:
    return tuple(MicroBatch.of([make_rollout(20_000 + n, f"{step}.{n}", seed=step)]) for n in range(2))


def assert_is_step(work: Work, step: int) -> None:
    for sent, got in zip(micro_batches_of(step), work.decoded.micro_batches, strict=True):
        assert all(same_rollout(a, b) for a, b in zip(sent.rollouts, got.rollouts, strict=True))


def test_work_is_copied_when_it_arrives_and_waited_for_when_it_is_taken(
    streams: FakeStreams, uploader: Uploader
) -> None:
    pool = Pool()
    works = [Work(step, uploader, pool) for step in range(2)]
    assert streams.log == ["record", "record"], "the next one does not wait for the one before to be taken"
    for step, work in enumerate(works):
        work.arrived.micro_batches(frozenset())
        assert_is_step(work, step)
    assert streams.log[2:] == ["wait 0", "wait 1"]
    kept = [tensor.untyped_storage().data_ptr() for tensor in streams.kept]
    assert kept == [work.memory for work in works], "kept is what it lies in"


def test_memory_returns_to_the_pool_only_when_its_copy_is_done(streams: FakeStreams, uploader: Uploader) -> None:
    made: list[int] = []

    def allocate(size: int) -> np.ndarray:
        made.append(size)
        return aligned(size)

    pool = Pool(allocate=allocate)
    work = Work(0, uploader, pool)
    work.arrived.micro_batches(frozenset())
    del work
    gc.collect()
    later = Work(1, uploader, pool)
    assert len(made) == 2, "the first copy may still be reading"
    streams.events[0].done = True
    last = Work(2, uploader, pool)
    assert len(made) == 3, "what is over is noticed when the next one comes"
    Work(3, uploader, pool)
    assert len(made) == 3
    del later, last


@pytest.fixture
def accelerator() -> torch.device:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None:
        pytest.skip("needs an accelerator")
    return found


@pytest.mark.accelerator
def test_a_feed_to_a_real_accelerator(accelerator: torch.device) -> None:
    got: dict[str, Tensor] = {}

    async def main() -> None:
        async with (
            sb.TorchTransport.listen(dp_size=1) as transport,
            Filled(20, 1, num_tokens=1000) as filled,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(sb.serve, filled.balancer, transport)
            feed = sb.RankFeed(transport.address, rank=0, dp_size=1, device=accelerator)
            async for step in feed:
                with feed.timed():
                    got.update((r.rollout_id, r.tokens["input_ids"]) for r in step.rollouts)

    anyio.run(main)
    assert len(got) == 80
    for name, column in got.items():
        step, number = map(int, name.split("."))
        assert column.device.type == accelerator.type
        assert torch.equal(column.cpu(), torch.arange(1000 + number % 2) + 1000 * step)
