"""A script of this folder under torchrun: two ranks over gloo, on this machine's CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
import torch.distributed as dist
from children import ending_with_us
from guard import GUARD_S

HERE = Path(__file__).parent


def torchrun(script: Path, *arguments: str) -> None:
    """Fails with what the ranks said."""
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


def leave() -> NoReturn:
    """End of a rank, together, and without taking gloo's groups apart: now and then torch joins their threads while it
    holds the interpreter's lock, for which a thread waits that still has the last collective's tensor."""
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
