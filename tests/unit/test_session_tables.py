"""Every session meets every message in every state: what is in its table is taken, the rest refused by name."""

from __future__ import annotations

from typing import Any, ClassVar

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from sessions import FakeChannel, at_once, outgoing, producer_session, send

import stream_balancer as sb
from stream_balancer.errors import WireError
from stream_balancer.testing import make_rollout
from stream_balancer.testing.transports import make_batch
from stream_balancer.transport.channel import PeerClosed, Session
from stream_balancer.transport.producer_port import ProducerPort
from stream_balancer.transport.producer_session import ProducerSession
from stream_balancer.transport.rank_port import RankPort
from stream_balancer.transport.rank_session import RankSession
from stream_balancer.transport.request_messages import EncodedRequest
from stream_balancer.transport.requests import Mode, Request
from stream_balancer.values import SUPPORTED_DTYPES
from stream_balancer.wire import messages as m

JOIN = m.JoinRank(0, 1, 0, depth=1000, max_batch_bytes=2**20)
BEFORE_AND_AFTER, BEFORE = {"open", "ending"}, {"open"}
EXAMPLES: dict[type[m.Message], m.Message] = {
    type(message): message
    for message in (
        m.Taken(0), m.StepReport(0, 1.0), m.StepColumns(0, 1.0, columns=(m.LateColumn("x", 5),)),
        m.StepHeld(0, 1.0), m.PayloadsFetched(0), m.Denominators(0, 1, 1, 1, 1),
        m.End(), m.DeclareGroup(0, "g", "closed"), m.Cancel(0), m.Accepted((0,)), m.PutRefused(0, "full", ""),
        m.DropPayloads((0,)), m.WantPayloads(0, (1,)), m.Payloads(0), m.ProbeMemory(1, 2, b""), m.ProbeResult(True),
        m.MapBuffer(1, 2, 64), m.SharedBuffers((1,)), m.ReleaseBuffers((1,)),
        m.PartsDone(0, 0), m.StepComplete(0, (0,)), m.Release(0, 1), m.Released(0, 0),
        m.ReassignedPart(0, 0, 1, 8, 0, 64, 64),
        m.Batch(0, 0, 1, 8, 0, 64, 64), m.PartialBatch(0, 0, 1, 8, 0, 64, 1),
        m.Reserve(0, 1), m.Admitted(0, 3), m.ReleaseSlot(0), m.EndInput(0), m.EndBalancer(), m.PolicyVersion(3),
        m.StatisticsRequest(0), m.StatisticsReply(0, b"", "none"),
        m.Put(0, m.RolloutHeader(8, 0, 64, 64)), m.PutGroup(0, (m.RolloutHeader(8, 0, 64, 64),)),
    )
}  # fmt: skip
"""One of each that may come on a channel, and is not its own business; bundles are Ray's."""


def batch_of(step: int, *, confirm: bool = False) -> tuple[m.Message, list[Any]]:
    """As a session sends it: the message and its buffers."""
    channel = FakeChannel()
    RankSession(channel, JOIN, at_once).send(make_batch(step, 1).ranks[0], confirm=confirm)
    return _sent(channel)


def part_of(step: int) -> tuple[m.Message, list[Any]]:
    """What a lost rank owed of it."""
    channel = FakeChannel()
    RankSession(channel, JOIN, at_once).reassign(make_batch(step, 1).ranks[0])
    return _sent(channel)


def _sent(channel: FakeChannel) -> tuple[m.Message, list[Any]]:
    sources = channel.outgoing[0].sources
    buffers = [torch.empty(source.size, dtype=torch.uint8) for source in sources]
    for source, buffer in zip(sources, buffers, strict=True):
        for _ in source.fill(buffer):
            pass
    return channel.sent[0], buffers


