"""Any of our async classes with blocking methods, without a second source.

A coroutine of ours waits in one place only, :meth:`stream_balancer.net.loops.Signal.wait`. In a plain thread that wait blocks the thread
itself, so such a coroutine runs to its end in one step: no event loop, no portal thread, no hop. Ctrl-C and timeouts
arrive inside the coroutine, at that wait, where a cancellation would: the same lines take the call back.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import sniffio

from stream_balancer.net.loops import blocking_deadline

__all__ = ["Blocking", "run"]

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
    """Its result. Raises TimeoutError after ``timeout_s``, RuntimeError where an event loop runs in this thread."""
    try:
        library = sniffio.current_async_library()
    except sniffio.AsyncLibraryNotFoundError:
        library = None
    if library is not None:
        coroutine.close()
        raise RuntimeError(f"this blocks, and would stop the event loop ({library}) of this thread. Await it instead")
    outer = getattr(blocking_deadline, "at", ...)
    blocking_deadline.at = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    finally:
        if outer is ...:
            del blocking_deadline.at
        else:
            blocking_deadline.at = outer
    coroutine.close()
    raise RuntimeError("this coroutine needs an event loop")


class Blocking:
    """A facade: coroutine methods block and take ``timeout_s``; ``async with`` and ``async for`` lose their async."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if not callable(found):
            return found
        if inspect.iscoroutinefunction(found):

            @functools.wraps(found)
            def blocking(*args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
                return _wrapped(run(found(*args, **kwargs), timeout_s))

            return blocking

        @functools.wraps(found)
        def plain(*args: Any, **kwargs: Any) -> Any:
            return _wrapped(found(*args, **kwargs))

        return plain

    def __enter__(self) -> Any:
        return _wrapped(run(self._target.__aenter__()), self)

    def __exit__(self, *exc: Any) -> Any:
        return run(self._target.__aexit__(*exc))

    def __iter__(self) -> Blocking:
        return self

    def __next__(self) -> Any:
        try:
            return run(self._target.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None


def _wrapped(value: Any, itself: Any = None) -> Any:
    """Context managers and iterators of ours become blocking ones too."""
    if itself is not None and value is itself._target:
        return itself
    return Blocking(value) if hasattr(value, "__aenter__") or hasattr(value, "__anext__") else value
