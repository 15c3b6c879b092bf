"""A project's own tests of a function, run on ours in its place: ``python their_own_tests.py NAME [pytest options]``.

From the pinned files of bench/peers-files.txt, for projects that are in no package registry.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

sys.path += [str(Path(__file__).parents[2] / "bench"), str(Path(__file__).parents[1])]
import peer_files
from children import ending_with_us
from guard import GUARD_S

from stream_balancer.integrations import slime

REPOSITORY = Path(__file__).resolve().parents[2]


class Theirs(NamedTuple):
    repository: str
    tests: str


THEIRS = {
    "slime": Theirs("THUDM/slime", "tests/test_dp_schedule.py"),
    "miles": Theirs("radixark/miles", "tests/fast/utils/test_dp_schedule.py"),
}
PATCHES = {"slime": slime.patch, "miles": lambda: slime.patch("miles")}


@contextmanager
def patched(patch: Callable[..., Callable[[], object]], *arguments: Any, **options: Any) -> Iterator[None]:
    """Ours in the place of theirs, until the end of the block."""
    put_back = patch(*arguments, **options)
    try:
        yield
    finally:
        put_back()


def checkout(repository: str) -> Path:
    """The folder of a project's pinned files; skips where they cannot be had."""
    pytest.importorskip("verl", reason="the pinned files belong to the environment of `make test-integrations`")
    try:
        return peer_files.checkout(repository)
    except OSError as reason:
        pytest.skip(str(reason))


def run(name: str) -> str:
    """The last lines of pytest: which of its tests failed, and how many passed."""
    checkout(THEIRS[name].repository)
    command = ending_with_us(sys.executable, __file__, name, "--no-header", "--tb=no", "-p", "no:cacheprovider")
    environment = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=GUARD_S).stdout


if __name__ == "__main__":
    theirs = THEIRS[sys.argv[1]]
    source = peer_files.checkout(theirs.repository)
    sys.path.insert(0, str(source))
    PATCHES[sys.argv[1]]()  # before its tests import the function by name
    options = ["-q", "-c", "/dev/null", "--rootdir", str(source), "-W", "ignore", *sys.argv[2:]]
    sys.exit(pytest.main([*options, str(source / theirs.tests)]))
