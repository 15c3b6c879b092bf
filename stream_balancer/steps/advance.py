"""How one step goes on. The first row that applies decides:

| state of the step                                                | action                                     |
|------------------------------------------------------------------|--------------------------------------------|
| every process with the step in its weights has acknowledged      | Release                                    |
| a connected process has the step in its weights                  | Drop to connected processes that lack it   |
| a living process is COMMITTED, or is absent with the step        | wait; Work of the same attempt may go out  |
| the plan has no rollout left                                     | Release, Drop to its holders               |
| a rank was given up, a payload is missing, a process is FAILED   | new attempt: its row first                 |
| or DROPPED, all processes are new                                |                                            |
| a connected process is at NONE and holds all its older steps     | Work                                       |
| all processes are connected and READY, and their weights equal   | Commit to all                              |

A plain loop (`Meets.OWN`) sends no "lacking" Drop, and waits for a rank only before a new attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from .state import Behind, Commit, Drop, End, Fact, Meets, Phase, Process, Release, State, Step, Work, WritePlan

LayOut: TypeAlias = Callable[[int, tuple[str, ...], list[int]], Mapping[int, Any]]
"""``lay_out(step, rollouts, ranks)``: a part for each rank."""


def advance(state: State, step: Step, lay_out: LayOut) -> None:
    """Append the orders that the step needs now."""
    if _is_released(state, step):
        _release(state, step)
        return
    trained = [process for process, _ in state.living() if state.contains(process, step)]
    is_met, is_own = any(map(state.is_here, trained)), state.meets is Meets.OWN
    if is_met and not is_own:
        through = [one for one in state.steps.values() if one.number <= step.number]
        for process in state.processes(step):
            # A process in a collective, also of an older step, reports the outcome first.
            if not state.is_here(process) or state.contains(process, step) or _is_meeting(state, process, through):
                continue
            if state.move(process, step, Fact.DROP):
                _forget(state, process)
                state.out.append(Drop(process, step.number, step.attempt, lacking=True))
        return
    is_certain = not trained and not any(step.at(process) is Phase.COMMITTED for process in state.processes(step))
    if is_certain and step.gone.issuperset(step.rollouts):
        _release(state, step)
        return
    if is_certain and _is_stale(state, step) and (ranks := _ranks_for(state, step)):
        start_attempt(state, step, lay_out, ranks)
    if _may_send(state, step, trained, is_certain) if is_own else not trained and not step.is_spent:
        for process in state.processes(step):
            _send_work(state, step, process)
    # A plain loop masks a late loss, once another rank has finished the step.
    if not trained or is_met:
        _send_commits(state, step, may_mask=is_met)


def start_attempt(
    state: State, step: Step, lay_out: LayOut, ranks: list[int], parts: Mapping[int, Any] | None = None
) -> None:
    """Plan the whole step under a new number. Equal ranks and rollouts keep their parts."""
    state.attempts += 1
    before = [process for process in state.processes(step) if state.is_here(process)]
    if parts is not None:
        step.parts = parts
    elif set(ranks) != set(step.parts) or step.gone != step.planned_gone:
        step.parts = lay_out(step.number, tuple(one for one in step.rollouts if one not in step.gone), ranks)
    step.attempt, step.planned_gone, step.phases = state.attempts, step.gone, {}
    step.was_committed = step.is_spent = False
    state.out.append(WritePlan(step.row()))
    # A process may hold the step although the ledger does not believe so.
    for process in before:
        if process.rank not in step.parts:
            state.drop(process, step.number, step.attempt)


def end_ranks(state: State, is_ended: bool) -> None:
    """Send End to ranks that leave, and to all ranks at the end of the run."""
    for number, rank in list(state.ranks.items()):
        if not rank.is_here or rank.is_ended or (number in state.wanted and not is_ended):
            continue
        # A step that some weights lack may need this rank: its weights, or its part in a new attempt.
        steps = [step for step in state.steps.values() if is_ended or number in step.parts]
        if not all(state.contains(process, step) for step in steps for process in state.processes(step)):
            continue
        # A process must not take old weights for the result of the run.
        newest = max(seat.weights.next_step for _, seat in state.living())
        behind = [place for place, seat in rank.seats.items() if seat.weights.next_step < newest]
        if behind and number in state.wanted:
            # Newer weights of an absent process may be dead: the ledger waits until it joins or is given up.
            if newest == max(seat.weights.next_step for _, seat in state.living() if seat.link is not None):
                for place in behind:
                    _order_behind(state, Process(number, place), rank.seats[place].weights.next_step)
            continue
        rank.is_ended = True
        # The row precedes the first End: a process may leave at End.
        state.save_rank(number)
        state.out += [End(Process(number, place)) for place in rank.seats]


def _is_released(state: State, step: Step) -> bool:
    if step.is_saved:
        return True
    # A rank that leaves at a resize does not hold up a release: the staying ranks acknowledge.
    newest = max((seat.weights.next_step for _, seat in state.living()), default=0)
    ended = [number for number, rank in state.ranks.items() if rank.is_ended]
    leaves = {number for number in ended if state.seat(Process(number)).weights.next_step < newest}
    on_it = [one for one in state.processes(step) if step.at(one) is not Phase.DROPPED or state.contains(one, step)]
    stay = [one for one in on_it if one.rank not in leaves]
    # If every rank of the step leaves, the processes with its weights acknowledge.
    took = [one for one, _ in state.living() if state.contains(one, step) and one.rank not in leaves]
    # Absent processes of an ended rank may have left.
    must = [one for one in stay or took or on_it if state.is_here(one) or not state.ranks[one.rank].is_ended]
    if must:
        return all(state.contains(one, step) and state.seat(one).acked >= step.number for one in must)
    # Every rank of the step has left: the last acknowledgement and the end of its connection came in one turn.
    left = [seat for number in step.parts for seat in state.ranks[number].seats.values()]
    return bool(left) and all(seat.acked >= step.number for seat in left)


def _release(state: State, step: Step) -> None:
    is_void = step.gone.issuperset(step.rollouts) and not any(state.contains(one, step) for one, _ in state.living())
    del state.steps[step.number]
    if is_void:
        state.void.add(step.number)
    is_own = state.meets is Meets.OWN
    given_up = [number for number in sorted(step.parts) if is_own and state.ranks[number].is_given_up]
    lost = tuple(number for number in given_up if state.ranks[number].saved < step.number)
    gone = step.gone if is_own or is_void else step.planned_gone
    # First the row: an old controller, which can delete none, must not tell its processes to drop the step.
    state.out.append(Release(step.number, step.attempt, gone, lost))
    for process in state.processes(step):
        if state.is_here(process) and not state.contains(process, step):
            state.drop(process, step.number, step.attempt)


def _is_stale(state: State, step: Step) -> bool:
    """The ranks cannot meet in this attempt."""
    phases = [step.at(process) for process in state.processes(step)]
    is_unheld = not any(phases)
    return (
        any(not state.ranks[number].may_live for number in step.parts)
        or step.gone != step.planned_gone
        or (step.is_spent and state.meets is not Meets.OWN)
        # The new number also excludes a report from before a Drop.
        or any(phase >= Phase.FAILED for phase in phases)
        # Restarted processes get another number: equal numbers mean equal weights.
        or (is_unheld and (step.was_committed or set(step.parts) != set(state.members())))
    )


def _ranks_for(state: State, step: Step) -> list[int]:
    """Living ranks of the old attempt; if no process holds the step, the ranks of the next step."""
    left = [number for number in step.parts if state.ranks[number].may_live]
    return left if any(step.at(process) for process in state.processes(step)) else state.members()


def _may_send(state: State, step: Step, trained: list[Process], is_certain: bool) -> bool:
    """A plain rank gets its part, unless the plan may still change: new ranks, and no rank has begun."""
    holders = [process for process in state.processes(step) if state.holds(process, step)]
    is_begun = any(state.is_here(process) for process in (*trained, *holders))
    return is_certain or is_begun or set(step.parts) == set(state.members())


def _send_work(state: State, step: Step, process: Process) -> None:
    seat = state.seat(process)
    if seat.link is None or seat.is_forgetting or step.at(process) or seat.weights.next_step > step.number:
        return
    older = [one for one in state.steps.values() if seat.weights.next_step <= one.number < step.number]
    own = [one for one in older if process.rank in one.parts]
    # Steps arrive in order. Later steps must not use up the room of the oldest step.
    if any(not state.holds(process, one) or one.at(process) is Phase.FAILED for one in own):
        return
    if (own and state.room(process) <= 0) or not _may_train(state, process, step):
        return
    needs_commit = state.meets is Meets.BARRIER or step.remote or step.is_lossy
    seat.warned = -1
    state.move(process, step, Fact.WORK if needs_commit else Fact.WORK_TO_MEET)
    step.was_committed |= not needs_commit
    ranks = tuple(sorted(step.parts))
    part = step.parts[process.rank]
    state.out.append(Work(process, step.number, step.attempt, part, step.planned_gone, ranks, needs_commit))


def _send_commits(state: State, step: Step, *, may_mask: bool) -> None:
    processes = [process for process in state.processes(step) if not state.contains(process, step)]
    ready = [process for process in processes if step.at(process) is Phase.READY]
    if not ready or (step.gone != step.planned_gone and not may_mask):
        return
    if any(not state.is_here(one) or step.at(one) not in (Phase.READY, Phase.COMMITTED) for one in processes):
        return
    # Ranks meet only with equal weights: no sum mixes gradients of two steps.
    newest = max(state.seat(process).weights.next_step for process in processes)
    behind = [process for process in processes if state.seat(process).weights.next_step < newest]
    if behind and (state.meets is Meets.BARRIER or step.is_lossy):
        for process in behind:
            _order_behind(state, process, state.seat(process).weights.next_step)
        return
    for process in ready:
        state.move(process, step, Fact.COMMIT)
        step.was_committed = True
        state.out.append(Commit(process, step.number, step.attempt, step.gone))


def _may_train(state: State, process: Process, step: Step) -> bool:
    """The weights contain all steps before this one, or will contain them, or no weights contain the missing ones."""
    first = state.seat(process).weights.next_step
    own = {
        one.number for one in state.steps.values() if process.rank in one.parts and one.at(process) is not Phase.DROPPED
    }
    lacking = min(set(range(first, step.number)) - own - state.void, default=None)
    if lacking is None:
        return True
    if own.intersection(range(first, lacking)):
        # The process trains its older steps first.
        return False
    if any(seat.link is not None and seat.weights.next_step > lacking for _, seat in state.living()):
        _order_behind(state, process, lacking)
        return False
    # Weights of other ranks will contain a step in flight. A released step is lost once all ranks lack it.
    in_flight = any(lacking <= number < step.number and number not in own for number in state.steps)
    # The weights of an absent rank may contain the step.
    needed = {number for number in (*state.wanted, *step.parts) if not state.ranks[number].is_given_up}
    are_here = all(state.ranks[number].is_here for number in needed)
    met = [one for one in state.processes(step) if step.at(one) is Phase.COMMITTED]
    if in_flight or not are_here or any(state.seat(one).weights.next_step != first for one in met):
        return False
    step.is_lossy = True
    return True


def _order_behind(state: State, process: Process, lacking: int) -> None:
    seat = state.seat(process)
    if seat.warned != lacking and not _is_meeting(state, process, state.steps.values()):
        seat.warned = lacking
        _forget(state, process)
        state.out.append(Behind(process, lacking))


def _is_meeting(state: State, process: Process, steps: Iterable[Step]) -> bool:
    return any(one.at(process) is Phase.COMMITTED and not state.contains(process, one) for one in steps)


def _forget(state: State, process: Process) -> None:
    """A process that must load other weights discards its steps: their gradients belong to the old weights."""
    state.seat(process).is_forgetting = True
    for step in state.steps.values():
        state.move(process, step, Fact.RECALL)
