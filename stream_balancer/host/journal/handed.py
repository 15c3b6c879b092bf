"""Facts of peers and of steps in flight that outlive ``serve``, and, with a journal, the controller: which ranks have
acknowledged a step, what is masked in it, which incarnations were given up, who was told of the end, and which
producers have ended.
"""

from __future__ import annotations

from collections import defaultdict

from msgspec.structs import replace

from stream_balancer.host.records import Acked, Came, Fact
from stream_balancer.wire.codec import Leases, Owner


class Handed:
    """Facts of one balancer, and which payloads it needs of their owners, for this process; with a journal, which is
    one, for the next, too."""

    def __init__(self) -> None:
        self.rows: dict[str, Fact] = {}
        """By key, the last of each."""
        self.leases = defaultdict[Owner, Leases](Leases)
        """Payloads that owners keep, by owner; those included that a journal names and that have not come back."""

    def put(self, *facts: Fact) -> None:
        """Facts hold now, in place of those with the same keys."""

    async def flush(self) -> None:
        """Return once all that was said so far is on the disk."""

    def note(self, fact: Fact) -> None:
        """The fact holds from now on."""
        # a feed that joins again after each broken link must not cost a transaction each time
        if self.rows.get(fact.key) != fact:
            self.rows[fact.key] = fact
            self.put(fact)

    def acked(self, step: int) -> Acked | None:
        """Facts of a step, if there are any."""
        found = self.rows.get(Acked(step, 0).key)
        return found if isinstance(found, Acked) else None

    def forget(self, step: int) -> None:
        """A step is acknowledged: the journal drops its row with the acknowledgement itself."""
        self.rows.pop(Acked(step, 0).key, None)

    @property
    def came(self) -> list[Came]:
        """Every rank that has come at some time."""
        return [one for one in self.rows.values() if isinstance(one, Came)]

    def end(self) -> None:
        """Ranks that were given up may be anew, under whichever incarnation: who serves next numbers them."""
        for came in self.came:
            self.note(replace(came, is_fenced=False, is_ended=False))
