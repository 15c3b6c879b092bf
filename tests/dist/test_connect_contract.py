"""A producer elsewhere keeps the balancer's own contract: refusals, deaths, connections that break, endings."""

from __future__ import annotations

import random
import select
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import pytest
from forked import Python
from guard import GUARD_S
from helpers import answering, until, waiting
from processes import Child, RemoteProducer, make, served

import stream_balancer as sb
from stream_balancer.net.listener import split_address
from stream_balancer.testing import make_rollout


async def verdict(put: Callable[[], object]) -> tuple[str, str]:
    """(type, text) of an error."""
    try:
        if isinstance(asked := put(), Awaitable):
            await asked
    except Exception as error:
        return type(error).__name__, str(error)
    return "accepted", ""


async def test_every_refusal_is_the_balancer_s_own() -> None:
    knobs: dict[str, Any] = {"micro_batches": {"max_tokens": 50}, "sync": "step", "max_bytes": 10_000}
    async with served(capacity=4, **knobs) as (balancer, transport), sb.connect(transport.address) as there:
        blocking = there.blocking
        await there.put(make(5, "a"))
        for spec in ((5, "a"), (51, "long"), (5, "other", None, "column"), (5, "p", None, "padding")):
            one = make(*spec)
            here = await verdict(partial(balancer.put_nowait, one))
            assert here[0] in ("RolloutError", "DuplicateRolloutError")
            assert await verdict(partial(there.put, one)) == here
            for put in (blocking.put, blocking.put_nowait):
                assert await verdict(partial(anyio.to_thread.run_sync, put, one)) == here
        for specs in ([], [(5, "x")], [(5, "x", "g"), (5, "y", "h")], [(5, "t", "g"), (5, "t", "g")]):
            group = [make(*spec) for spec in specs]
            here = await verdict(partial(balancer.put_group, group))
            assert here[0] in ("RolloutError", "DuplicateRolloutError")
            assert await verdict(partial(there.put_group, group)) == here
        assert waiting(balancer) == ["a"]
        balancer.end()
        closed = await verdict(partial(balancer.put_nowait, make(5, "z")))
        assert closed[0] == "ClosedResourceError"
        assert await verdict(partial(there.put, make(5, "z"))) == closed
        assert await verdict(partial(anyio.to_thread.run_sync, blocking.put_nowait, make(5, "z"))) == closed


def control(pipe: Any) -> None:
    """A controller that is full at four."""

    async def main() -> None:
        async with served(sb.serve, capacity=4) as (_, transport):
            pipe.send(transport.address)
            await anyio.sleep_forever()

    anyio.run(main)


async def test_a_killed_controller_is_told_to_every_pending_put() -> None:
    told: list[tuple[str, str]] = []
    with anyio.fail_after(GUARD_S), Child(control) as controller:
        async with sb.connect(await anyio.to_thread.run_sync(controller.hear)) as producer:
            for n in range(4):
                await producer.put(make(3, f"in{n}"))
            assert (await verdict(partial(producer.put_nowait, make(3, "full"))))[0] == "WouldBlock"

            async def pending(put: Callable[[], object]) -> None:
                told.append(await verdict(put))

            async with anyio.create_task_group() as puts:
                for n in range(2):
                    puts.start_soon(pending, partial(producer.put, make(3, f"p{n}")))
                puts.start_soon(pending, partial(anyio.to_thread.run_sync, producer.blocking.put, make(3, "b")))
                await anyio.sleep(0.1)  # in transit or parked: either way the kill must reach it
                controller.kill()
            assert {kind for kind, _ in told} == {"BrokenResourceError"}
            for _, text in told:
                assert all(part in text for part in ("controller was lost", "connection", "DuplicateRolloutError"))
            for put in (producer.put, producer.put_nowait):
                kind, text = await verdict(partial(put, make(3, "later")))
                assert kind == "BrokenResourceError"
                assert "not been sent, so it was not accepted" in text


