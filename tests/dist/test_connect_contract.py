"""A producer in another process keeps the balancer's own contract: refusals, cancellation, backpressure, deaths."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from guard import GUARD_S
from helpers import until
from on_a_port import served
from remote_producer import RemoteProducer, make, names, start_controller, verdict_of

import stream_balancer as sb


def waiting(balancer: sb.StreamBalancer) -> list[str]:
    return names(balancer.snapshot().waiting)


def refusal(put: Callable[[], object]) -> tuple[str, str]:
    try:
        put()
    except Exception as error:
        return verdict_of(error)
    return "accepted", ""


async def test_every_refusal_is_the_balancer_s_own() -> None:
    knobs: dict[str, Any] = {"micro_batches": {"max_tokens": 50}, "limits": {"bytes": 10_000}}
    async with served(capacity=4, **knobs) as (balancer, transport):
        with RemoteProducer(transport.address) as remote:
            assert await remote.do("put", (5, "a")) == ("accepted", "")
            bad: list[tuple[Any, ...]] = [
                (5, "a"),
                (51, "long"),
                (5, "other", None, "column"),
                (5, "p", None, "padding"),
            ]
            for spec in bad:
                here = refusal(lambda spec=spec: balancer.put_nowait(make(*spec)))
                assert here[0] in ("RolloutError", "DuplicateRolloutError")
                for order in ("put", "nowait"):
                    assert await remote.do(order, spec) == here
                assert await remote.do("blocking", spec, None) == here
                if len(spec) == 2:
                    assert await remote.do("group", [(*spec, "g")]) == here
            for group in ([], [(5, "x")], [(5, "x", "g"), (5, "y", "h")]):
                kind, text = await remote.do("group", group)
                assert kind == "RolloutError"
                with pytest.raises(sb.errors.RolloutError) as there:
                    await balancer.put_group([make(*spec) for spec in group])
                assert text == str(there.value)
            twins = await remote.do("group", [(5, "t", "g"), (5, "t", "g")])
            assert twins[0] == "DuplicateRolloutError"
            assert waiting(balancer) == ["a"]
            balancer.end()
            closed = refusal(lambda: balancer.put_nowait(make(5, "z")))
            assert closed[0] == "ClosedResourceError"
            for order in ("put", "nowait"):
                assert await remote.do(order, (5, "z")) == closed
            remote.leave()


async def test_a_full_balancer_holds_back_and_lets_in_first_come_first_served() -> None:
    async with served(capacity=4) as (balancer, transport):
        with RemoteProducer(transport.address) as remote, RemoteProducer(transport.address, backend="trio") as other:
            for n in range(4):
                await balancer.put(make(3, f"here{n}"))
            for n in range(9):  # one after the other: each is parked before the next comes
                await (remote, other)[n % 2].do("start", (3, f"r{n}"))
                await until(lambda n=n: balancer.statistics().blocked_puts == n + 1)  # type: ignore[misc]
            batches = balancer.batches()
            await anext(batches)
            await until(lambda: balancer.statistics().blocked_puts == 5)
            assert waiting(balancer) == ["r0", "r1", "r2", "r3"]
            await anext(batches)
            await until(lambda: balancer.statistics().blocked_puts == 1)
            assert waiting(balancer) == ["r4", "r5", "r6", "r7"]
            assert sorted(await remote.do("ended", 4)) == [(f"r{n}", "accepted", "") for n in (0, 2, 4, 6)]
            await anext(batches)
            assert sorted(await other.do("ended", 4)) == [(f"r{n}", "accepted", "") for n in (1, 3, 5, 7)]
            assert await remote.do("ended", 5)


async def test_a_killed_controller_is_told_to_every_pending_put() -> None:
    controller, address = await anyio.to_thread.run_sync(start_controller, 4)
    with anyio.fail_after(GUARD_S), RemoteProducer(address) as remote:
        for n in range(4):
            assert await remote.do("put", (3, f"in{n}")) == ("accepted", "")
        for n in range(2):
            await remote.do("start", (3, f"p{n}"))
        remote_blocking = RemoteProducer(address)
        with remote_blocking:
            assert await remote_blocking.do("nowait", (3, "full")) == ("WouldBlock", "")
            remote_blocking.tell("blocking", (3, "b"), None)
            await anyio.sleep(0.1)  # in transit or parked: either way the kill must reach it
            controller.kill()
            for _, kind, text in await remote.do("ended", 2):
                assert kind == "BrokenResourceError"
                assert "controller was lost" in text
                assert "connection" in text
                assert "DuplicateRolloutError" in text
            assert (await anyio.to_thread.run_sync(remote_blocking.answer))[0] == "BrokenResourceError"
            for order in ("put", "nowait"):
                kind, text = await remote.do(order, (3, "later"))
                assert kind == "BrokenResourceError"
                assert "not been sent, so it was not accepted" in text
            remote.leave()
    await anyio.to_thread.run_sync(controller.join)


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

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(train)
            with RemoteProducer(transport.address) as healthy:
                for life in range(3):
                    with RemoteProducer(transport.address) as victim:
                        victim.tell("flood", f"life{life}", tokens)
                        await until(lambda life=life: any(f"life{life}." in name for name in seen))  # type: ignore[misc]
                        await anyio.sleep(chance.uniform(0, 0.05))
                        victim.kill()
                    assert await healthy.do("put", (tokens, f"healthy{life}")) == ("accepted", "")
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
