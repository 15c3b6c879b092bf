"""Copies to an accelerator: in which order, and how long the host's memory is kept. The accelerator is a fake, except
where there is a real one."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import pytest
import torch
from scripted import make_batch, same_rollout
from stream_balancer.rank.device import Pace, Uploader, stopwatch_on
from stream_balancer.testing.transports import ScriptedBalancer
from stream_balancer.transport.buffers import BufferPool
from stream_balancer.wire.messages import Batch
from torch import Tensor

import stream_balancer as sb
from stream_balancer.types import MicroBatch, RankBatch, Rollout
from stream_balancer.wire import rank_batch as wire


class FakeEvent:
    done = False

    def query(self) -> bool:
        return self.done


class FakeStreams:
    """Remembers what it was asked; nothing is ever done before the test says so."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.events: list[FakeEvent] = []
        self.kept: list[Tensor] = []
        self.inside = False

    @contextmanager
    def side(self) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False

    def record(self) -> FakeEvent:
        assert self.inside, "the event must come behind the copy, on the same stream"
        self.events.append(FakeEvent())
        self.log.append("record")
        return self.events[-1]

    def wait(self, event: FakeEvent) -> None:
        self.log.append(f"wait {self.events.index(event)}")

    def keep(self, tensor: Tensor) -> None:
        self.kept.append(tensor)


@pytest.fixture
def streams() -> FakeStreams:
    return FakeStreams()


@pytest.fixture
def uploader(streams: FakeStreams) -> Uploader:
    return Uploader(torch.device("cpu"), streams)


def arrive(step: int, pool: BufferPool) -> tuple[Batch, Tensor]:
    encoded = wire.encode(make_batch(step, 1, num_tokens=1000).ranks[0])
    buffer = pool.lend(encoded.message.total_bytes)
    for _ in encoded.fill(buffer):
        pass
    return encoded.message, buffer


def assert_is_step(batch: RankBatch, step: int) -> None:
    sent = make_batch(step, 1, num_tokens=1000).ranks[0]
    assert all(same_rollout(a, b) for a, b in zip(sent.rollouts, batch.rollouts, strict=True))


def test_a_batch_is_copied_when_it_arrives_and_waited_for_when_it_is_taken(
    streams: FakeStreams, uploader: Uploader
) -> None:
    pool = BufferPool(keep=4)
    batches = [uploader.decode(*arrive(step, pool)) for step in range(2)]
    assert streams.log == ["record", "record"], "the next batch does not wait for the one before to be taken"
    for step, batch in enumerate(batches):
        uploader.hand_over(batch)
        assert_is_step(batch, step)
    assert streams.log[2:] == ["wait 0", "wait 1"]
    for batch, kept in zip(batches, streams.kept, strict=True):
        ids = batch.micro_batches[0].packed()["input_ids"]
        assert kept.untyped_storage().data_ptr() == ids.untyped_storage().data_ptr(), "kept is what the batch lies in"


def test_parts_of_one_step_are_each_waited_for_and_kept(streams: FakeStreams, uploader: Uploader) -> None:
    """What a rank takes over of others comes under the number of the step that it has."""
    pool = BufferPool(keep=4)
    parts = [uploader.decode(*arrive(0, pool)) for _ in range(2)]
    for part in parts:
        uploader.hand_over(part)
        uploader.hand_over(part)  # after an interrupt
    assert sorted(set(streams.log[2:])) == ["wait 0", "wait 1"]
    kept = {tensor.untyped_storage().data_ptr() for tensor in streams.kept}
    assert kept == {part.micro_batches[0].packed()["input_ids"].untyped_storage().data_ptr() for part in parts}
    assert not uploader._arrived


def test_a_buffer_returns_to_the_pool_only_when_its_copy_is_done(streams: FakeStreams, uploader: Uploader) -> None:
    pool = BufferPool(keep=4)
    batch = uploader.decode(*arrive(0, pool))
    uploader.hand_over(batch)
    del batch
    gc.collect()
    assert not pool.num_idle, "the copy may still be reading it"
    later = uploader.decode(*arrive(1, pool))
    assert not pool.num_idle
    streams.events[0].done = True
    uploader.hand_over(later)
    assert pool.num_idle == 1
    streams.events[1].done = True
    uploader.decode(*arrive(2, pool))
    assert pool.allocated_bytes == 2 * 2**20, "two buffers for three batches"


def test_only_what_travelled_is_copied(streams: FakeStreams, uploader: Uploader) -> None:
    frame, buffer = arrive(0, BufferPool(keep=1))
    assert frame.total_bytes > frame.wire_bytes, "columns that travel narrowed are widened on the device"
    buffer[frame.wire_bytes :] = 255
    assert_is_step(uploader.decode(frame, buffer), 0)


def test_a_damaged_buffer_leaves_nothing_behind(streams: FakeStreams, uploader: Uploader) -> None:
    frame, buffer = arrive(0, BufferPool(keep=1))
    buffer[3] ^= 1
    with pytest.raises(wire.WireError):
        uploader.decode(frame, buffer)
    assert not streams.log
    assert not uploader._arrived
    assert not uploader._reading


