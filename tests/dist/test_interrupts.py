"""Ctrl-C at any moment, and again and again: nothing is lost, nothing comes twice, nothing hangs.

``python test_interrupts.py RUNS SEED FORM...`` sends SIGINT to a process whose main thread blocks in the library. Each
run is a forked child, so torch is imported once. The child works until everything it put has come out; meanwhile its
parent interrupts it, once or several times in an instant, a moment after it has dealt with the last one. Prints one
JSON line for each run that went wrong, then counts. Without FORM: all of them.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from forked import run_python
from guard import GUARD_S

import stream_balancer as sb
from stream_balancer.testing import BACKENDS, make_rollout

CONFIG = sb.BalancerConfig(dp_size=2, batch_size=4, window=8, capacity=16)
ROLLOUTS = 80
SILENCE_S = 60.0
MOST_INTERRUPTS = 400
"""Of one run, which usually has a hundred. Where nothing is done between two, the storm would never end by itself."""
PRODUCERS = 2
INTERRUPTS: list[int] = []  # of each run


NEWS: list[int] = []
"""Where the child tells its parent: "s" it has started, "i" it has dealt with an interrupt, else what went wrong."""
ATTEMPTING: list[bool] = []
"""Interrupts that are still wanted."""


Attempt = Callable[[], bool]


def survive(attempt: Attempt) -> None:
    """Attempt again, for as long as it is interrupted."""
    while True:
        try:
            try:
                ATTEMPTING.extend([True, True])
                if attempt():
                    ATTEMPTING.clear()
                    return
            except KeyboardInterrupt:
                again()
        except KeyboardInterrupt:  # the second one came while the first was dealt with
            again()


def again() -> None:
    ATTEMPTING.clear()
    os.write(NEWS[0], b"i")


def interrupt(*_: object) -> None:
    """Python's own handler, twice at most in what is attempted above."""
    if ATTEMPTING:
        ATTEMPTING.pop()
        raise KeyboardInterrupt
    os.write(NEWS[0], b"i")


def consume(batches: Callable[[], Iterable[Any]], seen: list[Any]) -> Attempt:
    """Appends all of them; asks for an iterator at each attempt."""

    def attempt() -> bool:
        for batch in batches():
            seen.append(batch)  # noqa: PERF402 - what was appended stays, when it is interrupted
        return True

    return attempt


def put_all(put: Callable[[sb.Rollout], object], rollouts: list[sb.Rollout]) -> Attempt:
    left = list(reversed(rollouts))

    def attempt() -> bool:
        while left:
            with suppress(sb.errors.DuplicateRolloutError):  # an interrupted put was accepted all the same
                put(left[-1])
            del left[-1]
        return True

    return attempt


def some_rollouts(prefix: str, count: int) -> list[sb.Rollout]:
    return [make_rollout(1 + n % 7, f"{prefix}-{n}") for n in range(count)]


def check(seen: list[Any], accepted: list[sb.Rollout], balancer: sb.BlockingBalancer | None = None) -> None:
    came = sorted(r.rollout_id for batch in seen for r in batch.rollouts if not r.is_padding)
    assert came == sorted(r.rollout_id for r in accepted), f"{len(accepted)} accepted, {len(came)} came out"
    if balancer is not None:
        statistics = balancer.statistics()
        assert (statistics.accepted, statistics.waiting) == (len(accepted), 0)


def iterate(rng: random.Random, backend: Any, *, anew: bool) -> Iterator[Attempt]:
    """The main thread iterates, threads put. ``anew``: it asks for another iterator after each interrupt."""
    rollouts, seen = some_rollouts("r", ROLLOUTS), list[Any]()
    with sb.blocking(CONFIG, backend=backend) as balancer:
        pauses = [rng.choice([0, 0, rng.random() * 0.002]) for _ in rollouts]
        ended = threading.Semaphore(0)

        def produce(number: int) -> None:
            for rollout, pause in list(zip(rollouts, pauses, strict=True))[number::PRODUCERS]:
                time.sleep(pause)
                balancer.put(rollout)
            ended.release()

        def end() -> None:
            for _ in range(PRODUCERS):
                ended.acquire()
            balancer.end()

        for target, args in [(end, ()), *((produce, (n,)) for n in range(PRODUCERS))]:
            threading.Thread(target=target, args=args, daemon=True).start()
        batches = None if anew else balancer.batches()
        yield consume(lambda: batches or balancer.batches(), seen)
        check(seen, rollouts, balancer)
    balancer.close()


def put(rng: random.Random, backend: Any) -> Iterator[Attempt]:
    """The main thread puts, a thread iterates."""
    rollouts, seen = some_rollouts("r", ROLLOUTS), list[Any]()
    with sb.blocking(CONFIG, backend=backend) as balancer:
        thread = threading.Thread(target=lambda: seen.extend(balancer.batches()), daemon=True)
        thread.start()
        yield put_all(balancer.put, rollouts)
        balancer.end()
        thread.join()
        check(seen, rollouts, balancer)


