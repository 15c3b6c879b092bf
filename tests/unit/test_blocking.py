"""The blocking face: threads put, a plain loop trains. Real threads, real time, no sleeps."""

from __future__ import annotations

import _thread
import gc
import inspect
import operator
import os
import signal
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import dropwhile
from typing import Any

import pytest
from helpers import config

import stream_balancer as sb
from stream_balancer import facade
from stream_balancer.testing import BACKENDS, make_rollout, make_rollouts


def fill(balancer: sb.BlockingBalancer, count: int) -> None:
    for rollout in make_rollouts([2] * count):
        balancer.put(rollout)


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_put_and_a_plain_loop_trains(backend: Any) -> None:
    with sb.blocking(config(), backend=backend) as balancer, ThreadPoolExecutor(8) as pool:

        def work(n: int) -> None:
            for rollout in make_rollouts(range(1, 11), prefix=f"{n}-"):
                balancer.put(rollout)

        def end_after(futures: list[Any]) -> None:
            for future in futures:
                future.result()
            balancer.end()

        ending = pool.submit(end_after, [pool.submit(work, n) for n in range(7)])
        names = [r.rollout_id for batch in balancer.batches() for r in batch.rollouts if not r.is_padding]
        ending.result()
        assert sorted(names) == sorted(f"{n}-{k}" for n in range(7) for k in range(10))
        assert balancer.statistics().acknowledged == 70
        assert repr(balancer).startswith("BlockingBalancer(StreamBalancer(0 wait, window 6, ended")


@pytest.mark.parametrize("backend", BACKENDS)
def test_errors_cross_the_threads(backend: Any) -> None:
    with sb.blocking(config(window=4, capacity=4), backend=backend) as balancer:
        fill(balancer, 4)
        with pytest.raises(sb.errors.WouldBlock):
            balancer.put_nowait(make_rollout(2))
        with pytest.raises(sb.errors.DuplicateRolloutError):
            balancer.put(make_rollout(2, "r0"))
        balancer.reconfigure(capacity=8)
        balancer.put_group([make_rollout(2, "a", group_id="g"), make_rollout(2, "b", group_id="g")])
        balancer.set_version(3)
        assert balancer.statistics().version == 3
        batch = next(iter(balancer.batches(auto_ack=False)))
        balancer.acknowledge(batch.step)
        balancer.end()
        with pytest.raises(sb.errors.ClosedResourceError):
            balancer.put(make_rollout(2))


def test_what_serving_raises_comes_out_at_the_end() -> None:
    transport = sb.TorchTransport.listen(dp_size=3)

    def run() -> None:
        with sb.blocking(config()) as balancer:
            assert "dp_size=3 ranks" in str(balancer.serve(transport).exception())

    with pytest.raises(ValueError, match="dp_size=3 ranks"):
        run()


@pytest.mark.parametrize("backend", BACKENDS)
def test_after_the_block_it_is_closed(backend: Any) -> None:
    with sb.blocking(config(), backend=backend) as balancer:
        batches = balancer.batches()
    balancer.close()
    balancer.close()
    for use in (
        lambda: balancer.put(make_rollout(2)),
        lambda: next(batches),
        balancer.statistics,
        balancer.end,
    ):
        with pytest.raises(sb.errors.ClosedResourceError, match="closed"):
            use()
    with pytest.raises(RuntimeError, match="entered once"):
        balancer.__enter__()


def interrupted(wait: Callable[[], object], until: Callable[[], bool]) -> None:
    """A real Ctrl-C once the main thread waits; see tests/dist/test_interrupts.py for other moments."""

    entered, raised = threading.Event(), threading.Event()

    def interrupt() -> None:
        entered.wait()
        while not until():
            pass
        # again: a signal that comes the moment before a lock is waited for does not end that wait (CPython)
        while not raised.is_set():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            raised.wait(10)

    def wait_now() -> None:
        entered.set()
        wait()

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        wait_now()
    raised.set()
    thread.join()


