"""Virtual time for tests: event loops whose clock jumps to the next timer instead of waiting for it.

A test may sleep for hours and still end in milliseconds, on asyncio and on trio alike, and it sees *exact* times: a
deadline of 30 s fires at 30.0. In a ``conftest.py``::

    from stream_balancer.testing import BACKENDS, virtual_time_backend

    @pytest.fixture(params=BACKENDS)
    def anyio_backend(request):
        return virtual_time_backend(request.param)

Cautions. Compare deadlines with ``>=``: the clock lands exactly on them, and a ``>`` would wait for ever. The clock
does not know what threads and sockets are busy with: while the loop has timers and nothing ready, it jumps; so keep
threads and sockets out of such tests. Both clocks start at 0.0. Nothing here waits for real
time: a test that hangs, hangs, so keep pytest-timeout as a guard.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from typing import Any, Literal, TypeAlias

import trio
import trio.testing

_Backend: TypeAlias = Literal["asyncio", "trio"]

BACKENDS: tuple[_Backend, ...] = ("asyncio", "trio")
"""Names of the event loops the library supports equally: parameters for an ``anyio_backend`` fixture."""


class AutojumpEventLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop whose ``time()`` starts at 0.0 and jumps to the next timer whenever the loop would wait for
    it.

    File descriptors that are ready, and ``call_soon_threadsafe``, still wake it. With no timer at all it waits in real
    time, as any loop does, for one of those. The counterpart of :class:`trio.testing.MockClock` with
    ``autojump_threshold``.
    """

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def _jump(self, timeout: float) -> None:
        """Move to the next timer, exactly; asyncio never asks for more than a day, so a far one takes several jumps."""
        target = self._now + timeout
        timers: list[asyncio.TimerHandle] = getattr(self, "_scheduled", [])
        if timers and math.isclose(timers[0].when(), target, rel_tol=1e-12, abs_tol=1e-9):
            target = timers[0].when()  # not one rounding error to its side
        self._now = max(self._now, target)
        # A timer is ready when `when < time() + resolution`; after some months of virtual time a nanosecond would be
        # rounded away and a timer that is due now would never be.
        self._clock_resolution = max(1e-9, 2 * math.ulp(self._now))


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that lets virtual time pass where an ordinary one lets real time pass."""

    def __init__(self, loop: AutojumpEventLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        loop = self._loop
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        ready = super().select(0)
        if not ready:
            loop._jump(timeout)
        return ready


def virtual_time_backend(name: str) -> tuple[str, dict[str, Any]]:
    """Value for an ``anyio_backend`` fixture, or for ``anyio.run(..., backend=..., backend_options=...)``, with
    virtual time.

    :param name: ``"asyncio"`` or ``"trio"``.
    """
    if name == "asyncio":
        return name, {"loop_factory": AutojumpEventLoop}
    if name == "trio":
        return name, {"clock": trio.testing.MockClock(autojump_threshold=0)}
    raise ValueError(f"no event loop is called {name!r}; use one of {', '.join(BACKENDS)}")
