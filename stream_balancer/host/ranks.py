"""Ranks as ``serve`` sees them: connected processes, admission of new processes, and the end of the wait for a rank.

The ledger (:mod:`stream_balancer.steps.ledger`) knows the phase of each rank in a step. A :class:`Member` adds names,
connections and deadlines. Belongs to the event loop.

Example: ``rejoin_timeout_s=30``, and one of two processes of rank 3 dies at second 100. The rank is given up at second
130, also if its second process dies at second 120.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable

import anyio
import msgspec

from stream_balancer.core.diagnosis import RankState
from stream_balancer.errors import RankLostError, refused_error
from stream_balancer.net.errors import ConnectionEnd
from stream_balancer.net.messages import About, Join
from stream_balancer.net.service import Peer
from stream_balancer.steps.ledger import Ledger
from stream_balancer.steps.state import Claim, Phase, Process, Rank, ToProcess, Weights, Work
from stream_balancer.wire.payload import reader

logger = logging.getLogger("stream_balancer.dispatch")
_KEEP_S = 60.0
"""Seconds that the replies to a rank's calls are kept after its connection broke."""
_DIAL_S = 5.0
"""Least seconds that a new controller waits for a rank: a rank without a controller dials once a second."""
_read = reader(About, "what a rank says of itself")


class Arrival(msgspec.Struct):
    """One process of a rank that joined."""

    process: Process
    incarnation: int
    link: int
    is_start: bool
    max_batch_bytes: int


class Member:
    """A rank."""

    def __init__(self, ledger: Ledger, number: int) -> None:
        self._ledger, self.id, self.name = ledger, number, f"rank {number}"
        self.peers: dict[int, Peer] = {}
        """Connected processes of the rank, by seat."""
        self.last_step: int | None = None
        """The newest step that was sent to the rank."""
        self.error: RankLostError | None = None
        """Cause of its loss, if the rank was connected before."""
        self.give_up_at = math.inf
        """End of the wait for the rank, on the event loop's clock."""
        self.since = anyio.current_time()
        """Time at which the rank last got room for a step, or lost it."""
        self._was_ready = False

    @property
    def rank(self) -> Rank:
        """The ledger's record of the rank."""
        return self._ledger.ranks[self.id]

    @property
    def is_wanted(self) -> bool:
        """The rank takes part in the steps to come."""
        return self.id in self._ledger.wanted

    @property
    def steps(self) -> list[int]:
        """Steps that the rank has not acknowledged, ascending."""
        return self._ledger.unacknowledged(self.id)

    @property
    def is_finished(self) -> bool:
        """The rank has acknowledged every step, and got its End or is lost."""
        return (self.rank.is_ended or (self.error is not None and not self.peers)) and not self.steps

    def note_readiness(self) -> None:
        """Remember when the rank got room for a step, or lost it."""
        is_ready = self._ledger.has_room(self.id)
        if is_ready != self._was_ready:
            self._was_ready, self.since = is_ready, anyio.current_time()

    def note_sent(self, order: ToProcess) -> None:
        """Remember the newest step sent to the rank, for the error of its loss."""
        if isinstance(order, Work):
            self.last_step = max(order.step, self.last_step or 0)

    def lost(self, cause: str) -> RankLostError:
        """The error for the loss of the rank."""
        step = self.last_step
        doing = "nothing had been sent to it" if step is None else f"the last step sent to it was {step}"
        text = (
            f"{self.name} (incarnation {self.rank.incarnation}) was lost: {cause}; {doing}. What it has not "
            "acknowledged is still held. Restart the rank under a new incarnation, or give serve() a rejoin_timeout_s"
        )
        return RankLostError(text, rank=self.id, step=step, cause=cause)


