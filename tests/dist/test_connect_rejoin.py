"""A producer whose connection breaks, wherever that is: it joins again, and every put is accepted exactly once."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import anyio
import pytest
from on_a_port import served

import stream_balancer as sb
from stream_balancer.net.listener import split_address
from stream_balancer.testing import make_rollout

NUM_ROLLOUTS = 4
JOINED_BYTES = 400  # of the handshake, both ways together: about 350
EVERY_BYTES = 151  # a put has 500, the reply to it 40


class BreakingNetwork:
    """Between producers and a controller: each connection is reset after a few bytes more than the one before."""

    def __init__(self, address: str) -> None:
        self._to = split_address(address)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self.broken = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with suppress(OSError):  # closed
            while True:
                one, _ = self._server.accept()
                with one, socket.create_connection(self._to) as other:
                    self._carry(one, other, JOINED_BYTES + EVERY_BYTES * self.broken)
                    self.broken += 1

    @staticmethod
    def _carry(one: socket.socket, other: socket.socket, left: int) -> None:
        with suppress(ConnectionError):
            while left > 0:
                for sock in select.select([one, other], [], [])[0]:
                    data = sock.recv(min(left, 4096))
                    (other if sock is one else one).sendall(data)
                    left -= len(data)
                    if not data:
                        return

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


@contextmanager
def breaking_network(address: str) -> Iterator[BreakingNetwork]:
    network = BreakingNetwork(address)
    yield network
    network.close()


async def test_every_put_is_accepted_once_wherever_the_connection_breaks(caplog: pytest.LogCaptureFixture) -> None:
    accepted: list[str] = []
    async with served(batch_size=2, window=2, capacity=4) as (balancer, transport), anyio.create_task_group() as tasks:

        async def train() -> None:
            async for batch in balancer.batches():
                accepted.extend(r.rollout_id for rank in batch.ranks for r in rank.rollouts)

        tasks.start_soon(train)
        with breaking_network(transport.address) as network:
            async with sb.connect(network.address, rejoin=True) as producer, anyio.create_task_group() as puts:
                for n in range(NUM_ROLLOUTS):
                    puts.start_soon(producer.put, make_rollout(10, str(n)))
            broken = network.broken
        balancer.end()
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert sorted(accepted, key=int) == [str(n) for n in range(NUM_ROLLOUTS)]
    assert broken > 4
    assert "waits for the controller to be there again" in caplog.text
