"""The pool of receive and send buffers: what is lent is nobody else's, from however many threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from stream_balancer.transport.buffers import BufferPool


@pytest.fixture
def _threads_alternate_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_threads_alternate_often")
def test_buffers_come_back_while_others_are_lent() -> None:
    """The reader lets go of what the peer has seen while the writer packs the next batch."""
    pool = BufferPool(keep=8)
    errors: list[Exception] = []
    stop = threading.Event()

    def use() -> None:
        try:
            while not stop.is_set():
                mine = [pool.lend(64) for _ in range(6)]
                for number, buffer in enumerate(mine):
                    buffer.fill_(number)
                assert [int(buffer[0]) for buffer in mine] == list(range(6))
                del buffer, mine
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=use, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    stop.wait(0.8)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors
