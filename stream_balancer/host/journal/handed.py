"""Facts of peers and of steps in flight that outlive ``serve`` and, with a journal, the controller: acknowledgements of
ranks, masked rollouts, incarnations that were given up, and producers that have ended.
"""

from __future__ import annotations

from collections import defaultdict

from msgspec.structs import replace

from stream_balancer.host.records import Acked, Came, Fact
from stream_balancer.wire.codec import Leases, Owner


class Handed:
    """State that outlives one run of ``serve``. ``Journal``, a subclass, keeps it for the next process."""

    def __init__(self) -> None:
        self.rows: dict[str, Fact] = {}
        """By key, the last fact."""
        self.leases = defaultdict[Owner, Leases](Leases)
        """Payloads that owners keep, by owner. A journal adds the payloads that its rows name."""

    def put(self, *facts: Fact) -> None:
        """Facts hold from now on, each in place of the fact with its key."""

    async def flush(self) -> None:
        """Return once all earlier facts are on the disk."""

    def note(self, fact: Fact) -> None:
        """The fact holds from now on."""
        # A feed may join again after every broken link, and must not cost a transaction then.
        if self.rows.get(fact.key) != fact:
            self.rows[fact.key] = fact
            self.put(fact)

    def acked(self, step: int) -> Acked | None:
        """The fact about a step, or None."""
        found = self.rows.get(Acked(step, 0).key)
        return found if isinstance(found, Acked) else None

    def forget(self, step: int) -> None:
        """A step is acknowledged: the journal drops its row with the acknowledgement itself."""
        self.rows.pop(Acked(step, 0).key, None)

    @property
    def came(self) -> list[Came]:
        """Every rank that ever came."""
        return [one for one in self.rows.values() if isinstance(one, Came)]

    def end(self) -> None:
        """Forget that ranks were given up: the next run of ``serve`` numbers its ranks anew."""
        for came in self.came:
            self.note(replace(came, is_fenced=False, is_ended=False))
