"""An elastic run of real processes, whose parent decides who dies, and checks what was trained.

A controller, three ranks and a producer run for as long as there are faults to come. The parent holds what a trainer's
collectives and file system would: ranks meet through it, and it keeps the weights that they save. So it knows the
rollouts of every gradient, and can have a process killed at the moment that a test asks for.

Weights are a vector of float64. A step's gradient depends on the weights and on the tokens of its rollouts, so one
rollout too many, too few or with other tokens is seen in all later weights.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import logging
import os
import random
import re
import signal
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import numpy as np
import torch
from forked import free_port
from guard import GUARD_S
from processes import Child

import stream_balancer as sb
from stream_balancer.client.step import End
from stream_balancer.host.checkpoint import read_state_dict
from stream_balancer.net import connection

RANKS, SIZE, PUTS = 3, 4, 24
STEP_WIDTH = 0.05
STOP_S = 3.0
STALL_S = 60.0
"""Seconds without a meeting after which a run has failed. A rank's stop or loss holds one up for five at most."""
POINTS = ("before finish", "before the meeting", "in the meeting", "after the meeting")

State = dict[str, int]
Vector = list[float]
NEW: tuple[State, Vector] = ({"next_step": 0, "attempt": 0}, [0.25] * SIZE)
"""Weights of a run that begins, and what they contain."""


# rollouts and their gradients


def rollout(number: int) -> sb.Rollout:
    """The same in every process."""
    ids, mask = tokens(number)
    return sb.Rollout(
        tokens={"input_ids": torch.from_numpy(ids), "loss_mask": torch.from_numpy(mask)}, rollout_id=str(number)
    )


