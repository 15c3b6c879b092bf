"""The blocking face: threads put, a plain loop trains. Real threads, real time, no sleeps."""

from __future__ import annotations

import gc
import inspect
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import facade_stubs
import pytest
from helpers import config

import stream_balancer as sb
from stream_balancer import facade
from stream_balancer.net.loops import Signal
from stream_balancer.testing import BACKENDS, make_rollout, make_rollouts


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


@pytest.mark.parametrize("backend", BACKENDS)
def test_errors_cross_the_threads(backend: Any) -> None:
    with sb.blocking(config(window=4, capacity=4), backend=backend) as balancer:
        for rollout in make_rollouts([2] * 4):
            balancer.put_nowait(rollout)
        with pytest.raises(sb.WouldBlock):
            balancer.put_nowait(make_rollout(2))
        with pytest.raises(sb.DuplicateRolloutError):
            balancer.put(make_rollout(2, "r0"))
        balancer.reconfigure(capacity=8)
        balancer.put_group([make_rollout(2, "a", group_id="g"), make_rollout(2, "b", group_id="g")])
        balancer.set_version(3)
        assert balancer.statistics().version == 3
        batch = next(iter(balancer.batches(auto_ack=False)))
        balancer.acknowledge(batch.step)
        balancer.end()
        with pytest.raises(sb.ClosedResourceError):
            balancer.put(make_rollout(2))


def test_closing_frees_a_thread_that_waits() -> None:
    told: list[type[BaseException]] = []
    with sb.blocking(config(window=4, capacity=4)) as balancer:
        for rollout in make_rollouts([2] * 4):
            balancer.put(rollout)

        def blocked() -> None:
            try:
                balancer.put(make_rollout(2, "blocked"))
            except sb.ClosedResourceError as error:
                told.append(type(error))

        thread = threading.Thread(target=blocked, daemon=True)
        thread.start()
        while not balancer.statistics().blocked_puts:
            pass
        balancer.close()
        thread.join()
    assert told == [sb.ClosedResourceError]


def test_background_errors_come_out_at_the_end() -> None:
    async def fail() -> None:
        await anyio.lowlevel.checkpoint()
        raise RuntimeError("from the background")

    def run() -> None:
        with sb.blocking(config()) as balancer:
            future = balancer.start(fail)
            while not future.done():
                pass

    with pytest.raises(RuntimeError, match="from the background"):
        run()


def test_a_background_error_that_was_asked_for_does_not_come_again() -> None:
    async def fail() -> None:
        await anyio.lowlevel.checkpoint()
        raise RuntimeError("from the background")

    with sb.blocking(config()) as balancer:
        background = balancer.start(fail)
        assert isinstance(background.exception(), RuntimeError)
        assert background.done()


def test_background_work_can_be_cancelled() -> None:
    with sb.blocking(config()) as balancer:
        background, left_alone = balancer.start(anyio.sleep_forever), balancer.start(anyio.sleep_forever)
        with pytest.raises(TimeoutError):
            background.result(0)
        background.cancel()
        with pytest.raises(CancelledError):
            background.result()
        assert not left_alone.done()
    with pytest.raises(sb.ClosedResourceError):
        left_alone.result()


def test_use_outside_the_block_says_how() -> None:
    balancer = sb.blocking(config())
    with pytest.raises(RuntimeError, match="use it as `with"):
        balancer.end()


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
        lambda: balancer.start(anyio.sleep_forever).result(),
    ):
        with pytest.raises(sb.ClosedResourceError, match="closed"):
            use()
    with pytest.raises(RuntimeError, match="entered once"):
        balancer.__enter__()


def test_what_leaving_raises_comes_out(tmp_path: Any) -> None:
    with sb.blocking(config(), journal=tmp_path), pytest.raises(sb.AlreadyInUseError):
        sb.blocking(config(), journal=tmp_path).__enter__()


