"""Facts and sends of the serving that is being replaced, one compact trace for each ``serve`` of each test.

::

    PYTHONPATH=tests pytest -n0 -p recorder.plugin --record-traces=tests/traces/serving.jsonl.gz tests/aio

The package is not changed: its classes are wrapped. A trace is a list of events, in order. Facts: ``plan``, ``join``,
``lose``, ``giveup``, ``taken``, ``parts``, ``released``, ``fetched``, ``held``, ``report``, ``acked``, ``resize``,
``end``, ``over`` (what a replan gave to whom). What was sent: ``send``, ``part``, ``complete``, ``divide``, ``recall``,
``ended``, ``ack``, ``close``. A rollout is the number of its first appearance; a micro-batch ``[[rollout, part] ...]``.
"""

from __future__ import annotations

import gzip
import json
import weakref
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from stream_balancer.controller.balancer import StreamBalancer
from stream_balancer.controller.delivery import Delivery
from stream_balancer.controller.open_steps import OpenSteps
from stream_balancer.controller.rank_queues import OpenStep
from stream_balancer.controller.roles import Roles
from stream_balancer.controller.serve import _Server
from stream_balancer.transport.late_columns import GivenColumns
from stream_balancer.transport.rank_session import RankSession
from stream_balancer.wire.messages import PartsDone, PayloadsFetched, Release, Released, StepHeld, StepReport
from stream_balancer.wire.partial_batch import RemoteRollout

_MOST_EVENTS = 3000
_now: list[Trace] = []
"""Of the present test."""
_of: weakref.WeakKeyDictionary[Any, Trace] = weakref.WeakKeyDictionary()
"""By whatever belongs to a serve: its delivery, steps, roles, links."""


class Trace:
    """Events of one ``serve``."""

    def __init__(self, server: Any, care: Any, roles: Any, dp_size: int) -> None:
        self.options = {
            "replan": care.on_rank_loss == "replan", "move_late": care.move_late, "open": care.open,
            "roles": list(roles), "dp_size": dp_size,
        }  # fmt: skip
        self.events: list[list[Any]] = []
        self.seen: dict[str, int] = {}
        self.sent: dict[Any, list[int]] = {}
        self.taken: dict[Any, int] = {}

    def add(self, *event: Any) -> None:
        self.events.append(list(event))

    def number(self, rollout_id: str) -> int:
        return self.seen.setdefault(rollout_id, len(self.seen))

    def micro_batches(self, of: Iterable[Any]) -> list[Any]:
        return [
            [[self.number(r.rollout_id), getattr(r, "cp_rank", 0)] for r in mb.rollouts if not r.is_padding]
            for mb in of
        ]

    def note_taken(self, link: Any) -> None:
        for index in range(self.taken.get(link, 0), link._taken):
            self.add("taken", link.role, link.rank, self.sent[link][index])
        self.taken[link] = link._taken


def _wrap(
    cls: Any, name: str, after: Callable[..., Any] | None = None, before: Callable[..., Any] | None = None
) -> None:
    inner = getattr(cls, name)

    @wraps(inner)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(self, *args, **kwargs)
        result = inner(self, *args, **kwargs)
        if after is not None:
            after(result, self, *args, **kwargs)
        return result

    setattr(cls, name, wrapped)


def _install() -> None:
    _wrap(_Server, "__init__", _server_begins, _server_is_made)
    _wrap(Delivery, "__init__", None, _delivery_is_made)
    _wrap(Delivery, "attach", _has_attached, _attached)
    _wrap(Delivery, "advance", None, lambda d, link: link in _of and link in d._of_link and _of[link].note_taken(link))
    _wrap(Delivery, "end", None, lambda d: d._role_name or _of[d].add("end"))
    _wrap(Delivery, "_lose", None, lambda d, rank, error: rank.link is None or _of[d].add("lose", rank.role, rank.rank))
    _wrap(Delivery, "give_up", _gave_up, _gives_up)
    _wrap(Roles, "add", None, _planned)
    _wrap(OpenSteps, "take_in", None, _reported)
    _wrap(OpenSteps, "_settle", _settled)
    _wrap(OpenStep, "take_over", _took_over)
    _wrap(RankSession, "send", _sent)
    _wrap(RankSession, "reassign", lambda _, link, part: _said(link, "part", part.step, part.micro_batches))
    _wrap(RankSession, "complete", lambda _, link, m: _said(link, "complete", m.step, None, list(m.ranks)))
    _wrap(RankSession, "denominators", lambda _, link, m: _said(link, "divide", m.step))
    _wrap(RankSession, "notify", lambda _, link, m: isinstance(m, Release) and _said(link, "recall", m.step))
    _wrap(RankSession, "end", None, lambda link: link.state.name == "OPEN" and _said(link, "ended"))
    _wrap(RankSession, "close", None, lambda link, error: _said(link, "close"))
    for name in ("acknowledge", "acknowledge_through"):
        _wrap_user(name)
    resize = Delivery.resize

    def resized(self: Delivery, dp_size: int) -> None:
        before = self.ranks
        resize(self, dp_size)
        if self.ranks != before and self in _of:
            _of[self].add("resize", self._role_name, self.ranks)

    Delivery.resize = resized  # type: ignore[method-assign]


_making: list[Trace] = []
_of_balancer: weakref.WeakKeyDictionary[Any, Trace] = weakref.WeakKeyDictionary()


def _server_is_made(server: Any, balancer: Any, transport: Any, care: Any, report_after_s: float, roles: Any) -> None:
    _making.append(Trace(server, care, roles, transport.dp_size))
    _of_balancer[balancer] = _making[-1]
    _now.append(_making[-1])