@pytest.mark.parametrize("siblings", [0, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_interrupted_put_was_not_accepted(backend: Any, siblings: int) -> None:
    late = [make_rollout(2, f"late{n}", group_id="g" if siblings else None) for n in range(siblings or 1)]
    with sb.blocking(config(window=4, capacity=4), backend=backend) as balancer:
        fill(balancer, 4)
        put: Callable[[], object] = lambda: balancer.put_group(late) if siblings else balancer.put(late[0])  # noqa: E731
        interrupted(put, lambda: balancer.statistics().blocked_puts > 0)
        assert balancer.statistics().blocked_puts == 0
        batches = balancer.batches()
        assert next(batches).num_rollouts == 4
        put()
        with pytest.raises(sb.errors.DuplicateRolloutError):
            put()
        balancer.end()
        assert sorted(r.rollout_id for r in next(batches).rollouts if not r.is_padding) == [r.rollout_id for r in late]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_interrupted_reservation_keeps_no_place(backend: Any) -> None:
    with sb.blocking(
        config(staleness=sb.Staleness(max_versions=0), batch_size=2, window=2), backend=backend
    ) as balancer:
        balancer.set_version(0)
        with balancer.reserve(2):
            interrupted(balancer.reserve().__enter__, lambda: balancer.statistics().blocked_reserves > 0)
            assert balancer.statistics().reserved == 2
        with balancer.reserve(2):
            assert balancer.statistics().reserved == 2


def test_a_handler_of_signals_that_raises_nothing_takes_no_call_back() -> None:
    heard = threading.Event()
    before = signal.signal(signal.SIGINT, mine := lambda *_: heard.set())
    try:
        with sb.blocking(config(window=4, capacity=4)) as balancer, ThreadPoolExecutor(1) as pool:
            fill(balancer, 4)

            def interrupt_and_make_room() -> None:
                while not balancer.statistics().blocked_puts:
                    pass
                # again: a signal that comes the moment before a lock is waited for does not end that wait (CPython)
                while not heard.is_set():
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                    heard.wait(10)
                assert balancer.statistics().blocked_puts == 1
                next(balancer.batches())

            told = pool.submit(interrupt_and_make_room)
            balancer.put(make_rollout(2, "late"))
            told.result()
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_timeout_means_that_it_did_not_happen() -> None:
    with sb.blocking(config(window=4, capacity=4)) as balancer:
        fill(balancer, 4)
        with pytest.raises(TimeoutError, match=r"within 0.01 s, and was taken back"):
            balancer.put(make_rollout(2, "late"), timeout_s=0.01)
        assert next(balancer.batches()).num_rollouts == 4
        balancer.put(make_rollout(2, "late"))


ASYNC_ONLY = {  # for the event loop
    "aclose": "close",
    "async_state_dict": "state_dict",
    "parts": "balancer",
}


@pytest.mark.parametrize(
    ("whole", "blocking", "instead"),
    [
        (sb.StreamBalancer(config()), sb.blocking(config()), ASYNC_ONLY),
        (sb.Producer, sb.BlockingProducer, {"aclose": "close", "blocking": "put"}),
    ],
)
def test_the_blocking_forms_have_all_that_the_others_have(whole: Any, blocking: Any, instead: dict[str, str]) -> None:
    names, here = ({name for name in dir(one) if not name.startswith("_")} for one in (whole, blocking))
    assert names - here == instead.keys()
    assert set(instead.values()) <= here
    for name in names & here:
        method, other = getattr(whole, name), getattr(blocking, name)
        if callable(method):
            assert inspect.signature(method).parameters.keys() <= inspect.signature(other).parameters.keys(), name
            assert not inspect.iscoroutinefunction(other), name
            assert inspect.getdoc(other), name


def test_an_interrupt_between_making_and_beginning_a_call_leaves_nothing_unawaited() -> None:
    """All in C: Ctrl-C is looked at when the coroutine has come back, and is in nobody's hands."""

    async def call() -> None:
        raise AssertionError

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made = dropwhile(operator.not_, map(operator.call, [_thread.interrupt_main, call]))
        with pytest.raises(KeyboardInterrupt):
            facade.run(partial(next, made))
        gc.collect()
    assert not said


def in_a_fork(function: Callable[[], object]) -> str:
    """The error ``function`` raises in a forked child."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # threads and fork: that is the point
        pid = os.fork()
    if pid == 0:
        try:
            function()
        except BaseException as error:  # noqa: BLE001
            os.write(writing, repr(error).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading) as pipe:
        return pipe.read()


def test_a_forked_process_is_told_to_connect() -> None:
    with sb.blocking(config()) as balancer:
        assert "sb.connect" in in_a_fork(lambda: balancer.put(make_rollout(2)))


READ_THE_CLOCK: dict[str, Callable[[sb.StreamBalancer], object]] = {
    "put_nowait": lambda balancer: balancer.put_nowait(make_rollout(3)),
    "record_step_seconds": lambda balancer: balancer.record_step_seconds(0, 0, 1.0),
    "straggler": lambda balancer: balancer.straggler(),
    "snapshot": lambda balancer: balancer.snapshot(),
    "state_dict": lambda balancer: balancer.state_dict(),
    "load_state_dict": lambda balancer: balancer.load_state_dict({}),
    "statistics": lambda balancer: balancer.statistics(),
    "why_no_batch": lambda balancer: balancer.why_no_batch(),
}


@pytest.mark.parametrize("method", READ_THE_CLOCK)
def test_a_method_that_reads_the_clock_names_sb_blocking(method: str) -> None:
    balancer = sb.StreamBalancer(sb.BalancerConfig(dp_size=2, batch_size=4))
    with pytest.raises(RuntimeError, match=r"outside of any event loop's tasks.*sb\.blocking\(config\)") as caught:
        READ_THE_CLOCK[method](balancer)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__  # anyio's error says nothing that this one does not
