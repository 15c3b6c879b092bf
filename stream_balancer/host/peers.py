"""Peers of one run of ``serve``: joins, reports, calls and ends become facts, in the order in which they came."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from stream_balancer.errors import WireError
from stream_balancer.host.producers import Producers
from stream_balancer.host.ranks import Member, forget
from stream_balancer.host.records import Came
from stream_balancer.host.reports import Reports
from stream_balancer.host.sending import InFlight
from stream_balancer.net.errors import Ended
from stream_balancer.net.messages import Join, Report
from stream_balancer.net.service import Peer, Service
from stream_balancer.wire.payload import Memory

__all__ = ["Peers"]

_COLUMN_BYTES = 2**32  # of one micro-batch; what comes is then checked against its tokens


class Peers:
    """Ranks and producers, while they are attended to."""

    def __init__(
        self, here: InFlight, service: Service, roles: Collection[str], changed: Callable[[], object],
        joined: Callable[[], object],
    ) -> None:  # fmt: skip
        """``changed()`` is called after each fact, ``joined()`` when a rank has come in."""
        self._here, self._service, self._roles, self._changed, self._joined = here, service, roles, changed, joined
        self._reports = Reports(here)
        self._producers = Producers(here.balancer, service, direct=True)

    async def attend(self) -> None:
        """Until cancelled."""
        # versions come in the order in which they are set, also those of calls that are answered meanwhile
        with self._producers.following_versions():
            await self._service.attend(self._producers.methods, admit=self._admit, on_peer=self._on_peer)

    def leave(self) -> None:
        """End of attending: ranks see a loss, and may come to the next ``serve``."""
        # producers stay: their puts go on, and the next serve() answers what is left
        for peer in [peer for peer in self._service.peers.values() if peer.kind == "rank"]:
            forget(peer)
            peer.abort()
        self._producers.leave()

    def _admit(self, join: Join) -> Any:
        if join.kind == "rank":
            self._here.ranks.admit(join)
            return None
        if join.kind != "producer":
            raise WireError(f"a {join.kind} joins, and nobody here expects one")
        return self._producers.admit(join)

    def _on_peer(self, peer: Peer) -> None:
        if peer.kind != "rank":
            self._producers.on_peer(peer)
            return
        member, seat = self._here.ranks.attach(peer)
        peer.on_report = partial(self._on_report, member, seat, peer)
        peer.on_end = partial(self._on_end, member, seat)
        role = member.id.role
        # after attach(): its number must be known, so that who waits for it is told why
        if role and role not in self._roles:
            text = (
                f"{member.name} is asked for nothing: serve() has the roles {list(self._roles)}. Name it in "
                "serve(roles=), with its columns"
            )
            self._break(member, seat, peer, text, "nobody asks for its columns")
            return
        # only a role sends columns; from others not a byte is taken into memory
        peer.max_report_bytes = _COLUMN_BYTES if role else 0
        self._here.handed.note(Came(role, member.id.number, member.incarnation, False, sorted(member.fenced)))
        self._producers.tell_version(peer)
        if not role:
            self._reports.joined(member)
        self._joined()
        member.note_readiness(ready=self._here.ledger.room(member.id) > 0)

    def _on_report(self, member: Member, seat: int, peer: Peer, report: Report, memory: Memory | None) -> None:
        try:
            self._reports.take_in(member, seat, report, memory)
        # the fault of one rank is its loss, not the end of serve()
        except WireError as error:
            self._break(member, seat, peer, f"{error}. Restart it", "broke the protocol", report.step)
        member.note_readiness(ready=self._here.ledger.room(member.id) > 0)
        self._changed()

    def _on_end(self, member: Member, seat: int, end: Ended) -> None:
        self._here.ranks.detach(member, seat, end)
        self._changed()

    def _break(self, member: Member, seat: int, peer: Peer, text: str, cause: str, step: int | None = None) -> None:
        """A rank cannot go on, though it is connected. It does not join again, or it would come with the same."""
        forget(peer)
        peer.close(text)
        self._here.ranks.lose(member, seat, member.lost(cause, text, step))
        self._changed()