def leave(rng: random.Random, backend: Any) -> Iterator[Attempt]:
    """Interrupted while the block is left: closing again finishes it, and what follows says that it is closed."""
    balancer = sb.blocking(CONFIG, backend=backend)
    balancer.__enter__()
    balancer.put(some_rollouts("r", 1)[0])
    yield lambda: balancer.__exit__(None, None, None) or True
    balancer.close()
    with pytest.raises(sb.errors.ClosedResourceError):
        balancer.put(some_rollouts("s", 1)[0])


def feed(rng: random.Random, backend: Any) -> Iterator[Attempt]:
    """The main thread iterates a rank's feed."""
    rollouts, seen = some_rollouts("r", ROLLOUTS), list[Any]()
    transport = sb.TorchTransport.listen(dp_size=1)
    with sb.blocking(CONFIG.replace(dp_size=1, capacity=2 * ROLLOUTS), backend=backend) as balancer:
        served = balancer.serve(transport)
        for rollout in rollouts:
            balancer.put(rollout)
        balancer.end()
        shares = sb.RankFeed(transport.address, rank=0, dp_size=1)
        yield consume(lambda: shares, seen)
        check(seen, rollouts)
        served.result()


def connect(rng: random.Random, backend: Any) -> Iterator[Attempt]:
    """The main thread puts from elsewhere."""
    rollouts = some_rollouts("r", ROLLOUTS)
    transport = sb.TorchTransport.listen(dp_size=2)
    with sb.blocking(CONFIG.replace(capacity=2 * ROLLOUTS), backend=backend) as balancer:
        balancer.serve(transport)
        with sb.connect(transport.address) as producer:
            yield put_all(producer.put, rollouts)
        assert balancer.statistics().accepted == len(rollouts)


FORMS: dict[str, Callable[..., Iterator[Attempt]]] = {
    **{"anew": partial(iterate, anew=True), "on": partial(iterate, anew=False)},
    **{"put": put, "leave": leave, "feed": feed, "connect": connect},
}
"""Each yields what is attempted while it is interrupted."""


def child(form: str, seed: int, news: int) -> None:
    NEWS.append(news)
    signal.signal(signal.SIGINT, interrupt)
    try:
        for attempt in FORMS[form](random.Random(seed), BACKENDS[(seed + list(FORMS).index(form)) % 2]):
            os.write(news, b"s")
            survive(attempt)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except BaseException:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.write(news, traceback.format_exc()[-900:].encode())
        os._exit(1)
    os._exit(0)


def one_run(form: str, seed: int) -> str | None:
    """What went wrong, if anything."""
    rng = random.Random(seed)
    news, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(news)
        child(form, seed, end)
    os.close(end)
    said, sent = os.read(news, 1), 0
    assert said == b"s", "the child did not start"
    while said in (b"s", b"i"):
        if sent < MOST_INTERRUPTS:
            time.sleep(rng.choice([0.0, 0.0001, 0.0005, 0.002, 0.01]))
            for _ in range(rng.choice([1, 1, 1, 2, 3])):
                os.kill(pid, signal.SIGINT)
                sent += 1
                time.sleep(rng.choice([0.0, 0.00002, 0.0001]))
        # again: a signal that comes the moment before a lock is waited for does not end that wait (CPython)
        if not select.select([news], [], [], SILENCE_S / 4)[0]:
            os.kill(pid, signal.SIGINT)
        if not select.select([news], [], [], SILENCE_S)[0]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(news)
            return f"hangs after {sent} interrupts"
        said = os.read(news, 1)  # nothing at its end
    _, status = os.waitpid(pid, 0)
    with os.fdopen(news, "rb") as pipe:
        wrong = (said + pipe.read()).decode(errors="replace")
    INTERRUPTS.append(sent)
    return None if status == 0 else wrong or f"ended with status {status}"


def main(runs: int, seed: int, forms: list[str]) -> int:
    """So many runs of each form; how many went wrong."""
    for backend in BACKENDS:
        with sb.blocking(CONFIG, backend=backend):
            pass  # imports all that a child needs
    bad = 0
    for form in forms:
        for run in range(seed, seed + runs):
            wrong = one_run(form, run)
            if wrong is not None:
                bad += 1
                print(json.dumps({"form": form, "seed": run, "wrong": wrong}), flush=True)  # noqa: T201
    print(json.dumps({"runs": runs * len(forms), "interrupts": sum(INTERRUPTS), "bad": bad}))  # noqa: T201
    return bad


@pytest.mark.parametrize(
    "runs_of_each_form",
    [2, pytest.param(72, marks=pytest.mark.soak)],  # each form on both loops, or more often
)
def test_a_storm_of_interrupts_loses_nothing(runs_of_each_form: int) -> None:
    ended = run_python(__file__, runs_of_each_form, 0, timeout_s=GUARD_S * runs_of_each_form)
    assert ended.returncode == 0, ended.stdout + ended.stderr


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] or list(FORMS)) > 0)
