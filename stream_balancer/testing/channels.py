"""The contract of a channel, as a test.

::

    async def test_mine():
        await check_channel(open_mine)        # raises AssertionError naming the clause that does not hold

``open_mine()`` is an async context manager over the two ends of a fresh channel, neither of which has been started.
The clauses are in ``channel_clauses``, the receiver that they look through in ``recording``.
"""

from __future__ import annotations

from stream_balancer.testing.channel_clauses import CLAUSE_TIMEOUT_S, CLAUSES, Opener
from stream_balancer.testing.harness import check
from stream_balancer.testing.recording import Recorder, source_of

__all__ = ["CLAUSES", "Opener", "Recorder", "check_channel", "source_of"]


async def check_channel(open_pair: Opener) -> None:
    """Check every clause. Raises AssertionError, naming the clause, for the first that does not hold."""
    await check(CLAUSES, open_pair, CLAUSE_TIMEOUT_S)