def tokens(number: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Tokens and loss mask of a rollout. One in three is long enough for another way than a socket."""
    length = 4 + number * 7919 % 37 + (number % 3 == 0) * 100
    places = np.arange(length)
    # nothing predicts the first token
    return (number * 31 + places * 17) % 1009, ((places + number) % 5 > 0) & (places > 0)


def gradient(weights: Any, ids: Any, mask: Any) -> Any:
    """A sum over the trained tokens of one rollout, and not a mean."""
    waves = np.sin(weights[:, None] + np.arange(1, SIZE + 1)[:, None] * ids[None, :])
    return (waves * mask).sum(axis=1)


def updated(weights: Any, total: Any, loss_tokens: int) -> Any:
    """The weights after a step."""
    return weights - STEP_WIDTH * total / loss_tokens


# processes of the run


def run_controller(folder: Path, port: int, movers: list[str], options: dict[str, Any], pipe: Any) -> None:
    """Serves until all is acknowledged. ``options``: a journal, checkpoints, and how long a lost rank is waited for."""
    logging.basicConfig(filename=folder / "controller.log", format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    connection.MOVER_BYTES = 256  # whatever is larger goes by a mover
    config = sb.BalancerConfig(dp_size=RANKS, batch_size=8, window=16, capacity=48)
    saved = folder / "balancer.pt"

    async def main() -> None:
        async with (
            sb.StreamBalancer(
                config, journal=folder / "journal" if options["journal"] else None, num_producers=1
            ) as balancer,
            sb.TorchTransport.listen(dp_size=RANKS, port=port, movers=movers) as transport,
            anyio.create_task_group() as tasks,
        ):
            balancer.observers.append(Events(folder))
            if options["checkpoints"]:
                if saved.exists():
                    balancer.load_state_dict(torch.load(saved, weights_only=True))
                tasks.start_soon(save_for_ever, balancer, saved)
            await sb.serve(balancer, transport, on_rank_loss="replan", rejoin_timeout_s=options["rejoin_timeout_s"])
            tasks.cancel_scope.cancel()

    told(pipe, lambda: anyio.run(main))


class Events(sb.Observer):
    """Writes down what is accepted and evicted, one line each."""

    def __init__(self, folder: Path) -> None:
        self._file = appended(folder / "events")
        self.news = anyio.Event()

    def accepted(self, rollouts: Sequence[sb.Rollout], now: float) -> None:
        os.write(self._file, "".join(f"accepted {one.rollout_id}\n" for one in rollouts).encode())

    def evicted(self, rollout: sb.Rollout, reason: str) -> None:
        os.write(self._file, f"evicted {rollout.rollout_id} {reason}\n".encode())

    def acknowledged(self, batch: sb.Batch) -> None:
        self.news.set()
        self.news = anyio.Event()


async def save_for_ever(balancer: sb.StreamBalancer, path: Path) -> None:
    """A checkpoint of the balancer each time a step was acknowledged, if the last one is on the disk."""
    events = next(one for one in balancer.observers if isinstance(one, Events))
    new = path.with_suffix(".new")
    while True:
        await events.news.wait()
        state = await balancer.async_state_dict()
        await anyio.to_thread.run_sync(torch.save, state, new)
        new.replace(path)


def run_producer(address: str, folder: Path, again: list[int], options: dict[str, Any], pipe: Any) -> None:
    """Puts ``again``, then new rollouts until it is told to stop. It writes down what it begins to put."""
    logging.disable()
    torch.set_num_threads(1)
    begun = folder / "begun"
    first = max((int(line) for line in begun.read_text().split()), default=-1) + 1 if begun.exists() else 0
    file = appended(begun)

    async def main() -> None:
        is_over = False

        def numbers() -> Iterable[int]:
            yield from again
            for number in itertools.count(first):
                if is_over:
                    return
                os.write(file, f"{number}\n".encode())
                yield number

        async def put_all(todo: Any) -> None:
            for number in todo:
                with suppress(sb.errors.DuplicateRolloutError):  # it was accepted before a process was killed
                    await producer.put(rollout(number))

        async with sb.connect(address, **options) as producer:
            todo = iter(numbers())
            async with anyio.create_task_group() as tasks:
                for _ in range(PUTS):
                    tasks.start_soon(put_all, todo)
                await anyio.to_thread.run_sync(pipe.recv)
                is_over = True
            await producer.end()

    told(pipe, lambda: anyio.run(main))


def run_rank(address: str, rank: int, loaded: tuple[State | None, Vector], options: dict[str, Any], pipe: Any) -> None:
    """The loop of docs/elastic.md. ``loaded``: weights, and what they contain; None: it does not say."""
    logging.disable()
    torch.set_num_threads(1)
    told(pipe, lambda: Trainer(address, rank, loaded, options, pipe).run())


class Trainer:
    """A rank, which asks its parent at every point where it may be killed."""

    def __init__(
        self, address: str, rank: int, loaded: tuple[State | None, Vector], options: dict[str, Any], pipe: Any
    ) -> None:
        self._pipe = pipe
        state, weights = loaded
        join: dict[str, Any] = {} if state is None else {"next_step": state}
        self._state, self._weights = state or NEW[0], np.array(weights)
        self._feed = sb.RankFeed(address, rank=rank, dp_size=RANKS, **join, **options)

    def _ask(self, *words: Any) -> Any:
        self._pipe.send(words)
        return self._pipe.recv()

    def run(self) -> None:
        while True:
            try:
                for step in self._feed:
                    self._train(step)
                self._pipe.send(("ended", self._state, self._weights.tolist()))
                return
            except sb.errors.RankLostError as error:
                if error.cause != "other ranks have trained without it":
                    raise
                self._state, weights = self._ask("behind", error.step, str(error))
                self._weights = np.array(weights)
                self._feed.load_state_dict(self._state)
            except sb.errors.RefusedError as error:
                self._pipe.send(("refused", str(error)))
                return

    def _train(self, step: sb.Step) -> None:
        total, ids = np.zeros(SIZE), []
        for micro_batch in step:
            for one in micro_batch.rollouts:
                mask = one.tokens["loss_mask"].numpy()
                total += gradient(self._weights, one.tokens["input_ids"].numpy(), mask)
                ids += [] if one.is_padding else [int(one.rollout_id)]
        self._ask("computed", step.step)
        end = step.finish()
        if end is None:
            self._ask("planned again", step.step)
            return
        after = self._feed.state_dict()
        self._ask("finished", step.step, after["attempt"])
        total = self._ask("meet", after, end, self._state, ids, total.tolist())
        if total is None:
            step.failed()
            return
        self._weights, self._state = updated(self._weights, np.array(total), end.loss_tokens), after
        self._ask("applied", after, self._weights.tolist())


def told(pipe: Any, work: Callable[[], object]) -> None:
    """An error of a process is told to its parent."""
    try:
        work()
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        raise
    pipe.send(("done",))


def appended(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)


# the parent


class Life:
    """A process of the run, from its start to its death."""

    def __init__(self, name: str, child: Child, rank: int | None = None) -> None:
        self.name, self.child, self.rank = name, child, rank
        self.computed: set[int] = set()
        """Steps that it has computed."""
        self.meetings = 0
        self.is_killed = self.is_over = False
        self.is_held = False
        """It does not go on before it dies."""
        self.own_weights = False
        """It began with weights that others may have trained past."""

    @property
    def is_alive(self) -> bool:
        return not self.is_killed and not self.is_over

    def answer(self, word: Any) -> None:
        with suppress(OSError):  # it was killed
            self.child.pipe.send(word)


@dataclass
class Meeting:
    """A collective of some ranks."""

    end: End
    base: State
    parts: dict[int, tuple[Life, list[int], Vector]] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)
    is_failed: bool = False


class Gradient(NamedTuple):
    """What a meeting agreed on."""

    base: State
    ids: list[int]
    loss_tokens: int


class Fault(NamedTuple):
    """A rank's death that is to come."""

    rank: int
    point: str
    """One of ``POINTS``."""
    is_exact: bool
    """The rank does not go on before it dies."""
    delay_s: float


class Drill:
    """A run, and its faults.

    ``victim``: who is killed, "rank", "producer", "controller" (which has a journal), or "all" (which go back to
    checkpoints); or "any", and ``stops``: it is stopped for three seconds.
    """

    def __init__(
        self, folder: Path, seed: int, victim: str, faults: int, movers: list[str], *,
        stops: bool = False, hand_over: str = "balancer",
    ) -> None:  # fmt: skip
        self.folder, self.seed, self.victim, self.faults, self.stops = folder, seed, victim, faults, stops
        self.chance = random.Random(seed)
        self.port = free_port()
        self.address = f"tcp://127.0.0.1:{self.port}"
        is_restarted = victim == "controller"
        self.movers = movers
        self.hand_over = hand_over
        self.controls = {"journal": is_restarted, "checkpoints": victim == "all", "rejoin_timeout_s": 0.6}
        self.produces = {"hand_over": hand_over, "rejoin": is_restarted}
        self.joins = {"movers": movers, "rejoin": is_restarted}
        self.lives: dict[str, Life] = {}
        self.everyone: list[Life] = []
        self.saved: dict[int, tuple[State, Vector]] = {}
        """By rank: its newest weights."""
        self.weights: dict[tuple[int, int], Vector] = {(0, 0): NEW[1]}
        """By content."""
        self.meetings: dict[tuple[int, int], Meeting] = {}
        self.gradients: dict[tuple[int, int], Gradient] = {}
        self.entered: dict[tuple[int, tuple[int, int]], Life] = {}
        """By rank, step and attempt: the process that was told to meet."""
        self.ended: dict[int, tuple[State, Vector]] = {}
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()
        self.fault: Fault | None = None
        self.done = 0
        self.counts: Counter[str] = Counter()
        self.log: deque[str] = deque(maxlen=120)
        self.began = self.moved = time.monotonic()
        self.quiet = 0
        """Meetings of all ranks since the last fault."""
        self.is_busy = self.is_ending = False

    # time

    def note(self, text: str) -> None:
        self.log.append(f"{time.monotonic() - self.began:8.3f} {text}")

    def later(self, seconds: float, job: Callable[[], None]) -> None:
        heapq.heappush(self.timers, (time.monotonic() + seconds, next(self.numbers), job))

    def run(self, guard_s: float) -> Counter[str]:
        """Until all faults have come and all is trained. -> what happened, counted."""
        try:
            self._start_controller()
            for rank in range(RANKS):
                self._start_rank(rank, NEW)
            self._start_producer([])
            while not self._is_over:
                self._turn()
                now = time.monotonic()
                assert now < self.began + guard_s, "the run takes too long"
                assert now < self.moved + STALL_S, "the run has stalled"
            self._check()
        except BaseException as error:
            error.add_note(self._report())
            raise
        finally:
            for life in self.everyone:
                with suppress(ProcessLookupError):
                    life.child.kill(signal.SIGCONT)
                life.child.__exit__()
        return self.counts

    def _report(self) -> str:
        log = self.folder / "controller.log"
        controller = log.read_text().splitlines()[-25:] if log.exists() else []
        where = [f"{one.name}: {'alive' if one.is_alive else 'gone'}" for one in self.lives.values()]
        meetings = [f"open meeting {key}: {one.end.ranks}, there {[*one.parts]}" for key, one in self.meetings.items()]
        head = f"seed {self.seed}, victim {self.victim}, movers {self.movers}, fault {self.done} of {self.faults}"
        return "\n".join([head, *self.log, *where, *meetings, "log of the controller:", *controller])

    @property
    def _is_over(self) -> bool:
        return self.is_ending and all(life.is_over for life in self.lives.values())

    def _turn(self) -> None:
        until = self.timers[0][0] - time.monotonic() if self.timers else 1.0
        ready = {life.child.pipe: life for life in self.lives.values() if life.is_alive}
        for pipe in wait([*ready], max(0.0, min(until, 1.0))):
            life = ready[pipe]  # type: ignore[index]
            if pipe.poll():  # an earlier one may have had all of them heard
                self._hear(life)
        while self.timers and self.timers[0][0] <= time.monotonic():
            heapq.heappop(self.timers)[2]()

    def _hear(self, life: Life) -> None:
        if not life.is_alive:
            return
        try:
            words = life.child.pipe.recv()
        except (EOFError, OSError):
            life.child.process.join(GUARD_S)
            raise AssertionError(f"{life.name} ended by itself: {life.child.process.exitcode}") from None
        match words:
            case ("error", text):
                raise AssertionError(f"{life.name} failed:\n{text}")
            case ("done",):
                life.is_over = True
                self.note(f"{life.name} is through")
            case ("ended", state, weights):
                self.ended[life.rank or 0] = state, weights
                assert self.is_ending, f"{life.name} ended early"
            case ("refused", text):
                self._refused(life, text)
            case ("behind", step, text):
                self._behind(life, step, text)
            case ("computed", step):
                life.computed.add(step)
                self._at(life, POINTS[0])
            case ("planned again", step):
                self.counts["planned again"] += 1
                self.note(f"{life.name}: step {step} is planned again")
                life.answer("go")
            case ("finished", step, attempt):
                self.entered.setdefault((life.rank or 0, (step, attempt)), life)
                self._at(life, POINTS[1])
            case ("meet", after, end, base, ids, part):
                self._meet(life, after, end, base, ids, part)
            case ("applied", state, weights):
                self._applied(life, state, weights)
            case _:
                raise AssertionError(words)

    # processes

    def _start(self, name: str, target: Callable[..., object], *args: Any, rank: int | None = None) -> Life:
        life = self.lives[name] = Life(name, Child(target, *args), rank)
        self.everyone.append(life)
        if len(self.everyone) > 20:  # of the dead nothing is needed
            for old in [one for one in self.everyone if one.is_killed]:
                old.child.__exit__()
                self.everyone.remove(old)
        self.note(f"{name} starts")
        return life

    def _start_controller(self) -> None:
        self._start("controller", run_controller, self.folder, self.port, self.movers, self.controls)

    def _start_producer(self, again: list[int]) -> None:
        self._start("producer", run_producer, self.address, self.folder, again, self.produces)

    def _start_rank(self, rank: int, loaded: tuple[State | None, Vector], *, own: bool = False) -> None:
        life = self._start(f"rank {rank}", run_rank, self.address, rank, loaded, self.joins, rank=rank)
        life.own_weights = own
        self.note(f"rank {rank} has loaded {loaded[0]}")

    def _rank(self, rank: int) -> Life | None:
        life = self.lives.get(f"rank {rank}")
        return life if life is not None and life.is_alive else None

    def _living(self) -> list[int]:
        return [rank for rank in range(RANKS) if self._rank(rank) is not None]

    def _kill(self, life: Life, why: str) -> None:
        if not life.is_alive:
            return
        self.note(f"{life.name} is killed {why}")
        life.is_killed = True
        with suppress(ProcessLookupError):  # it has failed, since another was killed
            life.child.kill()
        life.child.process.join(GUARD_S)
        for meeting in [*self.meetings.values()]:
            if life.rank in meeting.end.ranks and life.rank not in meeting.parts:
                self._fail(meeting)

    # what ranks ask

    def _at(self, life: Life, point: str) -> None:
        if not self._strikes(life, point):
            life.answer("go")

    def _strikes(self, life: Life, point: str) -> bool:
        """Whether this rank will not go on from here."""
        fault = self.fault
        if fault is None or (fault.point, fault.rank) != (point, life.rank):
            return False
        self.fault, life.is_held = None, fault.is_exact
        self.later(fault.delay_s, partial(self._lose_rank, life, point))
        return fault.is_exact

    def _meet(self, life: Life, after: State, end: Any, base: State, ids: list[int], part: Vector) -> None:
        assert life.rank is not None
        step, attempt = after["next_step"] - 1, after["attempt"]
        # with direct hand-over no weights contain a step whose payloads are all lost
        is_gap = base["next_step"] < step and self.hand_over == "direct"
        assert base["next_step"] == step or is_gap, f"{life.name} trains step {step} on weights of {base}"
        key = step, attempt
        # one that died may have met: another process of its rank must not meet under the same number
        first = self.entered.setdefault((life.rank, key), life)
        assert first is life, f"two processes of {life.name} meet as {key}"
        is_held = self._strikes(life, POINTS[2])
        if is_held and self.chance.random() < 0.5:
            return  # it dies before it has given its part
        meeting = self.meetings.get(key)
        if meeting is None:
            meeting = self.meetings[key] = Meeting(end, base)
            # one that died after the ranks were told to meet; a new process of it has not computed this attempt
            there = [self._rank(rank) for rank in end.ranks]
            meeting.is_failed = not all(one is not None and step in one.computed for one in there)
        assert (meeting.end, meeting.base) == (end, base), f"{life.name} meets as {end} on {base}: {meeting}"
        assert life.rank in end.ranks
        assert life.rank not in meeting.parts, f"{life.name} meets twice as {key}"
        meeting.parts[life.rank] = life, ids, part
        if meeting.is_failed:
            self._fail(meeting)
        elif len(meeting.parts) == len(end.ranks):
            self._complete(key, meeting)

    def _fail(self, meeting: Meeting) -> None:
        """Those that are there see an error, now or when a collective would, and those that come later."""
        meeting.is_failed = True
        self.later(self.chance.choice([0.0, 0.0, self.chance.uniform(0.0, 0.3)]), partial(self._tell_failure, meeting))

    def _tell_failure(self, meeting: Meeting) -> None:
        for rank, (life, *_) in meeting.parts.items():
            if life.is_alive and not life.is_held and rank not in meeting.answered:
                meeting.answered.add(rank)
                self.counts["failed meetings"] += 1
                self.note(f"{life.name}: its meeting failed")
                life.answer(None)

    def _complete(self, key: tuple[int, int], meeting: Meeting) -> None:
        end, members = meeting.end, [*meeting.parts.items()]
        ids = [one for _, (_, its, _) in members for one in its]
        assert len(ids) == len(set(ids)) == end.rollouts, f"{key}: {end}, {sorted(ids)}"
        assert sum(loss_tokens(one) for one in ids) == end.loss_tokens, f"{key}: {end}, {sorted(ids)}"
        total = np.sum([part for _, (*_, part) in members], axis=0).tolist()
        self.meetings = {other: one for other, one in self.meetings.items() if other[0] >= key[0] and other != key}
        self.gradients[key] = Gradient(meeting.base, ids, end.loss_tokens)
        self.moved = time.monotonic()
        # a collective may fail on some only, above all if one of them dies in it
        draw, failing = self.chance.random(), set[int]()
        if not all(life.is_alive and not life.is_held for _, (life, *_) in members):
            failing = {rank for rank in end.ranks if draw < 1 / 3 or (draw < 2 / 3 and self.chance.random() < 0.5)}
        elif draw < 0.01:
            failing = {rank for rank in end.ranks if draw < 0.004 or self.chance.random() < 0.5}
        if failing:
            self.note(f"step {key[0]}: the meeting fails on ranks {sorted(failing)} of {end.ranks}")
            self.counts["half-failed meetings"] += 1
        for rank, (life, *_) in members:
            life.meetings += 1
            if life.is_alive and not life.is_held:
                life.answer(None if rank in failing else total)
        self.quiet += len(members) == RANKS and not failing
        self.counts["meetings"] += 1
        self._go_on()

    def _applied(self, life: Life, state: State, weights: Vector) -> None:
        key = state["next_step"], state["attempt"]
        assert self.weights.setdefault(key, weights) == weights, f"{life.name}: other weights of {key}"
        assert life.rank is not None
        self.saved[life.rank] = state, weights
        self._at(life, POINTS[3])

    def _behind(self, life: Life, step: int, text: str) -> None:
        # whoever is named has saved before it said that it was through
        for other in [one for one in self.lives.values() if one is not life and one.is_alive and one.rank is not None]:
            while other.is_alive and other.child.pipe.poll():
                self._hear(other)
        named = re.search(r"Load the weights of rank (\d+)", text)
        assert named is not None, text
        order = [int(named[1]), *self._living(), *range(RANKS)]
        found = next(
            (self.saved[one] for one in order if one in self.saved and self.saved[one][0]["next_step"] > step), None
        )
        assert found is not None, f"{life.name}: nobody has saved step {step}: {text}"
        assert life.rank is not None
        self.saved[life.rank] = found
        self.counts["behind"] += 1
        self.note(f"{life.name} lacks step {step}, and loads {found[0]}")
        life.answer(found)

    def _refused(self, life: Life, text: str) -> None:
        self.note(f"{life.name} is refused: {text}")
        self.counts["refused"] += 1
        assert life.own_weights, f"{life.name} is refused, with weights of a living rank: {text}"
        assert life.rank is not None
        life.is_killed = True
        life.child.process.join(GUARD_S)
        self._start_rank(life.rank, self._weights_of_others(life.rank))

    # faults

    def _go_on(self) -> None:
        """The next fault, if the run is as it was before the last."""
        if self.is_ending or self.fault is not None or self.is_busy:
            return
        everybody = [self.lives.get(name) for name in ("controller", "producer", *map("rank {}".format, range(RANKS)))]
        if not all(life is not None and life.is_alive for life in everybody):
            return
        if self.quiet < 2 or any(
            life is not None and life.rank is not None and not life.meetings for life in everybody
        ):
            return
        self.quiet = 0
        if self.done == self.faults:
            self.is_ending = True
            self.note("the producer is to end")
            self.lives["producer"].answer("stop")
            return
        self.done += 1
        self.is_busy = True
        self.later(self.chance.uniform(0.0, 0.15), self._arm)

    def _arm(self) -> None:
        self.is_busy = False
        chance = self.chance
        victim = self.victim if self.victim != "any" else chance.choice(["rank", "rank", "producer", "controller"])
        target = chance.randrange(RANKS)
        if self.stops:
            name = f"rank {target}" if victim == "rank" else victim
            self._stop(self.lives[name])
        elif victim == "rank":
            is_exact = chance.random() < 0.6
            delay_s = chance.choice([0.0, chance.uniform(0.0, 0.03)])
            self.fault = Fault(target, chance.choice(POINTS), is_exact, delay_s)
            self.note(f"rank {target} is to die {self.fault.point}")
        elif victim == "producer":
            self._lose_producer()
        elif victim == "controller":
            self._lose_controller(target)
        else:
            self._lose_all()

    def _stop(self, life: Life) -> None:
        self.note(f"{life.name} is stopped")
        self.counts[f"stops of {life.name.split()[0]}"] += 1
        life.child.kill(signal.SIGSTOP)
        self.is_busy = True

        def resume() -> None:
            self.note(f"{life.name} goes on")
            self.is_busy, self.quiet = False, 0
            life.child.kill(signal.SIGCONT)

        self.later(STOP_S, resume)

    def _lose_rank(self, life: Life, point: str) -> None:
        assert life.rank is not None
        self.counts[f"kills of rank, {point}"] += 1
        self._kill(life, point)
        rank, chance = life.rank, self.chance
        # a second rank may die before the first is back, and the third goes on
        others = [one for one in self._living() if (other := self._rank(one)) is not None and other.meetings]
        if point != "overlap" and len(others) == 2 and chance.random() < 0.15:
            second = self._rank(chance.choice(others))
            assert second is not None
            self.later(chance.uniform(0.0, 1.0), partial(self._lose_second, second))
        if chance.random() < 0.65:
            self.later(chance.choice([0.0, 0.0, chance.uniform(0.0, 0.4)]), partial(self._return, rank))
        else:
            self.later(chance.uniform(0.8, 1.2), partial(self._return, rank))

    def _lose_second(self, life: Life) -> None:
        others = [one for one in self._living() if one != life.rank]
        if life.is_alive and others and not self.is_ending:
            self._lose_rank(life, "overlap")

    def _return(self, rank: int) -> None:
        """A new process, with weights of a living rank, of its own, or with new ones."""
        if self._rank(rank) is not None:
            return
        draw = self.chance.random()
        if draw < 0.55:
            self._start_rank(rank, self._weights_of_others(rank))
        elif draw < 0.85 and rank in self.saved:
            self._start_rank(rank, self.saved[rank], own=True)
        else:
            self._start_rank(rank, (None, NEW[1]), own=True)

    def _weights_of_others(self, rank: int) -> tuple[State, Vector]:
        there = [self.saved[one] for one in self._living() if one in self.saved and one != rank]
        found = self.chance.choice(there) if there else self.saved.get(rank, NEW)
        self.saved[rank] = found
        return found

    def _lose_producer(self) -> None:
        self.counts["kills of producer"] += 1
        self._kill(self.lives["producer"], "")
        self.later(self.chance.uniform(0.0, 0.3), lambda: self._start_producer(self._unsure()))

    def _unsure(self) -> list[int]:
        """Rollouts that were begun and are in no weights: they may have been accepted."""
        newest = max(
            (self.saved[one][0] for one in self._living() if one in self.saved), key=lambda one: one["next_step"]
        )
        trained = {one for gradient in self._lineage(newest) for one in gradient.ids}
        return [one for one in self._begun() if one not in trained]

    def _begun(self) -> list[int]:
        path = self.folder / "begun"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def _lose_controller(self, target: int) -> None:
        self.counts["kills of controller"] += 1
        self._kill(self.lives["controller"], "")
        if self.chance.random() < 0.3:  # and a rank soon after
            life = self._rank(target)
            if life is not None:
                self.later(self.chance.uniform(0.0, 0.4), partial(self._lose_rank, life, "overlap"))
        self.later(self.chance.choice([0.0, self.chance.uniform(0.0, 0.5)]), self._start_controller)

    def _lose_all(self) -> None:
        """The controller dies, and all go back to its last checkpoint."""
        self.counts["kills of controller"] += 1
        lives = [life for life in self.lives.values() if life.is_alive]
        longest = max((state for state, _ in self.saved.values()), key=lambda one: one["next_step"])
        self._kill(self.lives["controller"], "and all go back")
        for life in lives:
            self._kill(life, "to go back")
        self.meetings.clear()
        path, first = self.folder / "balancer.pt", 0
        if path.exists():
            snapshot, _ = read_state_dict(torch.load(path, weights_only=True))
            first = min((batch.step for batch in snapshot.in_flight), default=snapshot.next_step)
        # as the ranks have saved it at that time
        state = longest
        while state["next_step"] > first:
            state = self.gradients[state["next_step"] - 1, state["attempt"]].base
        loaded = state, self.weights[state["next_step"], state["attempt"]]
        assert state["next_step"] == first
        self.note(f"all go back from {longest} to {state}")
        self.saved = dict.fromkeys(range(RANKS), loaded)
        self._start_controller()
        for rank in range(RANKS):
            self._start_rank(rank, loaded)
        self._start_producer(self._unsure())

    # the end

    def _lineage(self, state: State) -> list[Gradient]:
        """Gradients in these weights, the newest first."""
        found = []
        while state["next_step"]:
            found.append(self.gradients[state["next_step"] - 1, state["attempt"]])
            assert found[-1].base["next_step"] < state["next_step"]
            state = found[-1].base
        return found

    def _check(self) -> None:
        finals = [self.ended[rank] for rank in range(RANKS)]
        assert all(one == finals[0] for one in finals), f"ranks end with other weights: {finals}"
        lineage = self._lineage(finals[0][0])[::-1]
        self._check_rollouts([one for gradient in lineage for one in gradient.ids])
        assert "no weights contain" not in (self.folder / "controller.log").read_text(), (
            "a checkpoint is said to be lost"
        )
        weights = np.array(NEW[1])
        states = [*[one.base for one in lineage[1:]], finals[0][0]]
        for state, made in zip(states, lineage, strict=True):
            total = np.sum([gradient(weights, *tokens(one)) for one in sorted(made.ids)], axis=0)
            weights = updated(weights, total, made.loss_tokens)
            np.testing.assert_allclose(self.weights[state["next_step"], state["attempt"]], weights, rtol=1e-6)
        np.testing.assert_allclose(finals[0][1], weights, rtol=1e-6)
        for life in self.lives.values():
            life.child.process.join(GUARD_S)
            assert life.child.process.exitcode == 0, life.name
        self.counts["steps"], self.counts["seconds"] = len(lineage), round(time.monotonic() - self.began)

    def _check_rollouts(self, trained: list[int]) -> None:
        accepted, evicted = Counter[int](), Counter[int]()
        for line in (self.folder / "events").read_text().splitlines():
            match line.split():
                case ("accepted", number):
                    accepted[int(number)] += 1
                case ("evicted", number, _):
                    evicted[int(number)] += 1
        twice = [one for one, times in Counter(trained).items() if times > 1]
        assert not twice, f"trained more than once: {twice}"
        begun = set(self._begun())
        lost = begun - set(trained) - set(evicted)
        assert not lost, f"neither trained nor evicted: {sorted(lost)}"
        self.counts["evicted"] = evicted.total()
        if self.victim in ("rank", "producer", "any"):  # one controller, which has seen all
            assert begun == set(accepted)
            assert accepted == Counter(trained) + evicted
        if self.hand_over == "balancer":
            assert not evicted


@functools.cache
def loss_tokens(number: int) -> int:
    return int(tokens(number)[1].sum())
