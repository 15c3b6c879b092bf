"""The contract of a transport, as a test.

::

    async def test_mine():
        await check_transport(open_mine)      # raises AssertionError naming the clause that does not hold

``open_mine(dp_size)`` is an async context manager over a :class:`Harness`. Every clause opens a fresh one. The clauses
are in ``delivery_clauses``, ``ending_clauses`` and ``role_clauses``, what they send and compare in ``scripted``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from stream_balancer.testing import delivery_clauses, ending_clauses, role_clauses
from stream_balancer.testing.harness import CLAUSE_TIMEOUT_S, Harness, Opener, check
from stream_balancer.testing.scripted import ScriptedBalancer, make_batch, same_rollout

__all__ = [
    "CLAUSES",
    "CLAUSE_TIMEOUT_S",
    "Harness",
    "Opener",
    "ScriptedBalancer",
    "check_transport",
    "make_batch",
    "same_rollout",
]

CLAUSES: tuple[Callable[[Opener], Awaitable[None]], ...] = (
    *delivery_clauses.CLAUSES,
    *ending_clauses.CLAUSES,
    *role_clauses.CLAUSES,
)
"""What every transport must do, one function each."""


async def check_transport(open_harness: Opener) -> None:
    """Check every clause. Raises AssertionError, naming the clause, for the first that does not hold."""
    await check(CLAUSES, open_harness, CLAUSE_TIMEOUT_S)
