"""Rows about ranks, attempts and producers. The next ``serve`` continues from them; with a journal, also the next
controller."""

from __future__ import annotations

from collections import defaultdict

from stream_balancer.host.records import Attempt, Fact, PeerFact
from stream_balancer.wire.codec import Leases, Owner


class Handed:
    """Rows of one balancer in memory, and the payloads that its owners keep for it. A journal also writes them."""

    def __init__(self) -> None:
        self.rows: dict[str, Fact] = {}
        """The newest row of each key."""
        self.leases = defaultdict[Owner, Leases](Leases)
        """Kept payloads by owner, also of owners that a journal names and that have not come back."""

    def put(self, *facts: Fact) -> None:
        """Write these facts in one transaction, in place of the rows with their keys."""

    async def flush(self) -> None:
        """Return once every earlier row is on the disk."""

    def note(self, fact: Fact, *others: Fact) -> bool:
        """Set the fact, and write it with ``others`` in one transaction. -> True if it is news."""
        # without this, a feed would cost a transaction for each broken link
        if self.rows.get(fact.key) == fact:
            return False
        self.rows[fact.key] = fact
        self.put(fact, *others)
        return True

    def attempt(self, step: int) -> Attempt | None:
        """Newest attempt of a step in flight; None for a step that no rank was given."""
        found = self.rows.get(f"attempt {step}")
        return found if isinstance(found, Attempt) else None

    def forget(self, step: int) -> None:
        """Drop an acknowledged step: the journal drops its row with the acknowledgement itself."""
        self.rows.pop(f"attempt {step}", None)

    @property
    def steps_and_ranks(self) -> list[Fact]:
        """Rows that a checkpoint keeps for the next ``serve``."""
        return [one for one in self.rows.values() if isinstance(one, Attempt | PeerFact)]

    @property
    def peers(self) -> list[PeerFact]:
        """Every rank that has ever joined."""
        return [one for one in self.rows.values() if isinstance(one, PeerFact)]

    def end(self) -> None:
        """Reset incarnations for the next ``serve``: a rank that was given up or told of the end may join again."""
        for one in self.peers:
            self.note(PeerFact(one.rank, -1, one.seats))