def _server_begins(_: None, server: Any, *args: Any) -> None:
    trace = _making.pop()
    for delivery in server._deliveries.values():
        trace.add("resize", delivery._role_name, delivery.ranks)
        _of[delivery._steps] = trace
    _of[server._roles] = trace


def _delivery_is_made(delivery: Any, *args: Any, **kwargs: Any) -> None:
    _of[delivery] = _making[-1]


def _attached(delivery: Any, link: Any) -> None:
    trace = _of[link] = _of[delivery]
    delivery.ranks_of_trace = delivery.ranks
    trace.sent[link] = []
    feed = int.from_bytes(link._feed_id[:4], "little") if link._feed_id else 0
    trace.add("join", link.role, link.rank, link.incarnation, link._depth, feed)


def _has_attached(_: None, delivery: Any, link: Any) -> None:
    if delivery.ranks != delivery.ranks_of_trace:  # one that was given up has come again
        _of[delivery].add("resize", delivery._role_name, delivery.ranks)


def _planned(roles: Any, batch: Any, *args: Any) -> None:
    trace, delivery = _of[roles], roles._on_joined.__self__
    complete = all(one.is_last for one in batch.ranks)
    shares = [trace.micro_batches(one.micro_batches) for one in batch.ranks]
    remote = [
        [any(isinstance(r, RemoteRollout) or isinstance(getattr(r, "whole", None), RemoteRollout) for r in mb.rollouts)
         for mb in one.micro_batches]
        for one in batch.ranks
    ]  # fmt: skip
    minis = len(batch.ranks[0].mini_batch_sizes)
    trace.add("plan", batch.step, complete, delivery.ranks, shares, remote if any(map(any, remote)) else None, minis)


def _reported(steps: Any, rank: Any, report: Any) -> None:
    trace = _of[steps]
    if isinstance(report, StepHeld):
        trace.add("held", rank.role, rank.rank, report.step)
    elif isinstance(report, StepReport | GivenColumns):
        trace.add("report", rank.role, rank.rank, report.step)
    elif isinstance(report, PartsDone):
        trace.add("parts", rank.rank, report.step, report.parts)
    elif isinstance(report, Released):
        trace.add("released", rank.rank, report.step, report.moved)
    elif isinstance(report, PayloadsFetched):
        missing = [trace.number(one.rollout_id) for one in report.missing]
        trace.add("fetched", rank.role, rank.rank, report.step, missing)


def _settled(_: None, steps: Any, rank: Any, step: Any) -> None:
    if step.batch.step not in steps._steps and not rank.role:
        _of[steps].add("ack", step.batch.step)


def _took_over(_: None, step: Any, rank: Any, part: Any) -> None:
    trace = next(one for one in reversed(_now))
    trace.add("over", part.step, rank.rank, trace.micro_batches(part.micro_batches))


def _gives_up(delivery: Any, balancer: Any) -> None:
    lost = min(delivery._everybody, key=lambda rank: rank.give_up_at)
    _of[delivery].add("giveup", lost.rank)


def _gave_up(done: bool, delivery: Any, balancer: Any) -> None:
    if not done:
        _of[delivery].add("kept", None)  # it cannot be: serve ends
    else:
        _of[delivery].add("resize", "", delivery.ranks)


def _sent(_: None, link: Any, batch: Any, *, confirm: bool = False) -> None:
    if link in _of:
        _of[link].sent[link].append(batch.step)
    _said(link, "send", batch.step, batch.micro_batches)


def _said(link: Any, kind: str, step: int | None = None, micro_batches: Any = None, more: Any = None) -> None:
    if link in _of:
        trace = _of[link]
        given = more if micro_batches is None else trace.micro_batches(micro_batches)
        trace.add(kind, link.role, link.rank, step, given)


def _wrap_user(name: str) -> None:
    inner = getattr(StreamBalancer, name)

    @wraps(inner)
    def wrapped(self: StreamBalancer, step: int) -> Any:
        trace = _of_balancer.get(self)
        before = {batch.step for batch in self.in_flight()}
        result = inner(self, step)
        if trace is not None:
            done = before - {batch.step for batch in self.in_flight()}
            for number in sorted(done):
                trace.add("acked", number)
        return result

    setattr(StreamBalancer, name, wrapped)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-traces", type=Path, help="write facts and sends of every serve to this file")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record-traces"):
        _install()
        config.pluginmanager.register(_Writer(config.getoption("--record-traces")))


class _Writer:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._traces: dict[str, str] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        _now.clear()
        _making.clear()
        result = yield
        for number, trace in enumerate(_now):
            if len(trace.events) <= _MOST_EVENTS and any(event[0] == "plan" for event in trace.events):
                text = json.dumps([trace.options, self._cleaned(trace.events)], separators=(",", ":"))
                self._traces.setdefault(text, f"{item.nodeid.removeprefix('tests/')}#{number}")
        return result

    @staticmethod
    def _cleaned(events: list[list[Any]]) -> list[list[Any]]:
        """Without what the serving acknowledges itself: ``acked`` is what the user does."""
        return [
            one
            for one, then in zip(events, [*events[1:], []], strict=True)
            if then != ["ack", *one[1:]] or one[0] != "acked"
        ]

    def pytest_sessionfinish(self) -> None:
        lines = [f'{{"name":{json.dumps(name)},"trace":{text}}}' for text, name in self._traces.items()]
        self._path.write_bytes(gzip.compress("\n".join(sorted(lines)).encode(), 9, mtime=0))
