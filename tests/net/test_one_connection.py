"""One connection over a socket, with each mover: order, pausing, memory, descriptors, timers, ends."""

from __future__ import annotations

import logging
import os
import random
import threading
from itertools import pairwise

import numpy as np
import pytest
from ends import MOVERS, End, Heard, Network, RawPeer, call, wait_until

from stream_balancer.errors import WireError
from stream_balancer.net import connection as connections
from stream_balancer.net import movers
from stream_balancer.net.loops import Io
from stream_balancer.net.messages import Cancel, Close, Message
from stream_balancer.net.movers import common, shared_memory, torch_dist
from stream_balancer.wire.payload import Memory, Payload

MB = 2**20


def payload_of(number: int, size: int, pieces: int) -> Payload:
    """``size`` bytes of one value, in some pieces that lie apart."""
    cuts = [size * part // pieces for part in range(pieces + 1)]
    return Payload.of(*(np.full(b - a, number, np.uint8) for a, b in pairwise(cuts)))


@pytest.mark.parametrize("mover", MOVERS)
def test_messages_keep_their_order_whichever_way_their_bytes_go(network: Network, mover: str) -> None:
    there, here = network.meet(mover)
    rng, sizes = random.Random(1), []
    for number in range(80):
        size = rng.choice([0, 10, 200_000, 3 * MB, 9 * MB if number % 10 == 0 else 70_000])
        sizes.append(size)
        payload = payload_of(number, size, rng.choice([1, 2, 5]))
        here.send(call(number), payload)
    there.heard.wait_for(80)
    assert [message for message, _ in there.heard.messages] == [call(number) for number in range(80)]
    for number, (size, (_, memory)) in enumerate(zip(sizes, there.heard.messages, strict=True)):
        assert (memory is None) == (size == 0)
        assert memory is None or (memory.size == size and (memory == number).all())
    assert there.heard.admitted == [size for size in sizes if size]


@pytest.mark.parametrize("mover", MOVERS)
def test_what_comes_is_put_into_its_runs(network: Network, mover: str) -> None:
    there, here = network.meet(mover)
    sizes = [1, 150_000, MB, 63]
    offsets = [3, 100, 200_000, 2 * MB]
    data = np.frombuffer(random.Random(1).randbytes(sum(sizes)), np.uint8)
    runs = tuple(number for run in zip(offsets, sizes, strict=True) for number in run)
    here.send(call(), Payload(3 * MB, runs, (data[:10], data[10:400_000], data[400_000:])))
    there.heard.wait_for(1)
    memory = there.heard.messages[0][1]
    assert memory is not None
    assert memory.size == 3 * MB
    came = np.concatenate([memory[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)])
    assert (came == data).all()


@pytest.mark.parametrize("mover", MOVERS)
def test_a_paused_connection_takes_nothing_until_it_is_resumed(network: Network, mover: str) -> None:
    there, here = network.meet(mover)
    there.heard.on_receive = lambda _: there.connection.pause()
    for number in range(20):
        here.send(call(number), payload_of(number, 100 if number % 3 == 1 else 300_000, 2))
    wait_until(lambda: there.connection.paused)
    admitted = len(there.heard.admitted)
    assert admitted == 1 or mover == "torch_dist", "others are announced while one is on its way"
    here.send(Cancel(0), Payload())
    threading.Event().wait(0.05)
    assert len(there.heard.admitted) == admitted
    assert len(there.heard.messages) == 1
    there.heard.on_receive = lambda _: None
    network.in_thread(there.connection.resume)
    there.heard.wait_for(21)
    assert [message for message, _ in there.heard.messages] == [*map(call, range(20)), Cancel(0)]
    assert all(memory is None or (memory == number).all() for number, (_, memory) in enumerate(there.heard.messages))


@pytest.mark.parametrize("mover", MOVERS)
def test_memory_is_used_again_once_its_last_view_has_died(network: Network, mover: str) -> None:
    there, here = network.meet(mover)

    def received(number: int) -> Memory:
        here.send(call(number), payload_of(number, 4 * MB, 1))
        there.heard.wait(lambda: there.heard.messages)
        memory = there.heard.messages.pop()[1]
        assert memory is not None
        return memory

    held = received(1)[100:200]
    places = set()
    for number in range(2, 12):
        memory = received(number)
        places.add(memory.ctypes.data)
        del memory
        freed = len(there.heard.messages)
        here.send(call(), Payload())  # behind the note that says that it is free
        there.heard.wait(lambda freed=freed: len(there.heard.messages) > freed)  # type: ignore[misc]
        there.heard.messages.clear()
    assert (held == 1).all()
    assert held.ctypes.data - 100 not in places
    assert len(places) < 6


def open_files() -> list[str]:
    """What this process's descriptors are."""
    names = []
    for name in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            names.append("")
    return names


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("how", ["closed", "cut"])
def test_no_descriptor_is_left_of_a_connection(network: Network, mover: str, how: str) -> None:
    def one() -> None:
        there, here = network.meet(mover)
        for number in range(6):
            here.send(call(number), payload_of(number, 300_000 * (number + 1), 1))
        if how == "closed":
            here.connection.close()
        else:  # in the middle
            there.heard.wait_for(1)
            here.connection.abort()
        there.heard.wait_for_end()
        here.heard.wait_for_end()
        wait_until(lambda: there.connection.over and here.connection.over)

    one()  # libraries open some for good
    wait_until(lambda: not any("memfd" in name for name in open_files()))
    before = len(open_files())
    for _ in range(5):
        one()
    network.accepted.clear()
    wait_until(lambda: len(open_files()) <= before + 1)


def test_idle_shared_memory_has_no_descriptor_and_is_bounded(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_KEEP_BYTES", 4 * MB)
    there, here = network.meet("shared_memory")
    for number in range(8):
        here.send(call(number), payload_of(number, 200_000 * (number + 1), 1))
    there.heard.wait_for(8)
    assert sum("memfd" in name for name in open_files()) >= 8
    there.heard.messages.clear()
    wait_until(lambda: not any("memfd" in name for name in open_files()))
    mover = here.connection.movers[shared_memory.SharedMemory.number]
    assert isinstance(mover, shared_memory.SharedMemory)
    assert 0 < mover._idle.num_bytes <= 4 * MB
    assert not mover._lent


@pytest.mark.parametrize(
    ("mover", "module", "name"),
    [("shared_memory", shared_memory, "_File"), ("torch_dist", torch_dist, "_group_of_two")],
)
def test_a_mover_that_cannot_be_built_is_said_once_and_the_socket_is_used(
    network: Network, mover: str, module: object, name: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def refuse(*_: object) -> None:
        raise OSError("there is none today")

    monkeypatch.setattr(common, "_warned", set())
    monkeypatch.setattr(module, name, refuse)
    for _ in range(2):
        joined = network.join(mover)
        assert isinstance(joined, End)
        joined.send(call(), payload_of(7, MB, 3))
        wait_until(lambda: network.accepted)
        there = network.accepted.pop()
        there.heard.wait_for(1)
    wait_until(lambda: "there is none today" in caplog.text)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_shared_memory_that_runs_out_sends_that_one_by_the_socket(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = network.meet("shared_memory")

    def no_more(size: int) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(shared_memory, "_File", no_more)
    here.send(call(), payload_of(3, MB, 2))
    there.heard.wait_for(1)


@pytest.mark.parametrize(
    ("wanted", "again", "found"),
    [
        ((), False, ()),
        (("torch_dist", "shared_memory"), False, ("torch_dist", "shared_memory")),
        (("torch_dist", "shared_memory"), True, ("shared_memory",)),
    ],
)
def test_a_rank_that_comes_again_goes_without_torch(
    wanted: tuple[str, ...], again: bool, found: tuple[str, ...]
) -> None:
    assert movers.available(wanted, again=again) == found
    with pytest.raises(ValueError, match="no mover is called 'nccl'"):
        movers.available(("nccl",))


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mover", MOVERS)
def test_a_close_comes_behind_everything_and_is_answered(network: Network, mover: str) -> None:
    there, here = network.meet(mover)
    for number in range(5):
        here.send(call(number), payload_of(number, 5 * MB, 3))
    here.connection.close("enough")
    end = there.heard.wait_for_end()
    assert (end.kind, end.text) == ("closed", "enough")
    assert len(there.heard.messages) == 5
    assert here.heard.wait_for_end().kind == "closed"
    wait_until(lambda: not network.io.leaving)


def test_what_cannot_be_sent_ends_the_connection(network: Network, caplog: pytest.LogCaptureFixture) -> None:
    there, here = network.meet()
    here.send(call(), Payload(10, (0, 10), (b"123",)))
    assert here.heard.wait_for_end().kind == "lost"
    assert there.heard.wait_for_end().kind == "lost"
    assert "3 bytes behind a message that announces 10" in caplog.text


def test_what_a_handler_does_not_take_is_told_to_the_peer(network: Network) -> None:
    there, here = network.meet()

    def refuse(message: Message) -> None:
        raise WireError("not this, not now")

    there.heard.on_receive = refuse
    here.send(call(), Payload())
    for end in (there.heard.wait_for_end(), here.heard.wait_for_end()):
        assert (end.kind, end.text, end.reason) == ("refused", "not this, not now", "protocol")


def test_a_peer_that_does_not_answer_a_close_is_not_waited_for(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "CLOSE_S", 0.05)
    with RawPeer(network.listen()) as peer:
        peer.prove()
        peer.hear()
        wait_until(lambda: network.accepted)
        there = network.accepted[0]
        there.connection.close("goodbye")
        assert peer.hear().message == Close("goodbye")
        assert there.heard.wait_for_end().text == "no answer to close"
    assert not network.io.leaving


def test_a_lost_connection_is_heard_once(network: Network) -> None:
    there, here = network.meet()
    heard: Heard = there.heard
    here.connection.abort()
    assert heard.wait_for_end().kind == "lost"
    here.connection.abort()
    here.connection.close()
    network.in_thread(lambda: None)
    assert [end.kind for end in heard.ends] == ["lost"]
    assert [end.kind for end in here.heard.ends] == ["closed"]


def test_more_timers_than_wake_ups_fit_into_a_pipe_are_set_by_another_thread() -> None:
    """A thousand connections end in one job."""
    io, fired = Io.current(), threading.Semaphore(0)
    thread = threading.Thread(
        target=lambda: io.do(lambda: [io.after(0.01, fired.release) for _ in range(2000)], here=True)
    )
    thread.start()
    thread.join()
    assert all(fired.acquire(timeout=20.0) for _ in range(2000))
