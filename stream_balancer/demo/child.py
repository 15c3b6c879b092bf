"""Entry point of a child process: ``python -m stream_balancer.demo.child``, with its task as a JSON line on stdin."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import msgspec

from stream_balancer.demo.messages import Message, Task, encode

__all__ = ["main"]


def main() -> None:
    """Read the task, do it, exit. Exit code 0 if all went well; a traceback on stderr and 1 otherwise."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends its children
    say = _speaker()
    task = msgspec.json.decode(_read_line(), type=Task)
    threading.Thread(target=_exit_with_parent, name="exit-with-parent", daemon=True).start()
    import torch  # slow to import: only once the parent is watched

    torch.set_num_threads(1)
    if task.rank is None:
        from stream_balancer.demo.worker import run_controller

        run_controller(task, say)
    else:
        from stream_balancer.demo.rank import run_rank

        run_rank(task, say)


def _speaker() -> Callable[[Message], None]:
    """A function that writes messages to the real stdout; anything else printed from now on goes to stderr."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def say(message: Message) -> None:
        out.write(encode(message))
        out.flush()

    return say


def _read_line() -> bytes:
    """The first line of stdin, and not a byte more: unbuffered, so that the watching thread may read what follows."""
    parts = []
    while (byte := os.read(0, 2**16)) and not byte.endswith(b"\n"):
        parts.append(byte)
    return b"".join([*parts, byte])


def _exit_with_parent() -> None:
    """Wait for the end of stdin. The parent never writes after the task, so this returns when it is gone."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
