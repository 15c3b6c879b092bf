"""Any of our async classes with blocking methods, without a second source: :func:`facade`.

A coroutine of ours waits in one place only, :meth:`stream_balancer.net.loops.Signal.wait`. In a plain thread that wait
blocks the thread itself, so :func:`run` drives such a coroutine to its end in one step: no event loop, no second
thread. Ctrl-C and timeouts arrive inside the coroutine, at that wait, where a cancellation would: the same lines take
the call back. What needs an event loop, as a balancer does, runs in one of its own
(:mod:`stream_balancer.host.blocking`).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import operator
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar, NoReturn, TypeVar, cast

import sniffio

from stream_balancer.net.loops import blocking_deadline
from stream_balancer.slots import Reservation, Slot

T = TypeVar("T")


class OfOneProcess:
    """Cannot be pickled, and says what to do instead."""

    _in_another_process: ClassVar[str]

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} belongs to the process that made it and cannot be pickled. In another process, "
            f"{self._in_another_process}"
        )


def event_loop_here() -> str | None:
    """The library whose event loop runs in this thread, if one does."""
    if asyncio._get_running_loop() is not None:
        return "asyncio"
    try:
        return sniffio.current_async_library()
    except sniffio.AsyncLibraryNotFoundError:
        return None


def refuse_in_event_loop(what: str, instead: str) -> None:
    """Raise RuntimeError where an event loop runs in this thread: blocking would stop it, and with it perhaps what is
    waited for."""
    library = event_loop_here()
    if library is not None:
        raise RuntimeError(
            f"{what} blocks, and this thread runs an event loop ({library}), which it would stop. {instead}"
        )


def run_here(function: Callable[[], Coroutine[Any, Any, T]], timeout_s: float | None = None) -> T:
    """The result of an async function of ours, which waits by blocking this thread. Raises TimeoutError after
    ``timeout_s``."""
    # a coroutine may call another blocking method: its deadline is restored afterwards
    outer, made = vars(blocking_deadline).copy(), list[Coroutine[Any, Any, T]]()
    blocking_deadline.timeout_s = timeout_s
    blocking_deadline.at = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        # made and kept in one call of C: an interrupt after it finds the coroutine, and one before has made none
        made.extend(map(operator.call, [function]))
        # one step is enough: where it would wait, the wait blocks this thread instead
        made[0].send(None)
    except StopIteration as done:
        return cast("T", done.value)
    finally:
        for coroutine in made:
            coroutine.close()
        vars(blocking_deadline).clear()
        vars(blocking_deadline).update(outer)
    raise RuntimeError("this coroutine needs an event loop")


class Here:
    """The methods of an async class run in the thread that calls."""

    def do(
        self, function: Callable[[], Coroutine[Any, Any, T]], timeout_s: float | None = None,
        undo: Callable[[T], object] | None = None,
    ) -> T:  # fmt: skip
        """Call an async function and wait for its end. Raises what it raises, TimeoutError after ``timeout_s``, and
        RuntimeError in an event loop's thread. ``undo`` is called with what it got, where an interrupt comes before
        that could be returned."""
        refuse_in_event_loop("this", "There, await the method of the same name")
        return run_here(function, timeout_s)

    def call(self, function: Callable[[], T]) -> T:
        """Call a plain function."""
        return function()


HERE = Here()
run = HERE.do
_FACADES: dict[type, type[Facade]] = {}


class Facade(OfOneProcess):
    """An async object with blocking methods."""

    _in_another_process = "make another one"

    def __init__(self, target: Any, runner: Here = HERE, timeout_s: float | None = None) -> None:
        self._target, self._runner, self._timeout_s = target, runner, timeout_s

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._target!r})"

    def _enter(self) -> Any:
        entered = self._runner.do(self._target.__aenter__, self._timeout_s, getattr(self._target, "give_back", None))
        return self if entered is self._target else _wrapped(entered, self._runner)

    def _exit(self, *exc: Any) -> Any:
        return self._runner.do(lambda: self._target.__aexit__(*exc))

    def _iter(self) -> Facade:
        return self

    def _next(self) -> Any:
        result = self._runner.do(lambda: anext(self._target, None), None, getattr(self._target, "give_back", None))
        # nothing that we iterate over yields None, so it can mark the end
        if result is None:
            raise StopIteration
        return result


def facade(
    name: str, target: type, *, base: type[Facade] = Facade, without: Sequence[str] = (),
    timed: Sequence[str] = (),
) -> type[Facade]:  # fmt: skip
    """A class with the public methods of ``target``: coroutine methods block and take ``timeout_s=``, ``async with``
    and ``async for`` lose their ``async``, and what they return is wrapped too. ``base`` may have some of its own.
    ``timed``: plain methods whose result waits when it is entered; they take its ``timeout_s``. What an interrupted
    ``async with`` or ``async for`` of the target had got goes to the target's ``give_back``, if it has one."""
    made: dict[str, Any] = {"__doc__": f":class:`{target.__name__}` with blocking methods, for any thread."}
    for attribute in sorted(set(dir(target)) - set(without)):
        # a method that the base has for itself replaces the generated one
        if not attribute.startswith("_") and not hasattr(base, attribute):
            made[attribute] = _blocking(name, getattr(target, attribute), attribute in timed)
    for has, gets, method in (
        ("__aenter__", "__enter__", Facade._enter), ("__aexit__", "__exit__", Facade._exit),
        ("__anext__", "__next__", Facade._next), ("__anext__", "__iter__", Facade._iter),
    ):  # fmt: skip
        if hasattr(target, has) and not hasattr(base, gets):
            made |= {gets: method}
    if hasattr(target, "_in_another_process"):
        made["_in_another_process"] = vars(target)["_in_another_process"]
    found = _FACADES[target] = type(name, (base,), made)
    return found


def _blocking(owner: str, found: Any, timed: bool) -> Any:
    if isinstance(found, property):
        get: Any = found.fget
        return property(functools.wraps(get)(lambda self: get(self._target)))
    # decided when the class is made, not at each call
    waits = inspect.iscoroutinefunction(found)

    def blocking(self: Facade, /, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        return self._runner.do(functools.partial(found, self._target, *args, **kwargs), timeout_s)

    def plain(self: Facade, /, *args: Any, **kwargs: Any) -> Any:
        later = kwargs.pop("timeout_s", None) if timed else None
        value = self._runner.call(lambda: found(self._target, *args, **kwargs))
        return _wrapped(value, self._runner, later)

    method: Any = functools.wraps(found)(blocking if waits else plain)
    method.__qualname__ = f"{owner}.{found.__name__}"
    if waits or timed:
        method.__doc__ = f"{found.__doc__}\n\nTimeoutError after ``timeout_s``: it did not happen."
        method.__signature__ = _with_timeout(inspect.signature(found))
    return method


def _wrapped(value: Any, runner: Here, timeout_s: float | None = None) -> Any:
    made = _FACADES.get(type(value))
    return value if made is None else made(value, runner, timeout_s)


def _with_timeout(signature: inspect.Signature) -> inspect.Signature:
    # help() and editors show the signature that callers see, with its deadline
    kind = inspect.Parameter.KEYWORD_ONLY
    timeout = inspect.Parameter("timeout_s", kind, default=None, annotation="float | None")
    return signature.replace(parameters=[*signature.parameters.values(), timeout])


BlockingSlot = facade("BlockingSlot", Slot, without=("take", "done", "missing", "is_over", "number"))
BlockingReservation = facade("BlockingReservation", Reservation, without=("give_back",))
