"""A world in text, for a schedule that came to a stand."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from steps_world import World


def describe(world: World) -> str:
    ledger, lines = world.ledger, [f"{world.config}", f"left {world.left} fenced {world.fenced} wanted {world.wanted}"]
    for step in ledger.steps.values():
        lines.append(
            f"step {step.number} complete {step.is_complete} of {sorted(step.participants)} barrier {step.at_barrier} "
            f"seal {step.seal} ({step.seals}) holders {step.holders} met {step.met} acks {step.acks} ownerless "
            f"{list(step.ownerless)} recalls {step.recalls} settling {step.settling} unfetched {step.unfetched} "
            f"torn {step.torn} kept {step.is_kept} settled {step.is_settled} changed {step.is_changed} gone {step.gone}"
        )
        for share in step.shares.values():
            items = [(item.id, item.sent, item.done, item.group, item.place) for item in share.items.values()]
            lines.append(
                f"   {share.rank.id} items {items} unsent {list(share.unsent)} attempt {share.attempt} opened "
                f"{share.opened} taken {share.taken} waiting {share.waiting} sealed {share.sealed} back {share.back} "
                f"finished {share.finished} acked {share.acked} recalled {share.recalled} answers {share.answers}"
            )
    for process in world.processes.values():
        rank = ledger.ranks.get(process.rank)
        parts = {
            part.number: (part.attempt, part.taken, part.waiting, part.came_back, part.seal and part.seal.number)
            for part in process.held.parts.values()
        }
        work = [
            (one.item.id, one.begun, one.done) for part in process.held.parts.values() for one in part.work.values()
        ]
        lines.append(
            f"{process.place} incarnation {process.incarnation} alive {process.alive} linked {process.linked} in "
            f"{process.part and process.part.number} work {process.work and process.work.item.id} meeting "
            f"{process.meeting and process.meeting.seal.number} weights {process.held.weights} ended "
            f"{process.held.ended} parts {parts} items {work} up {list(process.up)} down {len(process.down)} here "
            f"{rank and rank.is_here} given up {rank and rank.is_given_up} weights {rank and rank.weights_of}"
        )
    return "\n".join(lines)
