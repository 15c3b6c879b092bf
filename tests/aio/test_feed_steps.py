"""A rank's loop against a controller that says exactly what a test wants: every message, in any order."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import anyio
import msgspec
import pytest
import torch
from helpers import settle
from scripted import make_batch

import stream_balancer as sb
from stream_balancer.client.feed import RankFeed
from stream_balancer.client.step import End
from stream_balancer.net import messages as m
from stream_balancer.net.connection import Connection
from stream_balancer.net.errors import ConnectionEnd
from stream_balancer.testing.network import MemoryNetwork
from stream_balancer.wire.codec import decode_columns, encode
from stream_balancer.wire.payload import Memory

SIZES = m.Sizes(4, 100, 50, 3)


class Controller:
    """Of one rank."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.reports: list[m.Report] = []
        self.columns: list[Memory | None] = []
        self.calls: list[m.Call] = []
        self.joins: list[dict[str, Any]] = []
        self.ends: list[ConnectionEnd] = []
        self.connection: Connection | None = None
        network.listen(self._arrived)

    def _arrived(self, connection: Connection, join: m.Join) -> None:
        self.joins.append(msgspec.msgpack.decode(join.about, strict=False))
        self.connection, connection.handler = connection, self
        connection.let_in(m.Welcome())

    def admit(self, message: m.Message, total: int) -> None: ...

    def receive(self, message: m.Message, memory: Memory | None) -> None:
        if isinstance(message, m.Call):
            self.calls.append(message)
            self.tell(m.Reply(message.number))
        else:
            assert isinstance(message, m.Report)
            self.reports.append(message)
            self.columns.append(memory)

    def ended(self, end: ConnectionEnd) -> None:
        self.ends.append(end)

    def tell(self, message: m.Message, payload: Any = None) -> None:
        assert self.connection is not None
        self.connection.send(message, *(() if payload is None else (payload,)))

    def work(
        self, step: int, ids: Sequence[int] = (0, 1), *, first: bool = True, meets: bool = False, sizes: bool = True,
        uid: int = 7, attempt: int = 1, group: int | None = None,
    ) -> None:  # fmt: skip
        micro_batches = make_batch(step, 1, micro_batches=max(ids, default=0) + 1).ranks[0].micro_batches
        encoded = encode([micro_batches[number] for number in ids])
        head = m.StepHead(dp_size=1, load=2.5, meets=meets) if first else None
        items = tuple(m.WorkItem(number, group) for number in ids)
        work = m.Work(step, uid, attempt, items, head, (), encoded.header, SIZES if sizes else None)
        self.tell(work, encoded.payload)

    def seal(self, step: int, number: int = 1, ranks: tuple[int, ...] = (0,)) -> None:
        self.tell(m.Seal(step, number, ranks, SIZES))

    def whole(self, step: int) -> None:
        self.work(step)
        self.seal(step)

    def end(self) -> None:
        self.tell(m.Notify(end=True))

    @property
    def facts(self) -> list[tuple[Any, ...]]:
        found = [(one.fact, one.step, *((one.items,) if one.items else ())) for one in self.reports]
        self.reports.clear()
        return found


class Rig:
    def __init__(self, **options: Any) -> None:
        self.network = MemoryNetwork(dp_size=1)
        self.controller = Controller(self.network)
        own = {key: options.pop(key) for key in ("role", "rejoin", "depth", "seat", "seats") if key in options}
        self.peer = self.network.connect(0, **own)
        self.feed = RankFeed(self.peer, **options)


@pytest.fixture
async def rig() -> Rig:
    made = Rig()
    await settle()
    return made


def ids(batch: Any) -> list[str]:
    return [rollout.rollout_id for rollout in batch.rollouts]


async def test_a_plain_loop_gets_whole_steps_and_acknowledges_by_asking(rig: Rig) -> None:
    got = []
    for step in range(3):
        rig.controller.whole(step)
    rig.controller.end()
    async for batch in rig.feed:
        assert batch.is_last
        assert (batch.rank, batch.dp_size, batch.load) == (0, 1, 2.5)
        assert batch.global_num_tokens == 100
        assert [mb.num_tokens for mb in batch.micro_batches] == [11, 11]
        got.append((batch.step, ids(batch)))
        if batch.step == 1:
            await settle()
            assert rig.controller.facts == [("taken", 0), ("finished", 0), ("acknowledged", 0), ("taken", 1)]
    assert got == [(step, ids(make_batch(step, 1).ranks[0])) for step in range(3)]
    await settle()
    assert rig.controller.facts[-2:] == [("finished", 2), ("acknowledged", 2)]
    assert [end.kind for end in rig.controller.ends] == ["closed"], "it leaves once all is acknowledged"
    assert [one async for one in rig.feed] == []


