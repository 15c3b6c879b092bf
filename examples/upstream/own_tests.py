"""Projects' own tests on checkouts of them, as they are and with our patch, and the idle time of both.

    python examples/upstream/own_tests.py FOLDER [--trace FILE] [NAME...]

``FOLDER`` holds checkouts that are called as the patches are: verl, trl, ... Nothing is fetched, and nothing in them is
changed: both runs are made on copies. The Python that runs this needs what the project's tests import; CUDA, vllm,
sglang and monarch are replaced by stand-ins where the table below says so. A test that fails before may fail after.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import stream_balancer as sb

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 900


class Project(NamedTuple):
    """Where a patch applies, and the tests of the project that run its code."""

    repository: str
    commit: str
    tests: tuple[str, ...]
    absent: tuple[str, ...] = ()
    """Packages that get a stand-in."""
    planned: bool = True
    """plans.py knows its planner."""


PROJECTS = {
    "verl": Project("verl-project/verl", "1dda039b", ("tests/utils/test_seqlen_balancing.py",)),
    "torchtitan": Project(
        "pytorch/torchtitan",
        "b5bcd76c",
        ("torchtitan/experiments/rl/tests/test_async_controller.py",),
        ("vllm", "monarch", "torchstore", "flash_attn", "triton", "renderers"),
    ),
    "trl": Project("huggingface/trl", "f2cd5771", ("tests/experimental/test_async_grpo_trainer.py",)),
    "slime": Project("THUDM/slime", "624b824a", ("tests/test_dp_schedule.py",)),
    "miles": Project(
        "radixark/miles",
        "31f1ca96",
        # its conftest.py imports sglang
        ("--noconftest", "tests/fast/utils/test_dp_schedule.py", "tests/fast/utils/test_ffd_pack.py"),
    ),
    "OpenRLHF": Project(
        "OpenRLHF/OpenRLHF",
        "3c3be623",
        ("tests", "--ignore", "tests/test_loss_aggregation.py"),  # that one needs deepspeed
    ),
    "AReaL": Project("areal-project/AReaL", "cbff54d6", ("tests/test_seqpack.py", "tests/test_kk_allocate.py")),
    "TransferQueue": Project("Ascend/TransferQueue", "b75d570d", ("tests/test_samplers.py",), planned=False),
}


def environment(checkout: Path, project: Project, *, ours: bool) -> dict[str, str]:
    """Without ours the import fails, be the package installed or not."""
    absent = project.absent if ours else (*project.absent, "-stream_balancer")
    paths = [checkout, HERE, *([HERE.parents[1]] if ours else [])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "UPSTREAM_ABSENT": ",".join(absent),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def said(checkout: Path, command: list[str], variables: dict[str, str]) -> str:
    try:
        ran = subprocess.run(
            [sys.executable, *command],
            cwd=checkout,
            env=variables,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {TIMEOUT_S} s"
    lines = (ran.stdout.strip() or ran.stderr.strip()).splitlines()
    return lines[-1] if lines else f"exit status {ran.returncode}"


def tests(checkout: Path, project: Project, *, ours: bool) -> str:
    """Passed, failed and so on, as pytest counts them."""
    options = ["-q", "-p", "stand_ins", "-p", "no:cacheprovider", "-o", "addopts=", "--tb=no", *project.tests]
    line = said(checkout, ["-m", "pytest", *options], environment(checkout, project, ours=ours))
    counts = re.findall(r"\d+ (?:passed|failed|errors?|skipped)", line)
    return ", ".join(counts) or line


def applied(patch: Path, checkout: Path) -> None:
    # a repository around the copy would make git look for the files in that
    alone = os.environ | {"GIT_CEILING_DIRECTORIES": str(checkout.parent)}
    subprocess.run(["git", "apply", "--unidiff-zero", patch], cwd=checkout, env=alone, check=True)


def row(name: str, source: Path, lengths: list[int]) -> str:
    project = PROJECTS[name]
    patches = sorted(HERE.glob(f"{name}*.patch"))
    added = sum(line.startswith("+") and not line.startswith("+++") for one in patches for line in one.open())
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder, name)
        recorded = Path(folder, "lengths.json")
        recorded.write_text(json.dumps(lengths))
        shutil.copytree(source, checkout, ignore=shutil.ignore_patterns(".git"), symlinks=True)
        found = []
        for ours in (False, True):
            if ours:
                for patch in patches:
                    applied(patch, checkout)
            idle = "-"
            if lengths and project.planned:
                asked = [str(HERE / "plans.py"), name, str(recorded)]
                idle = said(checkout, asked, environment(checkout, project, ours=ours))
            found.append((tests(checkout, project, ours=ours), idle))
    (tests_before, idle_before), (tests_after, idle_after) = found
    cells = (project.repository, project.commit, str(added), tests_before, tests_after, idle_before, idle_after)
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PROJECTS))
    parser.add_argument("--trace", help="recorded lengths, for the idle time")
    options = parser.parse_intermixed_args()
    lengths = sb.load_trace(options.trace).lengths.tolist() if options.trace else []
    sys.stdout.write("| project | commit | lines added | own tests before | after | idle before | after |\n")
    sys.stdout.write("|---|---|---|---|---|---|---|\n")
    for name in options.names or PROJECTS:
        source = (options.folder / name).resolve()
        text = row(name, source, lengths) if source.is_dir() else f"| {name} | no folder {source}: not run |"
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
