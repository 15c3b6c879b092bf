"""TransferQueue's own processes, a recorded stream: rows that several clients put, its sampler's choice and ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from children import ending_with_us
from guard import GUARD_S


def test_ranks_wait_a_fraction_of_what_they_wait_with_their_sampler(traces_dir: Path) -> None:
    pytest.importorskip("transfer_queue")
    here = Path(__file__).parent
    trace = traces_dir / "lrm_token_economy_g5.csv.gz"
    done = subprocess.run(
        ending_with_us(sys.executable, here / "transfer_queue_stream.py", trace, "theirs", "ours"),
        env={**os.environ, "PYTHONPATH": str(here.parents[1]), "TQ_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=GUARD_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    theirs, ours = map(json.loads, done.stdout.splitlines()[-2:])
    assert ours["idle"] < theirs["idle"] / 3, (ours, theirs)
    assert ours["rows"] == ours["distinct"] == 96  # also what does not fill a step
    assert ours["in_step"]
    assert ours["over_cap"] == 0