async def test_a_loop_over_steps(rig: Rig) -> None:
    rig.controller.work(0, meets=True)
    rig.controller.end()
    async with anyio.create_task_group() as tasks:
        trained, ends = [], []

        async def train() -> None:
            async for step in rig.feed:
                async for micro_batch in step:
                    trained.append(micro_batch.num_tokens)  # noqa: PERF401 - one after the other
                ends.append(await step.async_finish())

        tasks.start_soon(train)
        await settle()
        assert trained == [11, 11]
        assert rig.controller.facts == [("taken", 0), ("done", 0, (0,)), ("done", 0, (1,)), ("at_barrier", 0)]
        rig.controller.work(0, [2], first=False, meets=True)
        await settle()
        assert rig.controller.facts == [("done", 0, (2,)), ("at_barrier", 0)]
        rig.controller.seal(0)
        await settle()
        assert ends == [End((0,), 4, 100, 50, 3)]
    assert rig.controller.facts == [("finished", 0), ("acknowledged", 0)]


async def test_a_rewound_step_comes_again_and_a_dropped_one_does_not(rig: Rig) -> None:
    rig.controller.work(0, meets=True)
    step = await anext(rig.feed)
    assert (await anext(aiter(step))).num_tokens == 11
    rig.controller.tell(m.Rewind(0, 2))
    await settle()
    assert [one async for one in step] == []
    assert await step.async_finish() is None
    assert step.dropped is None
    rig.controller.work(0, attempt=2, first=False, meets=True)
    again = await anext(rig.feed)
    assert again.step == 0
    assert (await anext(aiter(again))).num_tokens == 11
    rig.controller.tell(m.Drop(0, False, "planned anew"))
    await settle()
    assert await again.async_finish() is None
    assert again.dropped == "planned anew"
    rig.controller.work(0, uid=8, meets=True)
    assert (await anext(rig.feed)).step == 0
    rig.controller.tell(m.Drop(0, True, "others have it"))
    await settle()
    rig.feed.load_state_dict({"next_step": 1})
    rig.controller.work(1, meets=True)
    assert (await anext(rig.feed)).step == 1
    await settle()
    assert ("finished", 0) in rig.controller.facts
    assert rig.feed.state_dict() == {"next_step": 1}


async def test_a_rank_without_others_weights_leaves(rig: Rig) -> None:
    rig.controller.work(0, meets=True)
    step = await anext(rig.feed)
    rig.controller.tell(m.Drop(0, True, "others have it"))
    await settle()
    assert [one async for one in step] == []
    for _ in range(2):
        with pytest.raises(sb.errors.RankLostError, match=r"rank 0: others have it.*next_step"):
            await anext(rig.feed)
    await settle()
    assert rig.controller.ends[0].kind == "closed"


async def test_a_plain_loop_where_steps_may_change_is_told_what_to_do(rig: Rig) -> None:
    rig.controller.work(0, meets=True)
    batch = await anext(rig.feed)
    assert len(batch.micro_batches) == 2
    with pytest.raises(sb.errors.ConfigError, match=r"end = step\.finish"):
        await anext(rig.feed)
    with pytest.raises(sb.errors.ConfigError, match=r"end = step\.finish"):
        batch.ack()


async def test_what_a_loop_was_asked_for_it_gives_back_unless_it_has_begun_it(rig: Rig) -> None:
    rig.controller.work(0, [0, 1, 2, 3], meets=True)
    step = await anext(rig.feed)
    await anext(aiter(step))
    rig.controller.tell(m.Recall(0, 1, (0, 1, 2, 3), 1))
    await settle()
    assert rig.controller.facts[-1] == ("released", 0, (3, 2))
    assert len(step.micro_batches) == 2
    rig.controller.tell(m.Recall(0, 1, (0, 1), 1))
    await settle()
    assert rig.controller.facts[-1] == ("released", 0)


@pytest.mark.parametrize("auto_ack", [True, False])
async def test_weights_of_another_rank_are_no_checkpoint(auto_ack: bool) -> None:
    """A step would be gone that nobody has saved; a number that the feed was opened with is a checkpoint's."""
    rig = Rig(auto_ack=auto_ack, next_step=1)
    await settle()
    assert rig.controller.facts == [("acknowledged", 0)]
    rig.controller.whole(1)
    rig.controller.whole(2)
    rig.feed.load_state_dict({"next_step": 2})
    step = await anext(rig.feed)
    assert step.step == 2
    await settle()
    said = [fact for fact in rig.controller.facts if fact[0] == "acknowledged"]
    assert said == ([("acknowledged", 1)] if auto_ack else [])
    step.ack()
    await settle()
    assert ("acknowledged", 2) in rig.controller.facts


@pytest.mark.parametrize("counts", [(2, 1), (1,), (2, 0), (3,)], ids=str)
async def test_mini_batches_that_are_not_all_of_a_step_are_refused(rig: Rig, counts: tuple[int, ...]) -> None:
    head = m.StepHead(1, 2.5, mini_batches=tuple(m.MiniBatchHead(count, 1.0, 2, 20, 20, 2) for count in counts))
    encoded = encode(make_batch(0, 1, micro_batches=2).ranks[0].micro_batches)
    items = (m.WorkItem(0), m.WorkItem(1))
    rig.controller.tell(m.Work(0, 7, 1, items, head, (), encoded.header, SIZES), encoded.payload)
    with pytest.raises(sb.errors.WireError, match="the mini-batches of step 0 do not make up its micro-batches"):
        await anext(rig.feed)


