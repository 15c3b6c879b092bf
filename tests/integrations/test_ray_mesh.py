"""Model-parallel ranks in Ray actors: a mesh of 2 x 2, each of whose processes joins by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forked import free_port
from guard import GUARD_S

ray = pytest.importorskip("ray")

from ray_cluster import MeshRank, kill  # noqa: E402

import stream_balancer as sb  # noqa: E402
from stream_balancer.client.object_store import INLINE_BYTES  # noqa: E402
from stream_balancer.ray import find, host  # noqa: E402
from stream_balancer.testing import make_rollout  # noqa: E402

LENGTHS = [1 + 37 * n for n in range(14)] + [INLINE_BYTES, INLINE_BYTES + 7]  # two go to the object store


pytestmark = pytest.mark.usefixtures("nodes")


@pytest.fixture(scope="module")
def ranks(nodes: Any) -> list[Any]:
    port = free_port()
    return [ray.remote(MeshRank).options(num_cpus=0).remote(port, number) for number in range(4)]


def _expected(told: list[Any]) -> None:
    """Peers got what their leader got, and all of it was put."""
    assert told[0] == told[1]
    assert told[2] == told[3]
    trained = sorted(one for rank in (told[0], told[2]) for step in rank for one in step)
    made = [make_rollout(length, f"m{n}") for n, length in enumerate(LENGTHS)]
    assert trained == sorted((one.rollout_id, int(one.tokens["input_ids"].sum())) for one in made)


@pytest.mark.parametrize("journal", [False, True], ids=["store", "journal"])
def test_peers_get_what_their_leader_gets(journal: bool, ranks: list[Any], tmp_path: Path) -> None:
    config = sb.BalancerConfig(dp_size=2, batch_size=4, window=8)
    balancer = host(config, name="of the mesh", journal=tmp_path / "journal" if journal else None)
    training = [rank.train.remote(find("of the mesh")) for rank in ranks]
    for n, length in enumerate(LENGTHS):
        balancer.blocking.put(make_rollout(length, f"m{n}"))
        if journal and n == len(LENGTHS) // 2:  # the leaders wait for it, and their peers notice nothing
            kill(balancer.actor)
    ray.get(balancer.actor._call.remote("end"), timeout=GUARD_S)
    _expected(ray.get(training, timeout=GUARD_S))
    balancer.blocking.close()
    ray.kill(balancer.actor)
