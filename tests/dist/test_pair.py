"""Two ends build a gloo pair over an authenticated connection; and one of them goes away in the middle of that.

gloo itself waits for most of a minute for a peer that never connects, and nothing wakes it there. So it is only let in
once that is not going to happen. Which end would wait follows from port numbers: several pairs are built at a time.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Literal

import anyio
import pytest
from forked import PROCESSES, forked
from guard import GUARD_S

import stream_balancer as sb
from stream_balancer.transport.gloo import pair as _pair

TOKEN = b"a token of sixteen or more"
GLOO_TIMEOUT_S = 20  # gloo itself waits five times as long
PAIRS = 4


def _after_the_addresses(then: Callable[[], object]) -> None:
    """From now on ``then`` is called wherever gloo in this process has learnt its peer's address."""
    get = _pair._Exchange.get

    def learn(exchange: _pair._Exchange, key: str) -> bytes:
        address = get(exchange, key)
        if len(exchange.addresses) == 2:
            then()
        return address

    _pair._Exchange.get = learn  # type: ignore[method-assign]


def _meet_and_be_killed(sock: socket.socket, me: Literal[0, 1]) -> None:
    _after_the_addresses(lambda: os.kill(os.getpid(), signal.SIGKILL))
    _pair.meet(sock, me, token=TOKEN, hostname="127.0.0.1")


@pytest.mark.parametrize("me", [0, 1])
def test_an_end_whose_peer_is_killed_in_the_middle_raises(me: Literal[0, 1], monkeypatch: pytest.MonkeyPatch) -> None:
    def meet(sock: socket.socket) -> None:
        with sock, pytest.raises((OSError, RuntimeError)):
            _pair.meet(sock, me, token=TOKEN, hostname="127.0.0.1")

    monkeypatch.setattr(_pair, "GLOO_TIMEOUT_S", GLOO_TIMEOUT_S)
    socks = []
    for _ in range(PAIRS):
        mine, theirs = socket.socketpair()
        PROCESSES.Process(target=_meet_and_be_killed, args=(theirs, 1 - me), daemon=True).start()
        theirs.close()
        socks.append(mine)
    with ThreadPoolExecutor(PAIRS) as threads:
        for one in [threads.submit(meet, sock) for sock in socks]:
            one.result(GUARD_S)


def _feed_and_end(address: str, rank: int, may_end: Connection) -> None:
    _pair.GLOO_TIMEOUT_S = GLOO_TIMEOUT_S
    _feed = sb.RankFeed(address, rank=rank, dp_size=PAIRS)
    may_end.recv()


@pytest.mark.processes
async def test_a_process_ends_while_its_feed_builds_the_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, test_is_over = threading.Semaphore(0), threading.Event()

    def stop_here() -> None:
        stuck.release()
        test_is_over.wait()

    monkeypatch.setattr(_pair._Exchange, "get", _pair._Exchange.get)  # so that it is put back
    _after_the_addresses(stop_here)
    transport = sb.TorchTransport.listen(dp_size=PAIRS)
    ranks = []
    for rank in range(PAIRS):
        ranks.append(forked(_feed_and_end, transport.address, rank))
    with anyio.fail_after(GUARD_S):
        async with transport:
            try:
                for _ in ranks:
                    await anyio.to_thread.run_sync(stuck.acquire, abandon_on_cancel=True)
                await anyio.sleep(0.2)  # the controller's address is on its way to them
                for _, may_end in ranks:
                    may_end.send(None)
                for process, _ in ranks:
                    await anyio.to_thread.run_sync(process.join, abandon_on_cancel=True)
                    assert process.exitcode == 0
            finally:
                test_is_over.set()
                for process, _ in ranks:
                    process.kill()


@pytest.mark.parametrize("listens", [True, False])
def test_a_pair_is_built_though_it_is_not_known_which_end_listens(
    monkeypatch: pytest.MonkeyPatch, listens: bool
) -> None:
    """Another gloo may choose by another rule; where there is no ``/proc``, nothing is known."""
    monkeypatch.setattr(_pair, "_listens", lambda mine, theirs: listens)
    monkeypatch.setattr(_pair, "HOLD_S", 0.05)
    socks = socket.socketpair()
    with socks[0], socks[1], ThreadPoolExecutor(2) as threads:
        met = [
            threads.submit(_pair.meet, sock, me, token=TOKEN, hostname="127.0.0.1")
            for sock, me in zip(socks, (0, 1), strict=True)
        ]
        for one in met:
            one.result().poison()
