"""A controller that dies while a rank is connecting."""

from __future__ import annotations

import socket
import threading

import pytest

import stream_balancer as sb
from stream_balancer.transport import torch_dist


def test_a_rank_leaves_a_controller_that_died_while_it_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The port accepts and then says nothing but good-bye, as when the process is killed in between."""
    monkeypatch.setattr(torch_dist, "_STORE_TIMEOUT_S", 0.5)
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
    assert probed.wait(20)
    closer = threading.Thread(target=feed.close)
    closer.start()
    closer.join(20)
    assert not closer.is_alive()
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    acceptor.join(5)