@pytest.mark.parametrize("tokens", [10, 500_000])
async def test_producers_killed_in_the_middle_leave_nothing_half_done(tokens: int) -> None:
    chance = random.Random(tokens)
    async with served(batch_size=8, window=8, capacity=16) as (balancer, transport):
        seen: list[str] = []

        async def train() -> None:
            async for batch in balancer.batches():
                for r in batch.rollouts:
                    assert r.tokens["input_ids"].equal(make(tokens, r.rollout_id).tokens["input_ids"])
                    seen.append(r.rollout_id)

        async with sb.connect(transport.address) as healthy, anyio.create_task_group() as tasks:
            tasks.start_soon(train)
            for life in range(3):
                with RemoteProducer(transport.address, flood=(f"life{life}", tokens)):
                    await until(lambda life=life: any(f"life{life}." in name for name in seen))  # type: ignore[misc]
                    await anyio.sleep(chance.uniform(0, 0.05))
                await healthy.put(make(tokens, f"healthy{life}"))
            await until(lambda: balancer.statistics().blocked_puts == 0)
            balancer.end()
        assert len(seen) == len(set(seen))
        assert {f"healthy{life}" for life in range(3)} < set(seen)
        groups = [name.rpartition(".")[0] for name in seen if "." in name]
        assert all(groups.count(group) == 2 for group in groups)


@pytest.mark.parametrize("knob", ["staged_bytes", "max_put_bytes"])
def test_limits_that_let_nothing_through_are_refused(knob: str) -> None:
    with pytest.raises(ValueError, match=knob):
        sb.TorchTransport.listen(dp_size=1, **{knob: 0})


async def test_every_put_is_accepted_once_wherever_the_connection_breaks(caplog: pytest.LogCaptureFixture) -> None:
    """Each connection is reset some bytes later than the one before: a handshake has 350, a put 500, its reply 40."""
    accepted: list[str] = []
    broken: list[int] = []

    def carry(address: str, one: socket.socket) -> None:
        left = 400 + 151 * len(broken)
        with suppress(ConnectionError), one, socket.create_connection(split_address(address)) as other:
            while left > 0:
                for sock in select.select([one, other], [], [])[0]:
                    data = sock.recv(min(left, 4096))
                    (other if sock is one else one).sendall(data)
                    left -= len(data) or left
        broken.append(left)

    async with served(batch_size=2, window=2, capacity=4) as (balancer, transport), anyio.create_task_group() as tasks:

        async def train() -> None:
            async for batch in balancer.batches():
                accepted.extend(r.rollout_id for r in batch.rollouts)

        tasks.start_soon(train)
        with answering(partial(carry, transport.address)) as address:
            async with sb.connect(address, rejoin=True) as producer, anyio.create_task_group() as puts:
                for n in range(4):
                    puts.start_soon(producer.put, make_rollout(10, str(n)))
        balancer.end()
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert sorted(accepted) == ["0", "1", "2", "3"]
    assert len(broken) > 5
    assert "waits for the controller to be there again" in caplog.text


UNCLOSED = """
import sys, stream_balancer as sb
from stream_balancer.testing import make_rollout
producer = sb.connect(sys.argv[1]).blocking
try:
    producer.put(make_rollout(5))
    print("done", flush=True)
except sb.errors.BrokenResourceError:
    print("lost", flush=True)
"""


@pytest.mark.processes
async def test_an_unclosed_producer_ends_with_its_process() -> None:
    async def ended(process: Python) -> tuple[int | None, str, str]:
        out, errors = await anyio.to_thread.run_sync(process.communicate, GUARD_S)
        return process.returncode, out, errors

    async with served(batch_size=8, window=8) as (_, transport):
        assert await ended(Python("-c", UNCLOSED, transport.address)) == (0, "done\n", "")
    with anyio.fail_after(GUARD_S):
        async with sb.TorchTransport.listen(dp_size=1) as transport:
            unattended = Python("-c", UNCLOSED, transport.address)
            knocking = lambda: transport.service._listening._knocking  # noqa: E731
            await until(lambda: any(one.welcome is None for one in knocking()))  # nobody attends: the put waits
        assert await ended(unattended) == (0, "lost\n", "")
