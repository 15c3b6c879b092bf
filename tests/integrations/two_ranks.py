"""A script of this folder under torchrun: two ranks over gloo, on this machine's CPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed as dist
from children import ending_with_us
from guard import GUARD_S

HERE = Path(__file__).parent


def torchrun(script: Path, folder: Path | None = None, *arguments: str) -> dict[str, Any]:
    """What rank 0 found; fails with what the ranks said."""
    arguments = () if folder is None else (str(folder), *arguments)
    options = ["--standalone", "--nproc-per-node", "2", "--no-python"]
    rank = ending_with_us(sys.executable, "-u", script, *arguments)
    path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        ending_with_us(sys.executable, "-m", "torch.distributed.run", *options, *rank),
        capture_output=True,
        text=True,
        timeout=2 * GUARD_S,  # three processes, and more than torch is imported
        env=os.environ | {"PYTHONPATH": path},
    )
    if ran.returncode:
        pytest.fail("\n".join(line for line in ran.stderr.splitlines() if line.startswith("[rank")))
    return {} if folder is None else json.loads((folder / "found.json").read_text())


def leave(folder: Path | None = None, found: dict[str, Any] | None = None) -> NoReturn:
    """Writes what rank 0 found. End of a rank, together, and without taking gloo's groups apart: now and then torch
    joins their threads while it holds the interpreter's lock, for which a thread waits that still has the last
    collective's tensor."""
    if folder is not None and dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
