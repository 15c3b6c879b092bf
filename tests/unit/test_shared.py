"""Buffers in shared memory: who may map what, and when a buffer may be written again. Both sides in one process."""

from __future__ import annotations

import mmap
import os

import pytest
import torch
from msgspec.structs import replace
from stream_balancer.transport.gloo import shared_memory as _shared
from stream_balancer.transport.gloo.shared_memory import OfferedBuffers, SharedViews
from stream_balancer.wire.messages import MapBuffer

from stream_balancer.errors import WireError

pytestmark = pytest.mark.skipif(not _shared.available(), reason="needs memfd")
MIB = 2**20


@pytest.fixture
def buffers() -> OfferedBuffers:
    return OfferedBuffers(keep=2)


@pytest.fixture
def freed() -> list[int]:
    return []


@pytest.fixture
def views(buffers: OfferedBuffers, freed: list[int]) -> SharedViews:
    views = SharedViews(freed.append)
    assert views.probe(buffers.probe())
    return views


def test_what_one_writes_the_other_reads(buffers: OfferedBuffers, views: SharedViews, freed: list[int]) -> None:
    number, memory, news, _keep = buffers.lend(1000)
    assert [type(message) for message in news] == [MapBuffer]
    assert memory.shape == (1000,)
    views.announce(news[0])
    memory.copy_(torch.arange(1000) % 251)
    seen = views.lend(number, 1000)
    assert torch.equal(seen, memory)
    memory[7] = 99
    assert seen[7] == 99  # no copy
    part = seen[5:10].view(5)
    del seen
    assert freed == []  # a view is left
    del part
    assert freed == [number]


def test_a_buffer_given_back_is_used_again(buffers: OfferedBuffers) -> None:
    number, _, _, _keep = buffers.lend(1000)
    other, _, _, _keep = buffers.lend(1000)
    assert other != number
    buffers.give_back(number)
    again, _, news, _keep = buffers.lend(MIB)  # fits into the whole MiB that was made
    assert (again, news) == (number, [])


def test_a_larger_batch_lets_a_small_buffer_go(buffers: OfferedBuffers, views: SharedViews) -> None:
    number, _, news, _keep = buffers.lend(1000)
    views.announce(news[0])
    buffers.give_back(number)
    larger, memory, news, _keep = buffers.lend(3 * MIB)
    assert [(message.number, message.size > 0) for message in news] == [(number, False), (larger, True)]
    for message in news:
        views.announce(message)
    assert views.lend(larger, 3 * MIB).numel() == memory.numel()
    with pytest.raises(WireError, match=f"no buffer {number}"):
        views.lend(number, 10)


def test_idle_buffers_are_bounded(buffers: OfferedBuffers) -> None:
    numbers = [buffers.lend(1000)[0] for _ in range(6)]
    for number in numbers:
        buffers.give_back(number)
    _, _, news, _keep = buffers.lend(1000)
    assert len(news) == 4


def test_what_was_not_lent_cannot_be_given_back(buffers: OfferedBuffers) -> None:
    number, _, _, _keep = buffers.lend(10)
    buffers.give_back(number)
    for wrong in (number, 77):
        with pytest.raises(WireError, match=f"gave back buffer {wrong}"):
            buffers.give_back(wrong)


def test_memory_lives_as_long_as_somebody_looks(buffers: OfferedBuffers, views: SharedViews, freed: list[int]) -> None:
    number, memory, news, _keep = buffers.lend(1000)
    views.announce(news[0])
    memory.fill_(5)
    seen = views.lend(number, 1000)
    buffers.close()
    buffers.close()
    del memory, views
    assert int(seen.sum()) == 5000
    del seen
    assert freed == [number]


def test_no_file_stays_open(buffers: OfferedBuffers, views: SharedViews) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    held = []
    for size in (10, 2 * MIB, 4 * MIB):
        number, _, news, keep = buffers.lend(size)
        views.announce(news[-1])
        held.append(views.lend(number, size))
        assert count() == before + 1
        del keep  # the rank has seen the batch, hence mapped the buffer
        assert count() == before
    buffers.close()
    assert count() < before


def test_another_machine_says_no(buffers: OfferedBuffers) -> None:
    probe = buffers.probe()
    for wrong in (
        replace(probe, nonce=bytes(8)),  # a process of that number, but not that one
        replace(probe, pid=2**22 + 1),  # no such process
        replace(probe, fd=2**20),  # no such file
    ):
        views = SharedViews(lambda number: None)
        assert not views.probe(wrong)
        with pytest.raises(WireError, match="out of turn"):
            views.announce(MapBuffer(1, probe.fd, 8))


def _file(size: int) -> int:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    return fd


def test_a_file_that_could_shrink_is_refused(views: SharedViews) -> None:
    fd = _file(MIB)
    try:
        with pytest.raises(WireError, match="not a sealed file"):
            views.announce(MapBuffer(9, fd, MIB, os.fstat(fd).st_ino))
    finally:
        os.close(fd)


def test_a_buffer_that_is_not_what_it_says_is_refused(buffers: OfferedBuffers, views: SharedViews) -> None:
    _, _, news, _keep = buffers.lend(1000)
    good = news[0]
    for wrong, text in (
        (replace(good, size=good.size + mmap.PAGESIZE), "not a sealed file"),
        (replace(good, size=2**62), "not a sealed file"),
    ):
        with pytest.raises(WireError, match=text):
            views.announce(wrong)
    views.announce(good)
    with pytest.raises(WireError, match="out of turn"):
        views.announce(good)
    with pytest.raises(WireError, match="no buffer"):
        views.lend(good.number, good.size + 1)


def test_a_peer_that_closed_a_buffer_first_is_gone(buffers: OfferedBuffers, views: SharedViews) -> None:
    """Not a fault of the protocol: it gave the link up, or died, between the announcement and the mapping."""
    _, _, news, keep = buffers.lend(1000)
    del keep
    with pytest.raises(ConnectionResetError, match="closed buffer"):
        views.announce(news[0])
    _, _, others, _keep = buffers.lend(1000)  # its file may have the number of the one that was closed
    with pytest.raises(ConnectionResetError, match="closed buffer"):
        views.announce(replace(news[0], fd=others[0].fd))
