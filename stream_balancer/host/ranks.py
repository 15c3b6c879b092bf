"""Ranks as ``serve`` sees them: who may come in, who is connected, and who is lost since when.

What each of them has of a step is in :mod:`stream_balancer.core.steps`; here are their connections, incarnations, names
and deadlines. Belongs to the event loop.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping

import anyio
import msgspec

from stream_balancer.core.diagnosis import RankState
from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.steps.ledger import Ledger
from stream_balancer.core.steps.state import Rank
from stream_balancer.errors import RankLostError, refused_error
from stream_balancer.host.records import Came
from stream_balancer.net.errors import ConnectionEnd
from stream_balancer.net.messages import About, Join
from stream_balancer.net.service import Peer
from stream_balancer.wire.payload import reader

logger = logging.getLogger("stream_balancer.dispatch")
_KEEP_S = 60.0  # a rank whose link broke asks again what had no reply
_DIAL_S = 5.0
"""A rank that lost its controller dials every second: so long at least it may take to find the next one."""


_read = reader(About, "what a rank says of itself")


class Member:
    """A rank."""

    def __init__(self, ledger: Ledger, rank: Rank) -> None:
        self._ledger, self.rank = ledger, rank
        """State of its work, in the ledger."""
        self.id = rank.id
        self.name = f"rank {rank.id}"
        """Name for people."""
        self.peers: dict[int, Peer] = {}
        """Connected processes of the rank, by seat."""
        self.last_step: int | None = None
        """The last step that was sent to it."""
        self.sessions: set[bytes] = set()
        """Sessions of its processes, since it was given up last."""
        self.fenced: set[bytes] = set()
        """Sessions of those that were given up with it."""
        self.error: RankLostError | None = None
        """Cause of its loss, if it was there before."""
        self.give_up_at = math.inf
        """End of the wait for it, on the event loop's clock."""
        self.since = anyio.current_time()
        """Time at which it last became ready, or ceased to be."""
        self._was_ready = False

    @property
    def ended(self) -> bool:
        """The rank knows that no more steps come."""
        return self.rank.ended == self.rank.full

    @property
    def came(self) -> Came:
        """Facts of it that the next controller must know."""
        rank, is_ended = self.rank, self.ended or not self.is_wanted
        return Came(self.id, rank.incarnation, rank.is_given_up, sorted(self.fenced), is_ended)

    @property
    def is_wanted(self) -> bool:
        """The rank takes part in the steps to come."""
        return self.id in self._ledger.wanted

    @property
    def takes_part(self) -> bool:
        """The rank has come at some time. One that is wanted again after it was told of the end leaves first."""
        return bool(self.peers or self.error) and not self.ended

    @property
    def is_finished(self) -> bool:
        """The rank has nothing left to receive or to acknowledge, and need not be told of the end any more."""
        # lost: an error with a connection means that it has come back in part
        is_lost = self.error is not None and not self.peers
        return (self.ended or is_lost) and not self.rank.active

    @property
    def says_weights(self) -> bool:
        """A process of it has said, as it was started, what its weights contain."""
        return any(peer.data.next_step is not None and not peer.data.goes_on for peer in self.peers.values())

    def note_readiness(self) -> None:
        """Remember since when it has room for a step, or has none."""
        ready = self.rank.room > 0
        if ready != self._was_ready:
            self._was_ready, self.since = ready, anyio.current_time()

    def lost(self, cause: str) -> RankLostError:
        """The error for its loss."""
        step = self.last_step
        doing = "nothing had been sent to it" if step is None else f"the last step sent to it was {step}"
        text = (
            f"{self.name} (incarnation {self.rank.incarnation}) was lost: {cause}; {doing}. What it has not "
            "acknowledged is still held. Restart the rank under a new incarnation, or give serve() a rejoin_timeout_s"
        )
        return RankLostError(text, rank=self.id, step=step, cause=cause)


