"""A disk that the journal itself has filled: training goes on, and what is trained on makes room."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from guard import GUARD_S

PROGRAM = Path(__file__).parent / "full_disk.py"
MOUNTED = 'mount -t tmpfs -o size=48m tmpfs "$1" && shift && exec "$@"'
"""Runs a command with a small disk of its own at a folder; it goes with the command."""


def with_a_small_disk(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    unshare = ["unshare", "--mount", "--map-root-user", "sh", "-c", MOUNTED, "sh", str(folder)]
    try:
        allowed = subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("no mount of its own is allowed here")
    return subprocess.run([*unshare, *command], capture_output=True, text=True, check=False, timeout=GUARD_S)


def test_a_journal_that_fills_its_disk_goes_on_training(tmp_path: Path) -> None:
    done = with_a_small_disk(tmp_path, sys.executable, str(PROGRAM), str(tmp_path / "journal"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2  # one for each loop
    for told in map(json.loads, lines):
        first, *later = told["accepted"]
        assert len(first) > 32  # more than half of the disk
        assert all(len(more) >= 16 for more in later)  # of 32 that were trained on
        assert len(told["trained"]) == 96
        assert sorted(told["trained"] + told["left"]) == sorted(one for more in told["accepted"] for one in more)