async def test_a_role_gives_columns_item_by_item() -> None:
    rig = Rig(role="ref")
    await settle()
    rig.controller.work(0)
    batch = await anext(rig.feed)
    first, second = batch.micro_batches
    with pytest.raises(ValueError, match="role 'ref' has not given the columns of step 0"):
        await anext(rig.feed)
    with pytest.raises(ValueError, match="'x' has shape"):
        first.give(x=torch.ones(3))
    with pytest.raises(ValueError, match="1 to 64 columns, not 0"):
        first.give()
    with pytest.raises(ValueError, match="dtype"):
        first.give(x=torch.ones(11, dtype=torch.uint16))
    column = torch.arange(11.0, requires_grad=True)
    first.give(ref_logprobs=column)
    with torch.no_grad():
        column += 1  # it was copied
    with pytest.raises(ValueError, match="role 'ref' has not given"):
        batch.ack()
    second.give(ref_logprobs=torch.zeros(11))
    batch.ack()
    await settle()
    assert rig.controller.facts == [("taken", 0), ("done", 0, (0,)), ("done", 0, (1,))]
    rig.controller.work(1)
    batch = await anext(rig.feed)
    assert batch.step == 1
    for micro_batch in batch.micro_batches:
        micro_batch.give(ref_logprobs=torch.ones(11))
    await settle()
    [*_, report] = rig.controller.reports
    given = decode_columns(report.about, rig.controller.columns[-1], 11)
    assert torch.equal(given["ref_logprobs"], torch.ones(11))
    rig.controller.tell(m.Seal(0, 1, (), m.Sizes(0, 0, 0, 0)))
    assert batch.global_num_tokens == 100
    rig.controller.end()
    assert [one async for one in rig.feed] == []


async def test_what_the_weights_contain_is_not_trained_on_again() -> None:
    rig = Rig(next_step=2)
    await settle()
    assert rig.controller.joins[0]["next_step"] == 2
    for step in range(3):
        rig.controller.whole(step)
    assert (await anext(rig.feed)).step == 2
    await settle()
    said = [fact for fact in rig.controller.facts if fact[0] != "acknowledged"]
    assert said == [("finished", 0), ("finished", 1), ("taken", 2)]
    with pytest.raises(ValueError, match="lack step 1"):
        rig.feed.load_state_dict({"next_step": 1})


async def test_a_rank_that_joins_again_says_what_it_has() -> None:
    rig = Rig(rejoin=True)
    await settle()
    rig.controller.work(0, meets=True)
    step = await anext(rig.feed)
    await anext(aiter(step))
    await anext(aiter(step))
    rig.peer.cut()
    await anyio.sleep(1)
    assert rig.peer.joined == 2
    about = rig.controller.joins[1]
    [has] = about["has"].values()
    assert has[0] == 7
    assert {int(number): item[0] for number, item in has[2].items()} == {0: True, 1: False}
    rig.controller.reports.clear()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(step.async_finish)
        await settle()
        assert rig.controller.facts == [("done", 0, (1,)), ("at_barrier", 0)]
        rig.controller.seal(0)


async def test_too_large_a_batch_is_refused_before_memory_is_taken() -> None:
    rig = Rig(max_batch_bytes=100)
    await settle()
    rig.controller.whole(0)
    with pytest.raises(sb.errors.WireError, match=r"more than max_batch_bytes \(100\)\. Raise max_batch_bytes"):
        await anext(rig.feed)
    await settle()
    assert rig.controller.ends[0].kind == "refused"


async def test_without_auto_ack_it_leaves_with_the_last_acknowledgement() -> None:
    rig = Rig(auto_ack=False)
    await settle()
    for step in range(2):
        rig.controller.whole(step)
    rig.controller.end()
    batches = [batch async for batch in rig.feed]
    await settle()
    assert rig.controller.facts == [("taken", 0), ("finished", 0), ("taken", 1), ("finished", 1)]
    assert rig.controller.ends == []
    batches[0].ack()
    batches[0].ack()
    await settle()
    assert rig.controller.facts == [("acknowledged", 0)]
    rig.feed.acknowledge_through(10**9)
    await settle()
    assert rig.controller.facts == [("acknowledged", 1)]
    assert [end.kind for end in rig.controller.ends] == ["closed"]
    assert ids(batches[0]) == ids(make_batch(0, 1).ranks[0]), "it may be read when all is over"


async def test_a_feed_that_is_dropped_leaves_and_one_of_whose_steps_somebody_holds_stays(rig: Rig) -> None:
    rig.controller.whole(0)
    step = await anext(rig.feed)
    del rig.feed
    gc.collect()
    await settle()
    assert rig.controller.ends == []
    del step
    gc.collect()
    await settle()
    assert [end.kind for end in rig.controller.ends] == ["closed"]


async def test_two_tasks_cannot_iterate_one_feed(rig: Rig) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anext, rig.feed)
        await settle()
        with pytest.raises(sb.errors.AlreadyInUseError, match="two threads or tasks"):
            await anext(rig.feed)
        tasks.cancel_scope.cancel()
