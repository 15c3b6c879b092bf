"""Groups that lose a sibling, for good or for a while: who counts as come, and who is given up."""

from __future__ import annotations

import pytest
from evictions import Evictions

import stream_balancer as sb
from stream_balancer.core.machine import BalancerCore
from stream_balancer.testing import make_rollout, make_rollouts


def core_of() -> BalancerCore:
    return BalancerCore(sb.BalancerConfig(dp_size=1, batch_size=4, window=4, group_size=4))


def test_siblings_put_again_after_a_loss_count_once() -> None:
    core = core_of()
    first = list(make_rollouts([3, 4, 5], siblings=4))
    core.add_all(first, 0.0)
    lost = core.evict_lost(lambda rollout: rollout.rollout_id in ("r0", "r1"))
    assert lost == ["r0", "r1"]
    assert core.state.buffer.groups.incomplete() == {"g0": 1}
    core.add_all(first[:2], 0.0)
    assert core.state.buffer.groups.incomplete() == {"g0": 3}
    core.force_flush()
    assert core.poll(0.0) is None
    core.add(make_rollout(6, "r3", group_id="g0"), 0.0)
    batch = core.poll(0.0)
    assert batch is not None
    assert (batch.num_rollouts, batch.incomplete_groups) == (4, ())
    core.verify()


def test_a_group_of_which_all_are_lost_begins_anew() -> None:
    core = core_of()
    core.add_all(list(make_rollouts([3, 4], siblings=4)), 0.0)
    core.evict_lost(lambda rollout: True)
    assert core.state.buffer.groups.incomplete() == core.state.buffer.groups.departed() == {}
    core.add_all(list(make_rollouts([3, 4, 5, 6], siblings=4)), 0.0)
    assert core.poll(0.0) is not None


def test_a_sibling_lost_in_flight_may_come_again_by_itself() -> None:
    core = core_of()
    core.add_all(list(make_rollouts([3, 4, 5, 6], siblings=4)), 0.0)
    batch = core.poll(0.0)
    assert batch is not None
    core.mark_missing(batch.step, ["r1"])
    core.acknowledge(batch.step)
    core.verify()
    stats = core.statistics(0.0)
    assert (stats.acknowledged, stats.evicted["lost"]) == (3, 1)
    core.add(make_rollout(4, "r1", group_id="g0"), 0.0)  # its siblings have been trained on
    assert core.state.buffer.groups.incomplete() == {}
    core.force_flush()
    again = core.poll(0.0)
    assert again is not None
    assert again.num_rollouts == 1
    assert core.state.buffer.groups.departed() == {}


def test_a_drain_takes_groups_that_will_never_be_complete() -> None:
    core = core_of()
    core.add_all(list(make_rollouts([3, 4], siblings=4)), 0.0)
    core.end()
    batch = core.poll(0.0)
    assert batch is not None
    assert (batch.reason, batch.num_rollouts, batch.incomplete_groups) == ("drain", 2, ("g0",))
    assert core.finished


def test_places_are_kept_for_siblings_of_waiting_groups() -> None:
    core = BalancerCore(sb.BalancerConfig(dp_size=1, batch_size=4, window=8, capacity=11, group_size=4))
    core.add_all(list(make_rollouts([3, 4, 5, 6], siblings=4)), 0.0)
    core.add(make_rollout(7, "b0", group_id="b"), 0.0)
    with pytest.raises(sb.WouldBlock):  # 5 wait, 3 are awaited, 4 would belong to this one's group
        core.add(make_rollout(8, "c0", group_id="c"), 0.0)
    core.add(make_rollout(9, "b1", group_id="b"), 0.0)


def test_an_abandoned_group_is_evicted_and_so_is_what_comes_of_it() -> None:
    core = core_of()
    evictions = Evictions(core)
    core.add_all(list(make_rollouts([3, 4, 5], siblings=4)), 0.0)
    assert core.abandon_group("g0") == 3
    core.add(make_rollout(6, "late", group_id="g0"), 0.0)
    core.add_all(list(make_rollouts([3, 4, 5, 6], prefix="s", siblings=4)), 0.0)  # g0 again: still abandoned
    assert core.abandon_group("never heard of") == 0
    assert {(rollout.group_id, reason) for rollout, reason in evictions.all} == {("g0", "abandoned")}
    stats = core.statistics(0.0)
    assert (stats.accepted, stats.waiting, stats.evicted["abandoned"]) == (8, 0, 8)
    with pytest.raises(sb.DuplicateRolloutError, match="is done"):
        core.add(make_rollout(6, "late", group_id="g0"), 0.0)


async def test_abandoning_makes_room_and_calls_on_evict() -> None:
    gone: list[tuple[str, str]] = []
    config = sb.BalancerConfig(dp_size=1, batch_size=2, window=2, capacity=4, group_size=2)
    async with sb.StreamBalancer(config, on_evict=lambda r, why: gone.append((r.rollout_id, why))) as balancer:
        await balancer.put(make_rollout(3, "r0", group_id="g0"))
        assert balancer.abandon_group("g0") == 1
        await balancer.put_group(list(make_rollouts([3, 4], prefix="s", siblings=2)))
        assert gone == [("r0", "abandoned"), ("s0", "abandoned"), ("s1", "abandoned")]


def test_the_loss_of_a_group_that_was_done_takes_nothing_from_the_next_of_its_name() -> None:
    """A rollout that came beyond the size begins the group anew, while those that left may still be lost."""
    core = BalancerCore(sb.BalancerConfig(dp_size=1, batch_size=2, window=2, group_size=2))
    core.add_all(list(make_rollouts([3, 4], siblings=2)), 0.0)
    batch = core.poll(0.0)
    assert batch is not None
    core.add(make_rollout(5, "r2", group_id="g0"), 0.0)
    core.mark_missing(batch.step, {"r0", "r1"})
    core.acknowledge(batch.step)
    assert core.state.buffer.groups.incomplete() == {"g0": 1}
    core.verify()