class Ranks(dict[int, Member]):
    """Ranks of one run of ``serve``, by number."""

    def __init__(self, ledger: Ledger, dp_size: int, rejoin_timeout_s: float) -> None:
        super().__init__()
        self._ledger, self._rejoin_timeout_s = ledger, rejoin_timeout_s
        self._links = itertools.count()
        self.dp_size = dp_size
        """Number of ranks that the user wants. A rank given up, or a rank in a free place, does not change it."""
        known = {number for number, rank in ledger.ranks.items() if not rank.is_ended}
        # the number of a given-up rank stays free until a process joins with it
        given_up = {number for number, rank in ledger.ranks.items() if rank.is_given_up}
        there = sorted({*range(dp_size), *known} - given_up)
        self.want(there[:dp_size] or range(dp_size))
        self.num_places = max(dp_size, max(ledger.wanted) + 1)
        """Ranks have numbers below this one. The numbers of given-up ranks are free."""

    def __missing__(self, number: int) -> Member:
        member = self[number] = Member(self._ledger, number)
        return member

    def want(self, numbers: Iterable[int]) -> None:
        """These ranks take part in the steps to come."""
        self._ledger.wanted = set(numbers)
        for number in self._ledger.wanted:
            # create the member: serve() waits for a rank as soon as it is wanted
            self[number]

    def resize(self, dp_size: int) -> None:
        """The next step is for ``dp_size`` ranks: the highest numbers leave, or new ranks take free numbers."""
        self.dp_size = dp_size
        stay = sorted(self._ledger.wanted)[:dp_size]
        new = [number for number in range(dp_size) if number not in stay][: dp_size - len(stay)]
        self.want([*stay, *new])
        self.num_places = max(self._ledger.wanted) + 1
        for member in self.values():
            if member.error is not None and not member.is_wanted:
                # the place no longer exists, so the rank cannot come back
                member.give_up_at = anyio.current_time()

    def expect(self, numbers: Iterable[int]) -> None:
        """Wait for ranks of an earlier controller: each joins in time, or is given up like a lost rank."""
        for number in numbers:
            self[number].give_up_at = anyio.current_time() + max(self._rejoin_timeout_s, _DIAL_S)

    def remove(self, member: Member) -> None:
        """Remove a given-up rank: refuse its processes that are still connected."""
        for peer in member.peers.values():
            peer.fail(refused_error("value", f"{member.name} was given up, since others of its processes were lost"))
        member.peers.clear()
        member.give_up_at = math.inf
        self.want(self._ledger.wanted - {member.id})

    # joins

    def admit(self, peer: Peer, join: Join) -> int:
        """Let a process in. -> its incarnation. Raises RefusedError with the reason of a refusal, WireError for an
        unreadable description."""
        about = _read(join.about)
        self._check_place(about, join.session)
        rank = self._ledger.ranks[about.rank]
        incarnation: int = about.incarnation
        if about.is_start:
            # a new process in a known place is a new incarnation of the rank, whatever its launcher counts
            is_known = about.seat in rank.seats or rank.is_ended
            incarnation = max(incarnation, rank.fenced + 1, rank.incarnation + is_known)
        process, link = Process(about.rank, about.seat), next(self._links)
        holds = {number: (attempt, Phase(phase)) for number, (attempt, phase) in about.holds.items()}
        claim = Claim(Weights(*about.weights), about.acked, holds, about.is_start)
        is_new = incarnation > rank.incarnation
        why = self._ledger.joined(process, incarnation, link, claim, num_seats=about.seats, depth=about.depth + 1)
        member = self[about.rank]
        if is_new:
            # the ledger has fenced the older processes of this rank
            for old in member.peers.values():
                old.close(f"superseded by incarnation {incarnation}")
            member.peers.clear()
            member.last_step = None
        if why is not None:
            raise refused_error("value", f"rank {about.rank}: {why}")
        peer.data = Arrival(process, incarnation, link, about.is_start, about.max_batch_bytes)
        return incarnation

    def _check_place(self, about: About, session: bytes) -> None:
        """Raise RefusedError unless the place exists and is free."""
        who, member, dp_size, places = f"rank {about.rank}", self[about.rank], self.dp_size, self.num_places
        # after ranks were given up, numbers reach further than their count; a feed may also have an earlier dp_size
        if about.is_start and (about.dp_size not in (dp_size, places) or about.rank >= places):
            raise refused_error(
                "value",
                f"{who} announces dp_size={about.dp_size}, but the controller balances for dp_size={dp_size}, "
                f"with ranks from 0 to {places - 1}. Give both the same number of data-parallel ranks",
            )
        rank, there = member.rank, member.peers.get(about.seat)
        # the same session is the same process after a broken connection
        is_other = there is not None and there.session != session and rank.incarnation == about.incarnation
        if member.peers and (is_other or rank.incarnation > about.incarnation):
            raise refused_error(
                "busy",
                f"{who} is already connected (incarnation {rank.incarnation}). One RankFeed per rank: "
                "close the other one first, or start the rank again under a higher incarnation",
            )
        is_same = member.peers and rank.incarnation == about.incarnation
        if about.seat >= about.seats or (is_same and rank.num_seats != about.seats):
            raise refused_error(
                "value",
                f"{who} has {rank.num_seats} processes, and one joins as number {about.seat} of {about.seats}. "
                "Open the feeds of a rank over one mesh",
            )

    def attach(self, peer: Peer) -> Member:
        """Connect an admitted process. -> its rank."""
        arrival: Arrival = peer.data
        number, seat = arrival.process
        member = self[number]
        member.peers[seat], member.since = peer, anyio.current_time()
        if member.rank.is_here:
            # the wait ends once all processes of the rank are connected
            member.error, member.give_up_at = None, math.inf
        peer.keep_s, peer.name = _KEEP_S, member.name
        # a process in a free place takes part from the next plan on
        if number < self.num_places and not self._ledger.is_ended and not member.is_wanted:
            self.want({*self._ledger.wanted, number})
        return member

    def detach(self, peer: Peer, end: ConnectionEnd) -> Member | None:
        """Disconnect a process that may come back. -> its rank; None for a process that was superseded or given up."""
        arrival: Arrival = peer.data
        number, seat = arrival.process
        member = self[number]
        if member.peers.get(seat) is not peer:
            return None
        del member.peers[seat]
        self._ledger.lost(arrival.process, arrival.link)
        member.since = anyio.current_time()
        late, is_ended = member.steps, member.rank.is_ended
        if end.kind == "closed" and is_ended and not late:
            return member
        closed = "the rank closed its feed"
        if is_ended and late:
            closed += f" without an acknowledgement of step {late[0]}"
        causes = {"closed": closed, "refused": f"it was refused: {end.text}"}
        # name the first cause: later ones follow from it
        member.error = member.error or member.lost(causes.get(end.kind, end.text))
        wait_s = self._rejoin_timeout_s if member.is_wanted else 0.0
        if wait_s > 0:
            logger.warning(
                "%s was lost, and may come back within %g s: %s", member.name, wait_s, member.error.cause
            )  # fmt: skip
        # the earliest deadline counts: the loss of a second process does not prolong the wait for the first
        member.give_up_at = min(member.give_up_at, anyio.current_time() + wait_s)
        return member

    # questions

    @property
    def connected(self) -> list[Member]:
        """Ranks with a connected process, in order."""
        return [member for _, member in sorted(self.items()) if member.peers]

    @property
    def unfinished(self) -> list[Member]:
        """Ranks, in order, with unacknowledged steps or without their End."""
        return [
            member
            for _, member in sorted(self.items())
            if not member.rank.is_given_up
            and not member.is_finished
            and (member.is_wanted or member.peers or member.error or member.steps)
        ]

    def next_to_give_up(self) -> tuple[float, Member]:
        """The lost rank whose wait ends first, and that time. At equal times, a rank with unacknowledged steps."""

        def until(member: Member) -> tuple[float, bool]:
            # a rank that has acknowledged every step is not awaited after the end
            is_done = (self._ledger.is_ended or not member.is_wanted) and member.is_finished
            return math.inf if is_done else member.give_up_at, not member.steps

        first = min(self.values(), key=until)
        return until(first)[0], first

    def states(self) -> list[RankState]:
        """State of each rank that takes part, by number."""
        now = anyio.current_time()
        return [
            RankState(
                rank=number,
                ready=self._ledger.has_room(number),
                since_s=now - member.since,
                connected=member.rank.is_here,
                lost=None if member.error is None else member.error.cause,
                queue=len(member.steps),
                step=next(iter(member.steps), None),
            )
            for number, member in sorted(self.items())
            if member.is_wanted
        ]
