"""What the tests of this folder stand on: which warnings count, and that every peer imports where peers are
required."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from guard import GUARD_S

PEERS = [
    "accelerate",
    "areal",
    "lightning",
    "openrlhf",
    "tensordict",
    "transfer_queue",
    "trl",
    "verl.protocol",
]


@pytest.mark.skipif(
    os.environ.get("STREAM_BALANCER_REQUIRE_PEERS") != "1", reason="`make test-integrations` has the peers"
)
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_that_does_not_import_is_a_failure(name: str) -> None:
    assert importlib.import_module(name)


def test_warnings_of_others_are_quiet_and_ours_are_errors() -> None:
    warnings.warn_explicit("theirs", UserWarning, "theirs.py", 1, module="verl.protocol")
    with pytest.raises(UserWarning, match="ours"):
        warnings.warn_explicit("ours", UserWarning, "ours.py", 1, module="stream_balancer.integrations.verl")


@pytest.mark.parametrize(("ci", "project", "green"), [("", "a/b", 1), ("1", "a/b", 0), ("1", "THUDM/slime", 1)])
def test_what_cannot_be_had_is_counted_and_fails_in_ci_unless_listed(
    tmp_path: Path, ci: str, project: str, green: int
) -> None:
    reason = f"pinned files of {project} are neither here nor can they be fetched: no network"
    tmp_path.joinpath("test_one.py").write_text(
        f"import pytest\ndef test_one(): pytest.skip({reason!r})\ndef test_other(): pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", "-c", "/dev/null", "--rootdir", tmp_path, tmp_path],
        env={"PYTHONPATH": str(Path(__file__).parent), "STREAM_BALANCER_REQUIRE_PEERS": "1", "CI": ci},
        capture_output=True,
        text=True,
        timeout=GUARD_S,
        check=False,
    )
    assert done.returncode == (not green), done.stdout
    last = done.stdout.splitlines()[-1]
    assert ("1 passed, 1 not run for want of pinned files" if green else "1 failed, 1 passed") in last
    assert not green or f"1 of {project}; by hand: " in done.stdout


@pytest.mark.skipif(not shutil.which("setpriv"), reason="setpriv of util-linux is not installed")
def test_what_a_test_starts_ends_when_the_test_is_killed() -> None:
    code = (
        "import subprocess, time; from children import ending_with_us\n"
        "subprocess.Popen(ending_with_us('sh', '-c', 'echo begun; exec sleep 1000')); time.sleep(1000)"
    )
    here = Path(__file__).parent
    with subprocess.Popen([sys.executable, "-c", code], cwd=here, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == b"begun\n"
        starter.kill()
        starter.communicate(timeout=GUARD_S)  # its end: nobody holds the pipe any more
