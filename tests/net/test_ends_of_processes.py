"""A process at one end is killed, forks, or ends: the other end learns it at once, and gets nothing half."""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing.connection import Connection

import numpy as np
import pytest
from ends import MOVERS, End, Network, call, wait_until
from forked import forked, hear, started
from guard import GUARD_S

from stream_balancer.wire.payload import Payload

pytestmark = pytest.mark.processes
SIZE = 30_000_000


def join(address: str, mover: str) -> End:
    network = Network()
    end = network.join(*[mover] if mover != "socket" else [], address=address)
    assert isinstance(end, End)
    if mover != "socket":
        end.wait_for_mover()
    return end


def send_for_ever(address: str, mover: str, told: Connection) -> None:
    end, data = join(address, mover), np.full(SIZE, 7, np.uint8)
    told.send("up")
    for number in range(10**6):
        end.send(call(), Payload.of(data[:1000], data[1000:]))
        end.heard.wait_for(number + 1)


def receive_for_ever(address: str, mover: str, told: Connection) -> None:
    join(address, mover)
    told.send("up")
    time.sleep(GUARD_S)


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("child", [send_for_ever, receive_for_ever])
def test_a_peer_killed_in_mid_transfer_is_noticed_at_once(network: Network, mover: str, child: object) -> None:
    process, pipe = forked(child, network.listen(), mover)  # type: ignore[arg-type]
    hear(pipe)
    (there,) = network.accepted
    if mover != "socket":
        there.wait_for_mover()
    there.heard.on_receive = lambda _: there.send(call(), Payload())
    if child is receive_for_ever:
        data = np.full(SIZE, 7, np.uint8)
        for _ in range(100):
            there.send(call(), Payload.of(data[:1000], data[1000:]))
        threading.Event().wait(0.2)
    else:
        there.heard.wait_for(1)
        threading.Event().wait(0.05)
    process.kill()
    began = time.monotonic()
    assert there.heard.wait_for_end().kind == "lost"
    assert time.monotonic() - began < 5.0  # it takes 5 to 40 ms
    wait_until(lambda: not any(thread.is_alive() for thread in network.io.helpers))
    for _, memory in there.heard.messages:
        assert memory is not None
        assert memory.size == SIZE
        assert (memory[:: 4096 if mover == "torch_dist" else 1] == 7).all()


def fork_and_live(address: str, mover: str, told: Connection) -> None:
    end = join(address, mover)
    if (child := os.fork()) == 0:
        end.connection.send(call())  # does nothing in a child
        end.connection.abort()
        time.sleep(GUARD_S)
        os._exit(0)
    end.send(call(5), Payload.of(b"from the parent"))
    told.send(child)
    time.sleep(GUARD_S)


@pytest.mark.parametrize("mover", MOVERS)
def test_a_forked_child_keeps_nothing_of_a_connection(network: Network, mover: str) -> None:
    process, pipe = forked(fork_and_live, network.listen(), mover, daemon=False)
    child = hear(pipe)
    try:
        (there,) = network.accepted
        there.heard.wait_for(1)
        assert [message for message, _ in there.heard.messages] == [call(5)]
        assert not there.heard.ends
        process.kill()
        assert there.heard.wait_for_end().kind == "lost"
        os.kill(child, 0)  # it lives
    finally:
        process.kill()
        os.kill(child, signal.SIGKILL)


PROGRAM = """
import sys
import numpy as np
from ends import Payload, call
from test_ends_of_processes import join

end = join(sys.argv[1], sys.argv[2])
for number in range(8):
    end.send(call(number), Payload.of(np.full(3_000_000, number, np.uint8)))
if sys.argv[3] == "closes":
    end.connection.close("done")
"""


@pytest.mark.parametrize("mover", [*MOVERS[:-1], pytest.param(MOVERS[-1], marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["closes", "just ends"])
def test_a_process_that_ends_says_goodbye_if_it_has_closed(network: Network, mover: str, how: str) -> None:
    with started("-c", PROGRAM, network.listen(), mover, how, finalize=True) as program:
        wait_until(lambda: network.accepted)
        (there,) = network.accepted
        end = there.heard.wait_for_end()
        out, errors = program.communicate(GUARD_S)
        assert program.returncode == 0, (out, errors)
    assert errors == ""
    assert end.kind == ("closed" if how == "closes" else "lost")
    if how == "closes":
        assert end.text == "done"
        assert len(there.heard.messages) == 8