def test_an_interrupted_for_is_begun_again() -> None:
    """See tests/dist/interrupts.py for every other moment."""
    with sb.blocking(config()) as balancer:

        def interrupt() -> None:
            while "nobody iterates" in balancer.why_no_batch():
                pass  # until the main thread waits for a batch
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            next(balancer.batches())
        for rollout in make_rollouts([2] * 8):
            balancer.put(rollout)
        balancer.end()
        steps = [(batch.step, batch.num_rollouts) for batch in balancer.batches()]
        assert steps == [(0, 4), (1, 4)]


def test_an_interrupt_at_any_line_of_a_call_leaves_no_coroutine_behind() -> None:
    """One that was never begun would be warned of."""
    with sb.blocking(config()) as balancer:
        transport = sb.TorchTransport.listen(dp_size=2)
        balancer.serve(transport)
        with sb.connect(transport.address) as producer, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            producer.statistics()
            after, was_interrupted = 0, True
            while was_interrupted:
                after, was_interrupted = after + 1, False
                lines = iter(range(after))

                def trace(frame: Any, event: str, _: object) -> Any:
                    nonlocal was_interrupted
                    if event == "line" and next(lines, None) is None and not was_interrupted:  # noqa: B023
                        was_interrupted = True
                        raise KeyboardInterrupt
                    return trace if frame.f_code.co_filename == facade.__file__ else None

                with suppress(KeyboardInterrupt):
                    sys.settrace(trace)
                    producer.statistics()
                sys.settrace(None)
                gc.collect()
        balancer.end()
        assert after > 20
        assert told == []


def test_two_interrupts_in_a_row_lose_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first behind the wait, when a batch is there; the second before the next call is handed in."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with sb.blocking(config(batch_size=2, window=2)) as balancer:
        for rollout in make_rollouts([2] * 4):
            balancer.put(rollout)
        balancer.end()
        batches, wait = balancer.batches(), Signal.wait_in_thread

        def wait_and_be_interrupted(signal: Signal, deadline: float | None) -> None:
            wait(signal, deadline)
            interrupted()

        moments = (Signal, "wait_in_thread", wait_and_be_interrupted), (type(balancer._runner), "in_loop", interrupted)
        for where, name, instead in moments:
            with monkeypatch.context() as patch:
                patch.setattr(where, name, instead)
                with pytest.raises(KeyboardInterrupt):
                    next(batches)
        assert sorted(r.rollout_id for batch in batches for r in batch.rollouts) == ["r0", "r1", "r2", "r3"]


def test_one_thread_iterates() -> None:
    with sb.blocking(config()) as balancer, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: next(balancer.batches(), None))
        told = False  # here; or there, if this iterator was made before that one waited
        while not told:
            try:
                balancer.batches()
            except sb.AlreadyInUseError:
                told = True
            told = told or (waiting.done() and isinstance(waiting.exception(), sb.AlreadyInUseError))
        balancer.end()


@pytest.mark.parametrize("backend", BACKENDS)
def test_places_are_reserved_by_threads(backend: Any) -> None:
    with sb.blocking(
        config(staleness=sb.Staleness(max_versions=1), batch_size=2, window=2), backend=backend
    ) as balancer:
        balancer.set_version(5)
        with balancer.reserve(2) as slot:
            assert (slot.version, slot.left) == (5, 2)
            slot.put(make_rollout(2, "a"))
            slot.put_group([make_rollout(2, "b", group_id="g")])
            assert slot.left == 0
        with balancer.reserve():
            assert balancer.statistics().reserved == 1
        assert balancer.statistics().reserved == 0
        batch = next(balancer.batches())
        assert {r.version for r in batch.rollouts} == {5}
        balancer.end()
        with pytest.raises(sb.ClosedResourceError), balancer.reserve():
            pass


ASYNC_ONLY = {  # for the event loop
    "aclose": "close",
    "async_state_dict": "state_dict",
    "parts": "balancer",
    "record_step": "record_step_seconds",
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


def test_type_checkers_see_what_there_is() -> None:
    assert facade_stubs.PATH.read_text() == facade_stubs.text(), "run: python tests/facade_stubs.py"


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