class TimingEvent:
    """A point on a clock that the test moves."""

    now_ms = 0.0

    def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at: float | None = None
        self.over = False

    def record(self) -> None:
        self.at = TimingEvent.now_ms

    def synchronize(self) -> None:
        self.over = True

    def elapsed_time(self, end: TimingEvent) -> float:
        assert end.over, "read before the work is over"
        assert self.at is not None
        assert end.at is not None
        return end.at - self.at


def test_an_accelerators_own_clock_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Event", TimingEvent)
    stopwatch = stopwatch_on(torch.device("cuda", 0))
    with stopwatch:
        TimingEvent.now_ms += 1500.0
    TimingEvent.now_ms += 9000.0
    assert stopwatch.seconds() == 1.5


def test_the_host_is_at_most_one_micro_batch_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has begun stays with this rank: with all of them enqueued nothing could be moved any more."""
    ends: list[int] = []

    class End:
        def __init__(self, device: torch.device) -> None:
            assert device.type == "cuda"

        def record(self) -> None:
            self.begun = begun

        def synchronize(self) -> None:
            ends.append(self.begun)

    monkeypatch.setattr(torch, "Event", End)
    pace = Pace(torch.device("cuda", 0))
    waited = []
    for begun in range(4):  # noqa: B007 - read by the event
        pace.keep()
        waited.append(list(ends))
    assert waited == [[], [0], [0, 1], [0, 1, 2]], "the third is not begun before the first is over"
    pace.finish()
    assert ends == [0, 1, 2, 3]
    here = Pace(torch.device("cpu"))
    here.keep()
    here.finish()
    assert ends == [0, 1, 2, 3], "the host itself is never ahead"


def test_a_port_that_is_open_already_brings_its_own_device() -> None:
    class Port:
        take = None

    with pytest.raises(ValueError, match="need the address of a controller"):
        sb.RankFeed(Port(), mesh=object())


@pytest.fixture
def accelerator() -> torch.device:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None:
        pytest.skip("needs an accelerator")
    return found


@pytest.mark.accelerator
def test_a_feed_to_a_real_accelerator(accelerator: torch.device) -> None:
    got: list[RankBatch] = []

    async def main() -> None:
        balancer = ScriptedBalancer([make_batch(step, 1, num_tokens=1000) for step in range(20)])
        async with sb.TorchTransport.listen(dp_size=1) as transport, anyio.create_task_group() as tasks:
            tasks.start_soon(sb.serve, balancer, transport)
            feed = sb.RankFeed(transport.address, rank=0, dp_size=1, device=accelerator)
            async for batch in feed:
                with feed.timed():
                    got.append(batch)

    anyio.run(main)
    for step, batch in enumerate(got):
        expected = make_batch(step, 1, num_tokens=1000).ranks[0]
        for mine, theirs in zip(batch.rollouts, expected.rollouts, strict=True):
            assert mine.tokens["input_ids"].device.type == accelerator.type
            assert torch.equal(mine.tokens["input_ids"].cpu(), theirs.tokens["input_ids"])


@pytest.mark.accelerator
def test_layouts_are_made_where_the_rollouts_are(accelerator: torch.device) -> None:
    here = make_batch(0, 1, num_tokens=300).ranks[0].micro_batches[0]
    there = MicroBatch.of(
        [Rollout(tokens={key: column.to(accelerator) for key, column in one.tokens.items()}) for one in here.rollouts]
    )
    for mine, theirs in ((there.packed(), here.packed()), (there.padded(), here.padded())):
        assert mine["input_ids"].device.type == mine.position_ids.device.type == accelerator.type
        assert torch.equal(mine["input_ids"].cpu(), theirs["input_ids"])
        assert torch.equal(mine.position_ids.cpu(), theirs.position_ids)
    assert torch.equal(there.packed().cu_seqlens.cpu(), here.packed().cu_seqlens)


@pytest.mark.accelerator
def test_the_host_waits_for_an_accelerator(accelerator: torch.device) -> None:
    pace, work, ends = Pace(accelerator), torch.rand(2048, 2048, device=accelerator), []
    for begun in range(5):
        pace.keep()
        assert all(end.query() for end in ends[: max(begun - 1, 0)])
        for _ in range(20):
            work = work @ work.T / 2048
        ends.append(torch.Event(accelerator))
        ends[-1].record()
    pace.keep()
    pace.finish()
    assert all(end.query() for end in ends)


@pytest.mark.accelerator
def test_an_accelerators_stopwatch_waits_for_its_work(accelerator: torch.device) -> None:
    work = torch.rand(2048, 2048, device=accelerator)
    stopwatch = stopwatch_on(accelerator)
    with stopwatch:
        for _ in range(20):
            work = work @ work.T / 2048
    assert stopwatch.seconds() > 0
    assert work.isfinite().all()
