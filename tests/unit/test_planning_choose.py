"""``planning.choose``: a step's rollouts out of a pool of somebody else's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stream_balancer import planning


def test_a_pool_of_ones_own_passes_nobody_over_too_often() -> None:
    random = np.random.default_rng(0)
    pool, idle, taken = [(int(length), 0) for length in random.lognormal(6, 1.2, 32).astype(int) + 1], [], 0
    for step in range(60):
        lengths, skips = zip(*pool, strict=True)
        go = planning.choose(lengths, dp_size=4, batch_size=16, max_skips=8, skips=skips, step=step)
        assert go.size == 16
        assert (np.diff(go) > 0).all()
        parts = planning.partition(np.array(lengths)[go], 4)
        loads = [np.array(lengths)[go][part].sum() for part in parts]
        idle.append(1 - np.mean(loads) / max(loads))
        taken += go.size
        assert max(skips) <= 8
        left = [(length, skipped + 1) for place, (length, skipped) in enumerate(pool) if place not in go]
        pool = left + [(int(length), 0) for length in random.lognormal(6, 1.2, 16).astype(int) + 1]
    assert taken == 60 * 16
    assert np.mean(idle) < 0.1


def test_siblings_go_together_and_who_is_due_goes() -> None:
    groups = [7, 3, 7, 3, 5, 5, 9]
    go = planning.choose([10] * 7, dp_size=2, batch_size=4, groups=groups, due=[False] * 4 + [True] * 2 + [False])
    assert sorted(groups[place] for place in go) in ([3, 3, 5, 5], [5, 5, 7, 7])
    assert planning.choose([5, 6], dp_size=1, batch_size=9).tolist() == [0, 1]
    one = planning.choose([10, 10, 10, 10], [1.0, 9.0, 1.0, 1.0], dp_size=2, batch_size=2)
    assert 1 not in one, "what balances is the work, not the tokens"


def test_groups_are_complete_as_they_stand_unless_their_size_is_given() -> None:
    groups = [7, 7, 7, 3, 3, 5]
    go = planning.choose([10] * 6, dp_size=2, batch_size=5, groups=groups)
    assert sorted(groups[place] for place in go) == [3, 3, 7, 7, 7]
    go = planning.choose([10] * 6, dp_size=2, batch_size=5, groups=groups, group_size=2 + 1)
    assert [groups[place] for place in go] == [7, 7, 7], "3 and 5 wait for siblings"
    alone = planning.choose([10] * 4, dp_size=2, batch_size=2, groups=[-1, -1, -1, -1])
    assert alone.size == 2, "a negative label is no group"


def test_what_is_chosen_is_int64_even_where_nothing_may_go() -> None:
    go = planning.choose([10, 10], dp_size=1, batch_size=4, groups=[1, 2], group_size=2)
    assert go.shape == (0,)
    assert go.dtype == np.int64
    assert planning.choose([10, 10], dp_size=1, batch_size=1).dtype == np.int64
    whole = planning.choose([10] * 6, dp_size=2, batch_size=5, groups=[1, 1, 1, 2, 2, 2])
    assert whole.tolist() == [0, 1, 2], "two groups are more than a batch, and none is cut"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lengths": []}, "lengths must be"),
        ({"lengths": [1, 0]}, "tokens >= 1"),
        ({"costs": [1.0]}, "costs as many"),
        ({"skips": [1, 2, 3]}, r"skips must be \[2\]"),
        ({"groups": [1]}, r"groups must be \[2\]"),
        ({"skips": 3}, r"skips must be \[2\]"),
        ({"due": True}, r"due must be \[2\]"),
        ({"skips": [0, -1]}, "skips must be whole numbers >= 0"),
        ({"skips": [0.5, 1.0]}, "skips must be whole numbers"),
        ({"due": [2, 0]}, r"due must be \[2\] booleans"),
        ({"groups": [0.5, 1.0]}, "groups must be whole numbers"),
        ({"lengths": [1.5, 2.0]}, "lengths must be whole numbers"),
        ({"lengths": [[3, 4]]}, r"lengths must be \[n\]"),
        ({"lengths": 3}, r"lengths must be \[n\]"),
        ({"max_skips": -1}, r"max_skips \(-1\) must be >= 0"),
        ({"counts": "even"}, "counts must be"),
        ({"dp_size": 3}, "every rank gets a rollout"),
        ({"groups": [1, 1], "group_size": 3}, r"group_size \(3\) must be .* batch_size \(2\)"),
        ({"groups": [1, 1], "group_size": 1}, r"group 1 has 2 rollouts, more than group_size \(1\)"),
        ({"groups": [1, 1, 1], "lengths": [1, 1, 1]}, r"group 1 has 3 rollouts, more than batch_size \(2\)"),
        ({"group_size": 2}, "group_size is given without groups"),
    ],
)
def test_columns_that_do_not_fit(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        planning.choose(**{"lengths": [3, 4], "dp_size": 1, "batch_size": 2} | changes)
