"""Python programs in processes forked from one that has loaded torch.

An interpreter of its own imports torch for two seconds before it does anything, and these tests start hundreds. The
server that forks has no threads and no process groups, so what it forks is as good as new.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import multiprocessing
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from guard import GUARD_S

from stream_balancer.tools.processes import exit_with_parent

PROCESSES = multiprocessing.get_context("forkserver")
# torch's first optimizer imports torch._dynamo, which takes as long as torch itself
PRELOADED = ["torch._dynamo", *(f"stream_balancer.{name}" for name in ("client.feed", "host.journal"))]
PROCESSES.set_forkserver_preload(["forked", "pytest", "stream_balancer.net.movers.torch_dist", *PRELOADED])


@functools.cache
def start_server() -> None:
    """Loads torch, which takes most of a minute where the machine has much else to do: not inside a test's guard."""
    first = PROCESSES.Process(target=int)
    first.start()
    first.join()


class Python:
    """``python -W error *arguments``: ``-c code ...`` or ``file ...``. Used like ``subprocess.Popen``.

    :param finalize: end as an interpreter does, destructors and all, which takes half a second. Otherwise threads are
        joined and exit handlers run, and no more.
    """

    def __init__(
        self,
        *arguments: object,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        finalize: bool = False,
    ) -> None:
        (out, its_out), (errors, its_errors) = PROCESSES.Pipe(duplex=False), PROCESSES.Pipe(duplex=False)
        place, variables = str(cwd or Path.cwd()), dict(os.environ if environment is None else environment)
        self.args = tuple(map(str, arguments))
        given = (self.args, place, variables, its_out, its_errors, finalize)
        self._process = PROCESSES.Process(target=_run, args=given)
        self._process.start()
        self.stdout, self.stderr = (open(os.dup(pipe.fileno())) for pipe in (out, errors))  # noqa: SIM115
        for pipe in (its_out, its_errors, out, errors):
            pipe.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        """Kills it and what it started, which might hold the pipes that its output comes through for ever."""
        with contextlib.suppress(ProcessLookupError):  # it has no group yet, or nobody is left of it
            os.killpg(self.pid, signal.SIGKILL)
        self.kill()

    def wait(self, timeout_s: float | None = None) -> int:
        self._process.join(timeout_s)
        if self.returncode is None:
            raise TimeoutError(f"{self.args} still runs after {timeout_s} s")
        return self.returncode

    def communicate(self, timeout_s: float | None = None) -> tuple[str, str]:
        """All it printed from now on; waits until it has ended. What hangs says where each of its threads is."""
        with ThreadPoolExecutor(2) as readers, self.stdout, self.stderr:
            said = [readers.submit(stream.read) for stream in (self.stdout, self.stderr)]
            try:
                self.wait(timeout_s)
            except TimeoutError as hang:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGABRT)
                self._process.join(5)
                self.end()
                raise TimeoutError("\n".join([str(hang), *(text.result()[-10_000:] for text in said)])) from None
            except BaseException:
                self.end()
                raise
            return said[0].result(), said[1].result()


def run_python(
    *arguments: object, cwd: Path | None = None, timeout_s: float = GUARD_S
) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run``: once it has ended, its exit code and what it printed."""
    process = Python(*arguments, cwd=cwd)
    out, errors = process.communicate(timeout_s)
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def free_port() -> int:
    """Of those that a system does not give away by itself: it would to the next that connects somewhere, before whoever
    is told of this one has imported torch and listens."""
    while True:
        port = 10_000 + secrets.randbelow(22_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def forked(target: Callable[..., object], *args: Any, daemon: bool = True) -> tuple[BaseProcess, Connection]:
    """``target(*args, pipe)`` in a process of its own, which has begun, and the other end of that pipe."""
    mine, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=_call, args=(target, *args, theirs), daemon=daemon)
    process.start()
    theirs.close()
    return process, mine


def _call(target: Callable[..., object], *args: Any) -> None:
    exit_with_parent()
    target(*args)


def hear(pipe: Connection) -> Any:
    """What the other end says next. EOFError once it has ended, TimeoutError if it hangs."""
    if not pipe.poll(GUARD_S):
        raise TimeoutError("a process neither says anything nor ends")
    return pipe.recv()


def run_world(size: int, *arguments: object) -> str:
    """``torchrun --nproc-per-node size *arguments`` without torchrun; what rank 0 printed."""
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(started(*arguments, environment={**os.environ, **world, "RANK": str(rank)}))
            for rank in range(size)
        ]
        said = [rank.communicate(GUARD_S) for rank in ranks]
    for rank, (_, errors) in zip(ranks, said, strict=True):
        assert rank.returncode == 0, errors
    return said[0][0]


@contextlib.contextmanager
def started(*arguments: object, **options: Any) -> Iterator[Python]:
    """A :class:`Python` that is ended in any case."""
    process = Python(*arguments, **options)
    try:
        yield process
    finally:
        process.end()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def torchrun(size: int, *arguments: object) -> str:
    """``torchrun --nproc-per-node size *arguments``; what all ranks printed."""
    done = run_python("-c", "import forked, sys; forked.launch(*sys.argv[1:])", "--nproc-per-node", size, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def launch(*arguments: str) -> None:
    """torchrun in this process. The ranks are forked, too, so that torch is loaded once for all their lives."""
    from torch.distributed.run import get_args_parser, main

    script = get_args_parser().parse_args(arguments).training_script
    sys.path.insert(0, str(Path(script).parent))  # as an interpreter does with the file it is given
    multiprocessing.set_forkserver_preload([*PRELOADED, "torch.distributed.run"])
    main(["--standalone", "--start-method", "forkserver", "--run-path", *arguments])


def _run(
    arguments: tuple[str, ...], cwd: str, environment: dict[str, str], out: Any, errors: Any, finalize: bool
) -> NoReturn:
    os.setpgid(0, 0)
    exit_with_parent()
    for number, pipe in ((1, out), (2, errors)):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    # of what it starts, too
    os.environ["PYTHONFAULTHANDLER"] = "1"
    faulthandler.enable(2)
    warnings.simplefilter("error")
    code = _exit_code(*arguments)
    if finalize:
        ctypes.pythonapi.Py_Exit(code)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def _exit_code(how: str, *rest: str) -> int:
    """Runs the program as ``__main__``, in the main thread."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        if how == "-c":
            sys.argv = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), vars(main))
        else:
            sys.argv = [how, *rest]
            sys.path.insert(0, str(Path(how).parent))
            main.__file__ = how
            exec(compile(Path(how).read_text(), how, "exec"), vars(main))
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return 128 + signal.SIGINT
    except BaseException:  # noqa: BLE001 - as an interpreter does
        traceback.print_exc()
        return 1
    return 0
