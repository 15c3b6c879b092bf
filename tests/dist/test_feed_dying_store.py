"""What a rank needs its store, and a controller that is not there yet, for; and what it does when they die."""

from __future__ import annotations

import socket
import threading
from typing import Any

import anyio
from forked import forked, hear
from guard import GUARD_S
from scripted import ScriptedBalancer, make_batch
from torch._C._distributed_c10d import Store, TCPStore

import stream_balancer as sb


def test_a_rank_leaves_a_controller_that_died_while_it_connected() -> None:
    """The port accepts and then says nothing but good-bye, as when the process is killed in between."""
    server = socket.create_server(("127.0.0.1", 0))
    probed = threading.Event()

    def dying() -> None:
        try:
            for _ in range(1000):
                server.accept()[0].close()
                probed.set()
        except OSError:
            pass

    acceptor = threading.Thread(target=dying, daemon=True)
    acceptor.start()
    feed = sb.RankFeed(f"tcp://127.0.0.1:{server.getsockname()[1]}", rank=0, dp_size=1)
    assert probed.wait(GUARD_S)
    closer = threading.Thread(target=feed.close, daemon=True)
    closer.start()
    closer.join(GUARD_S)
    assert not closer.is_alive()
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    acceptor.join(GUARD_S)


def _host_store(pipe: Any) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


async def test_a_feed_goes_on_when_the_store_it_joined_through_has_died() -> None:
    host, mine = forked(_host_store)
    port = await anyio.to_thread.run_sync(hear, mine)
    stores: list[Store] = [TCPStore("127.0.0.1", port, is_master=False) for _ in range(2)]
    balancer = ScriptedBalancer([make_batch(step, 1) for step in range(5)])
    with anyio.fail_after(GUARD_S):
        async with sb.TorchTransport(stores[0], dp_size=1) as transport, anyio.create_task_group() as tasks:
            tasks.start_soon(sb.serve, balancer, transport)
            feed = sb.RankFeed(stores[1], rank=0, dp_size=1)
            assert (await anext(feed)).step == 0
            host.kill()
            host.join()
            assert [batch.step async for batch in feed] == [1, 2, 3, 4]
    assert balancer.acknowledged == list(range(5))
