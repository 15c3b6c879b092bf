"""Ranks that go on without a lost one, while any process is killed or stopped: every rollout is in one gradient, and
the weights are those of one process.

The loop is that of docs/elastic.md. A rank dies before ``finish()``, before the meeting, in it or after it, and is
back in time or later, with weights of another rank, of its own, or with new ones. Collectives fail on some ranks.

``DRILL_SEED=7 pytest -m soak -rP tests/dist/test_elastic_drill.py`` has other faults, and shows how many of which kind.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from drill import Drill

SOCKET: list[str] = []
MOVERS = pytest.mark.parametrize("movers", [SOCKET, ["shared_memory"]], ids=["socket", "shared_memory"])
LONG_S = 2500.0
LONG = [pytest.mark.soak, pytest.mark.timeout(LONG_S)]
SHORT_S = 300.0


def drill(folder: Path, seed: int, victim: str, faults: int, movers: list[str], **options: object) -> None:
    seed = int(os.environ.get("DRILL_SEED", seed))
    counts = Drill(folder, seed, victim, faults, movers, **options).run(SHORT_S if faults < 10 else LONG_S)  # type: ignore[arg-type]
    print(f"seed {seed}: {dict(sorted(counts.items()))}")  # noqa: T201 - `pytest -rP` shows it


@MOVERS
@pytest.mark.parametrize("kills", [4, pytest.param(100, marks=LONG)])
def test_ranks_are_killed(tmp_path: Path, kills: int, movers: list[str]) -> None:
    drill(tmp_path, 1, "rank", kills, movers)


@pytest.mark.parametrize("hand_over", ["balancer", "direct"])
@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=LONG)])
def test_the_producer_is_killed(tmp_path: Path, kills: int, hand_over: str) -> None:
    drill(tmp_path, 2, "producer", kills, SOCKET if hand_over == "direct" else ["shared_memory"], hand_over=hand_over)


@MOVERS
@pytest.mark.parametrize("kills", [3, pytest.param(25, marks=LONG)])
def test_a_controller_with_a_journal_is_killed(tmp_path: Path, kills: int, movers: list[str]) -> None:
    drill(tmp_path, 3, "controller", kills, movers)


@MOVERS
@pytest.mark.parametrize("kills", [2, pytest.param(25, marks=LONG)])
def test_a_controller_with_checkpoints_is_killed_and_all_go_back(tmp_path: Path, kills: int, movers: list[str]) -> None:
    drill(tmp_path, 4, "all", kills, movers)


@MOVERS
@pytest.mark.parametrize("stops", [2, pytest.param(10, marks=LONG)])
def test_processes_are_stopped_for_three_seconds(tmp_path: Path, stops: int, movers: list[str]) -> None:
    drill(tmp_path, 5, "any", stops, movers, stops=True)