class Ranks(dict[int, Member]):
    """Ranks of one run of ``serve``."""

    def __init__(
        self,
        ledger: Ledger,
        core: BalancerCore,
        dp_size: int,
        rejoin_timeout_s: float,
        came: Collection[Came],
    ) -> None:
        """``came``: who was in before."""
        self._ledger, self._core, self._rejoin_timeout_s = ledger, core, rejoin_timeout_s
        self.dp_size = dp_size
        """Number of ranks that was asked for; as many as there are, until one is given up or comes to a free place."""
        for one in came:
            ledger.restore_rank(one.rank, one.incarnation, fenced=one.is_fenced, ended=one.is_ended)
            self[one.rank].fenced.update(one.sessions)
        numbers = {*range(dp_size), *(one.rank for one in came if not one.is_ended)}
        # numbers of ranks that were given up stay free until somebody comes with one
        there = sorted(numbers.difference(ledger.fenced))
        self._want(set(there[:dp_size] or range(dp_size)))
        self.num_places = max(dp_size, self.numbers[-1] + 1)
        """Ranks have numbers below this; some may be missing, where a lost rank was given up."""

    def __missing__(self, one: int) -> Member:
        member = self[one] = Member(self._ledger, self._ledger.rank(one))
        return member

    @property
    def numbers(self) -> list[int]:
        """Numbers of the ranks of the next step, ascending."""
        return sorted(self._ledger.wanted)

    def _want(self, numbers: set[int]) -> None:
        self._ledger.resized(numbers)
        # they are waited for
        for number in numbers:
            self[number]

    # more ranks, or fewer

    def resize(self, dp_size: int) -> None:
        """The next step is for so many ranks: the highest leave, or new ones are waited for."""
        self.dp_size = dp_size
        there = self.numbers[:dp_size]
        new = [number for number in range(dp_size) if number not in there][: dp_size - len(there)]
        self._want({*there, *new})
        self.num_places = self.numbers[-1] + 1
        for member in self.values():
            if member.error is not None and not member.is_wanted:
                member.give_up_at = anyio.current_time()  # nobody comes back to a place that is no more

    def expect(self, ranks: Iterable[int]) -> None:
        """Ranks that were in before this process began: they come back in time, or are given up as any lost rank is."""
        for one in ranks:
            if not self[one].peers:
                self[one].give_up_at = anyio.current_time() + max(self._rejoin_timeout_s, _DIAL_S)

    def remove(self, member: Member) -> None:
        """The rank was given up, with those of its processes that are still there."""
        # their processes may live behind a broken network, with gradients that others do again
        member.fenced |= member.sessions
        member.sessions.clear()
        for peer in member.peers.values():
            peer.fail(refused_error("value", f"{member.name} was given up, since others of its processes were lost"))
        member.peers.clear()
        self._want(self._ledger.wanted - {member.id})
        member.give_up_at = math.inf

    # coming in

    def admit(self, peer: Peer, join: Join) -> None:
        """Raise RefusedError for a rank that may not come in, WireError for one that does not say who it is."""
        about: About = _read(join.about)
        member, who = self.get(about.rank), f"rank {about.rank}"
        # Those that are left where some were given up have higher numbers than they are: either number is right. So is
        # that of a feed that was opened for as many ranks as there were at that time.
        dp_size, places = self.dp_size, self.num_places
        if (about.dp_size not in (dp_size, places) or about.rank >= places) and not about.goes_on:
            raise refused_error(
                "value",
                f"{who} announces dp_size={about.dp_size}, but the controller balances for dp_size={dp_size}, "
                f"with ranks from 0 to {places - 1}. Give both the same number of data-parallel ranks",
            )
        if member is not None and join.session in member.fenced:
            raise refused_error(
                "value",
                f"{who} was given up, and others have its work. Start its process again, with another rank's weights",
            )
        if member is not None and member.peers:
            self._check_free(member, about, join.session)
        self._check_weights(about)
        # a new process is another incarnation than one that was given up, whatever its number
        incarnation = max(about.incarnation, self._ledger.fenced.get(about.rank, -1) + 1)
        peer.data = msgspec.structs.replace(about, incarnation=incarnation)

    def _check_free(self, member: Member, about: About, session: bytes) -> None:
        there, seats, incarnation = member.peers.get(about.seat), member.rank.seats, member.rank.incarnation
        # the same session again is the same process, whose connection broke
        is_other = there is not None and there.session != session and incarnation == about.incarnation
        if is_other or incarnation > about.incarnation:
            raise refused_error(
                "busy",
                f"{member.name} is already connected (incarnation {incarnation}). One RankFeed per rank: "
                "close the other one first, or start the rank again under a higher incarnation",
            )
        if about.seat >= about.seats or (incarnation == about.incarnation and seats != about.seats):
            raise refused_error(
                "value",
                f"{member.name} has {seats} processes, and one joins as number {about.seat} of {about.seats}. "
                "Open the feeds of a rank over one mesh",
            )

    def _check_weights(self, about: About) -> None:
        """Weights of a process that was started must go with the step that others are at. Whoever does not say them
        begins with its oldest step that is not acknowledged; a rank that says them is compared with those, too."""
        ours, has = self._core.in_flight.next_step, about.next_step
        who = f"rank {about.rank}"
        if has is not None and has > ours:
            raise refused_error(
                "value",
                f"{who}: its controller was started again without its journal: the rank's weights contain all steps "
                f"before {has}, and the next one here is {ours}. Start the controller with its journal, or the rank "
                "without next_step",
            )
        # Where ranks meet, the ledger says who is left behind in which step.
        if about.goes_on or self._ledger.meets:
            return
        others = {
            one: member.rank.furthest if member.rank.weights_of else self._first_step(one)
            for one, member in self.items()
            if one != about.rank and member.peers and (has is not None or member.says_weights)
        }
        first = self._first_step(about.rank) if has is None else has
        if any(first != there for there in others.values()):
            raise refused_error("value", different_weights(about.rank, has, others, first))
        if has is None and about.incarnation > 0:
            logger.warning(
                "%s was started again, and does not say by next_step= what its weights have: it goes on with step %d",
                who, first,
            )  # fmt: skip

    def _first_step(self, one: int) -> int:
        return min(self._ledger.rank(one).active, default=self._core.in_flight.next_step)

    def attach(self, peer: Peer) -> Member:
        """A process that was admitted is here. What it has, the ledger is told. -> its rank."""
        about: About = peer.data
        one = about.rank
        member = self[one]
        member.sessions.add(peer.session)
        # all its processes start again together: what older ones still send does not count
        if about.incarnation > member.rank.incarnation:
            for old in member.peers.values():
                old.close(f"superseded by incarnation {about.incarnation}")
            member.peers.clear()
            member.last_step = None
        member.peers[about.seat] = peer
        member.since = anyio.current_time()
        # one process that is back is not its rank: the clock runs until all are
        if len(member.peers) == about.seats:
            member.error, member.give_up_at = None, math.inf
        peer.keep_s, peer.name = _KEEP_S, member.name
        # who comes to a place that a lost rank has left takes part from the next plan on
        is_free = one < self.num_places and not self._ledger.ended
        if is_free and not member.is_wanted:
            self._want({*self._ledger.wanted, one})
        self._ledger.joined(
            one, about.seat, about.incarnation, about.has, weights=about.next_step, seats=about.seats, depth=about.depth
        )
        return member

    # going

    def detach(self, member: Member, seat: int, end: ConnectionEnd) -> None:
        """A process of a rank is gone, and may come back."""
        del member.peers[seat]
        self._ledger.lost(member.id, seat)
        member.since = anyio.current_time()
        late = [step for step, share in member.rank.active.items() if not share.acked >> seat & 1]
        if end.kind != "closed" or not member.ended or late:
            closed = "the rank closed its feed"
            if member.ended and late:
                closed += f" without an acknowledgement of step {late[0]}"
            causes = {"closed": closed, "refused": f"it was refused: {end.text}"}
            # the first cause is the one to name: others follow from it
            member.error = member.error or member.lost(causes.get(end.kind, end.text))
            # the earliest time counts: a second process that is lost must not prolong the wait for the first
            wait_s = self._rejoin_timeout_s if member.is_wanted else 0.0
            if wait_s > 0:
                cause = member.error.cause
                logger.warning("%s was lost, and may come back within %g s: %s", member.name, wait_s, cause)
            member.give_up_at = min(member.give_up_at, anyio.current_time() + wait_s)

    # questions

    @property
    def unfinished(self) -> list[Member]:
        """Ranks that have not acknowledged all, or were not told of the end; in order."""
        return [
            member
            for _, member in sorted(self.items())
            if not member.is_finished and (member.is_wanted or member.peers or member.error)
        ]

    @property
    def connected(self) -> list[Member]:
        """Ranks of which a process is connected, in order."""
        return [member for _, member in sorted(self.items()) if member.peers]

    @property
    def next_to_give_up(self) -> tuple[float, Member]:
        """The lost rank whose time is over first, and when; of several, one with work that others must do."""

        def until(member: Member) -> tuple[float, bool]:
            # one that has acknowledged all need not come back after the end
            is_done = (self._ledger.ended or not member.is_wanted) and member.is_finished
            return math.inf if is_done else member.give_up_at, not member.rank.active

        first = min(self.values(), key=until)
        return until(first)[0], first

    def states(self) -> list[RankState]:
        """State of each rank that takes part, by number."""
        now = anyio.current_time()
        return [
            RankState(
                rank=one,
                ready=member.rank.room > 0,
                since_s=now - member.since,
                connected=len(member.peers) == member.rank.seats,
                lost=None if member.error is None else member.error.cause,
                queue=len(member.rank.active),
                step=next(iter(member.rank.active), None),
            )
            for one, member in sorted(self.items())
            if member.is_wanted
        ]


def different_weights(one: int, has: int | None, others: Mapping[int, int], first: int = 0) -> str:
    """Text that says why ranks cannot go on together. ``first``: the step that this one begins with, if it says nothing
    (None)."""
    theirs = ", ".join(f"rank {other}'s all before {there}" for other, there in sorted(others.items()))
    if has is None:
        return (
            f"rank {one} does not say by next_step= what its weights have, and would begin with step {first}; "
            f"{theirs}: they would train on different weights. Say it on every rank, or on none"
        )
    return (
        f"the weights of rank {one} contain all steps before {has}, and {theirs}: they would train on different "
        f"weights. Go back together to those before step {min(has, *others.values())}, or take another rank's, and say "
        "which by next_step="
    )