class Conversation(RuleBasedStateMachine):
    """One session, and what its table should say."""

    may_come: ClassVar[dict[type[m.Message], set[str]]] = {}
    """States in which a message is taken."""
    session: Any

    def end(self) -> None:
        """For those that say the end themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.state = "open"
        self.step = 0

    def example(self, kind: type[m.Message]) -> tuple[m.Message, list[Any]]:
        """One that is right, in a state in which it may come."""
        return EXAMPLES[kind], []

    @rule(kind=st.sampled_from(sorted(EXAMPLES, key=lambda kind: kind.__name__)))
    def message(self, kind: type[m.Message]) -> None:
        if self.state == "over":
            return  # its channel is over too
        if self.is_wanted(kind):
            message, buffers = self.example(kind)
            send(self.session, message, buffers)
            self.came(kind)
        else:
            with pytest.raises(WireError, match=f"{kind.__name__} message"):
                send(self.session, EXAMPLES[kind])

    def is_wanted(self, kind: type[m.Message]) -> bool:
        return self.state in self.may_come.get(kind, ())

    def came(self, kind: type[m.Message]) -> None:
        """What changes with it."""

    @precondition(lambda self: self.state != "over")
    @rule(error=st.sampled_from([PeerClosed(""), ConnectionResetError("gone"), WireError("damaged")]))
    def ended(self, error: Exception) -> None:
        self.session.ended(error)
        self.state = "over"

    @invariant()
    def its_table_is_complete(self) -> None:
        session: Session = self.session
        assert {kind for _, kind in session.actions} == set(self.may_come)


class RankSessions(Conversation):
    may_come: ClassVar = {
        m.StepColumns: set(),
        **dict.fromkeys(
            (
                m.Taken,
                m.StepReport,
                m.StepHeld,
                m.PayloadsFetched,
                m.PartsDone,
                m.Released,
                m.PolicyVersion,
                m.EndBalancer,
                m.StatisticsRequest,
            ),
            BEFORE_AND_AFTER,
        ),
    }

    def __init__(self) -> None:
        super().__init__()
        self.session = RankSession(FakeChannel(threads=False), JOIN, at_once)

    @precondition(lambda self: self.state == "open")
    @rule()
    def end(self) -> None:
        self.session.end()
        self.state = "ending"

    @rule()
    def send_one(self) -> None:
        if self.state == "open":
            self.session.send(make_batch(self.step, 1).ranks[0])
            self.step += 1
        else:
            with pytest.raises((sb.ClosedResourceError, sb.EndOfStream, sb.RankLostError)):
                self.session.send(make_batch(self.step, 1).ranks[0])
            assert self.session.credits == 0

    @invariant()
    def is_live_until_it_is_over(self) -> None:
        assert self.session.live == (self.state != "over")


class RolesRankSessions(RankSessions):
    """Of a rank that has a role: the same, but its reports have columns, once for each step."""

    may_come: ClassVar = {**RankSessions.may_come, m.StepReport: set(), m.StepColumns: BEFORE_AND_AFTER}

    def __init__(self) -> None:
        super().__init__()
        self.session = RankSession(FakeChannel(threads=False), msgspec.structs.replace(JOIN, role="ref"), at_once)
        self.owed: list[int] = []

    @rule()
    def send_one(self) -> None:
        self.owed += [self.step] * (self.state == "open")
        super().send_one()

    def is_wanted(self, kind: type[m.Message]) -> bool:
        return super().is_wanted(kind) and (kind is not m.StepColumns or bool(self.owed))

    def example(self, kind: type[m.Message]) -> tuple[m.Message, list[Any]]:
        if kind is not m.StepColumns:
            return super().example(kind)
        step = self.owed.pop()
        num_tokens = make_batch(step, 1).ranks[0].num_tokens
        message = m.StepColumns(step, 1.0, None, 0.0, (m.LateColumn("x", SUPPORTED_DTYPES.index(torch.int64)),))
        return message, [torch.zeros(8 * num_tokens, dtype=torch.uint8)]


class RankPorts(Conversation):
    may_come: ClassVar = {
        **dict.fromkeys((m.Batch, m.PartialBatch, m.End), BEFORE),
        **dict.fromkeys(
            (m.Denominators, m.ReassignedPart, m.StepComplete, m.Release, m.PolicyVersion, m.StatisticsReply),
            BEFORE_AND_AFTER,
        ),
    }

    def is_wanted(self, kind: type[m.Message]) -> bool:
        if kind is m.ReassignedPart and not self.step:
            return False  # of a step that it was not given
        return super().is_wanted(kind) and (kind is not m.Denominators or self.state == "open" or bool(self.waiting))

    def __init__(self) -> None:
        super().__init__()
        self.session = RankPort(FakeChannel(threads=False), JOIN)
        self.waiting: list[int] = []  # for their denominators

    def example(self, kind: type[m.Message]) -> tuple[m.Message, list[Any]]:
        if kind is m.Denominators and (self.waiting or self.state == "open"):
            if not self.waiting:
                send(self.session, *self.example(m.PartialBatch))
            one = make_batch(self.waiting.pop(0), 1).ranks[0]
            totals = one.global_num_rollouts, one.global_num_tokens, one.global_num_loss_tokens
            return m.Denominators(one.step, *totals, one.global_num_executions), []
        if kind is m.ReassignedPart:
            return part_of(self.step - 1)
        if kind in (m.Batch, m.PartialBatch):
            self.step += 1
            self.waiting += [self.step - 1] * (kind is m.PartialBatch)
            return batch_of(self.step - 1, confirm=kind is m.PartialBatch)
        return EXAMPLES[kind], []

    def came(self, kind: type[m.Message]) -> None:
        self.state = "ending" if kind is m.End else self.state


class ProducerSessions(Conversation):
    may_come: ClassVar = dict.fromkeys(
        (
            m.Put, m.PutGroup, m.DeclareGroup, m.Cancel, m.Reserve, m.ReleaseSlot, m.EndInput, m.StatisticsRequest,
        ),
        BEFORE_AND_AFTER,
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.session: ProducerSession = producer_session(FakeChannel(threads=False))

    def example(self, kind: type[m.Message]) -> tuple[m.Message, list[Any]]:
        if kind is m.Cancel:
            return self.example(m.DeclareGroup) if self.step == 0 else (m.Cancel(self.step - 1), [])
        if kind is m.ReleaseSlot:
            return EXAMPLES[kind], []
        self.step += 1
        if kind is m.DeclareGroup:
            return m.DeclareGroup(self.step - 1, "g", "closed"), []
        if kind is m.Reserve:
            return m.Reserve(self.step - 1, 2), []
        if kind in (m.EndInput, m.StatisticsRequest):
            return kind(self.step - 1), []
        mode = Mode.PUT if kind is m.Put else Mode.GROUP
        name = f"r{self.step}"
        return outgoing(
            EncodedRequest(Request(mode, [make_rollout(3, name, group_id="g")]), lambda: None), self.step - 1
        )

    @precondition(lambda self: self.state == "open")
    @rule()
    def end(self) -> None:
        self.session.end()
        self.state = "ending"

    @invariant()
    def is_live_until_it_is_over(self) -> None:
        assert self.session.live == (self.state != "over")


class _Kept(dict[int, object]):
    def keep(self, key: int, rollout: object) -> None:
        self[key] = rollout

    def drop(self, keys: Any) -> None:
        for key in keys:
            self.pop(key, None)


class ProducerPorts(Conversation):
    may_come: ClassVar = dict.fromkeys(
        (m.Accepted, m.PutRefused, m.Admitted, m.StatisticsReply, m.PolicyVersion, m.DropPayloads, m.End),
        BEFORE_AND_AFTER,
    )

    def __init__(self) -> None:
        super().__init__()
        self.session = ProducerPort(threads=False, kept=_Kept())
        self.session.opened(FakeChannel(threads=False), m.WelcomeProducer(2**30, 2**30))
        self.ended_by_peer = False

    def example(self, kind: type[m.Message]) -> tuple[m.Message, list[Any]]:
        if kind in (m.Accepted, m.PutRefused):
            if self.ended_by_peer:  # every put is done
                return m.Accepted(()), []
            self.session.ask(EncodedRequest(Request(Mode.PUT, [make_rollout(3, f"r{self.step}")]), lambda: None))
            self.step += 1
            number = self.step - 1
            return (m.Accepted((number,)) if kind is m.Accepted else m.PutRefused(number, "full", "")), []
        if kind in (m.Admitted, m.StatisticsReply):
            if self.ended_by_peer:
                return m.Accepted(()), []
            asked = EncodedRequest(Request(Mode.RESERVE if kind is m.Admitted else Mode.STATISTICS), lambda: None)
            self.session.ask(asked)
            self.step += 1
            number = self.step - 1
            return (m.Admitted(number, 3) if kind is m.Admitted else m.StatisticsReply(number, b"", "none")), []
        return EXAMPLES[kind], []

    def came(self, kind: type[m.Message]) -> None:
        if kind is m.End:
            self.state, self.ended_by_peer = "ending", True


@pytest.mark.parametrize("conversation", [RankSessions, RolesRankSessions, RankPorts, ProducerSessions, ProducerPorts])
def test_every_message_in_every_state(conversation: type[Conversation]) -> None:
    few = settings(max_examples=25, stateful_step_count=25, deadline=None)
    run_state_machine_as_test(conversation, settings=few)


@pytest.mark.parametrize("conversation", [RankSessions, RolesRankSessions, RankPorts, ProducerSessions, ProducerPorts])
def test_no_pair_of_state_and_message_is_left_to_chance(conversation: type[Conversation]) -> None:
    for kind in EXAMPLES:
        conversation().message(kind)
        ending = conversation()
        if m.End in ending.may_come:
            ending.message(m.End)
        else:
            ending.end()
        assert ending.state == "ending"
        ending.message(kind)
