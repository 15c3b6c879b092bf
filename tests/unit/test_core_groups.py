"""Groups that lose a sibling, for good or for a while: who counts as come, and who is given up."""

from __future__ import annotations

import pytest
from helpers import polled
from invariants import verify

import stream_balancer as sb
from stream_balancer.core.groups import GroupSize
from stream_balancer.core.machine import BalancerCore
from stream_balancer.testing import make_rollout, make_rollouts


def core_of() -> BalancerCore:
    return BalancerCore(sb.BalancerConfig(dp_size=1, batch_size=4, window=4, groups=sb.Groups(size=4)))


def test_a_sibling_lost_in_flight_may_come_again_by_itself() -> None:
    core = core_of()
    core.add_all(list(make_rollouts([3, 4, 5, 6], siblings=4)), 0.0)
    batch = polled(core)
    core.mark_missing(batch.step, ["r1"])
    core.acknowledge(batch.step)
    verify(core)
    stats = core.statistics(0.0)
    assert (stats.acknowledged, stats.evicted["lost"]) == (3, 1)
    core.add(make_rollout(4, "r1", group_id="g0"), 0.0)  # its siblings have been trained on
    assert core.state.buffer.groups.incomplete() == {}
    core.force_flush()
    again = polled(core)
    assert again.num_rollouts == 1
    assert core.state.buffer.groups.departed() == {}


async def test_abandoning_makes_room_and_calls_on_evict() -> None:
    gone: list[tuple[str, str]] = []
    config = sb.BalancerConfig(dp_size=1, batch_size=2, window=2, capacity=4, groups=sb.Groups(size=2))
    async with sb.StreamBalancer(config, on_evict=lambda r, why: gone.append((r.rollout_id, why))) as balancer:
        await balancer.put(make_rollout(3, "r0", group_id="g0"))
        assert balancer.abandon_group("g0") == 1
        await balancer.put_group(list(make_rollouts([3, 4], prefix="s", siblings=2)))
        assert gone == [("r0", "abandoned"), ("s0", "abandoned"), ("s1", "abandoned")]


def test_the_loss_of_a_group_that_was_done_takes_nothing_from_the_next_of_its_name() -> None:
    """A rollout that came beyond the size begins the group anew, while those that left may still be lost."""
    core = BalancerCore(sb.BalancerConfig(dp_size=1, batch_size=2, window=2, groups=sb.Groups(size=2)))
    core.add_all(list(make_rollouts([3, 4], siblings=2)), 0.0)
    batch = polled(core)
    core.add(make_rollout(5, "r2", group_id="g0"), 0.0)
    core.mark_missing(batch.step, {"r0", "r1"})
    core.acknowledge(batch.step)
    assert core.state.buffer.groups.incomplete() == {"g0": 1}
    verify(core)


# -- groups of another size --------------------------------------------------------------------------------------------

CLOSE = GroupSize("g0", None)


def siblings(count: int, prefix: str = "r") -> list[sb.Rollout]:
    return [make_rollout(3 + n, f"{prefix}{n}", group_id="g0") for n in range(count)]


def sent(core: BalancerCore) -> tuple[int, tuple[str, ...]] | None:
    core.force_flush()
    batch = core.poll(0.0)
    return None if batch is None else (batch.num_rollouts, batch.incomplete_groups)


def test_sizes_that_cannot_be_are_refused_and_change_nothing() -> None:
    core = core_of()
    core.add_all(siblings(3), 0.0)
    for size, text in (
        (2, "3 of it have come already"),
        (0, "from 1 to batch_size"),
        (5, "from 1 to batch_size"),
        (True, "from 1 to batch_size"),
    ):
        with pytest.raises(ValueError, match=text):
            core.add_all([], 0.0, GroupSize("g0", size))
    core.add_all([], 0.0, GroupSize("g0", 4))
    with pytest.raises(ValueError, match="declared to have 4 before"):
        core.add_all([], 0.0, GroupSize("g0", 3))
    with pytest.raises(sb.errors.RolloutError, match="takes 1 more executions, not 2: 3 have come"):
        core.add_all(siblings(2, "s"), 0.0)
    core.add_all([], 0.0, CLOSE)
    with pytest.raises(ValueError, match="declared to have 3 before"):
        core.add_all([], 0.0, GroupSize("g0", 4))
    with pytest.raises(ValueError, match="group_id"):
        core.add_all([], 0.0, GroupSize(7, 4))  # type: ignore[arg-type]
    free = BalancerCore(sb.BalancerConfig(dp_size=1, batch_size=4, groups=sb.Groups(size=4, keep="free")))
    with pytest.raises(ValueError, match="keeps no groups"):
        free.add_all([], 0.0, CLOSE)
    free.add_all(siblings(2), 0.0, CLOSE)  # who puts need not know
    assert free.statistics(0.0).waiting == 2


def test_what_is_lost_of_a_closed_group_may_come_again_or_is_given_up_by_closing_it_again() -> None:
    core = core_of()
    core.add_all(siblings(3), 0.0, CLOSE)
    core.evict_lost(lambda rollout: rollout.rollout_id == "r1")
    assert sent(core) is None
    core.add_all(siblings(2)[1:], 0.0)
    core.evict_lost(lambda rollout: rollout.rollout_id == "r2")
    verify(core)
    core.add_all([], 0.0, CLOSE)
    assert sent(core) == (2, ())
    verify(core)


def test_so_many_closed_groups_are_remembered() -> None:
    core = BalancerCore(sb.BalancerConfig(dp_size=1, batch_size=4, window=4, groups=sb.Groups(size=4), remember_ids=2))
    for name in "abc":
        core.add_all([make_rollout(3, name, group_id=name)], 0.0, GroupSize(name, None))
    assert [name for name, one in core.state.buffer.groups.declarations().items() if one.closed] == ["b", "c"]
    verify(core)
