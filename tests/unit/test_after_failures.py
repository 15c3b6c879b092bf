"""A test that fails and then hangs ends, and so does what a test started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import after_failures
import pytest
from forked import run_python
from guard import GUARD_S

FAILS_AND_HANGS = """
import threading
import pytest

@pytest.fixture
def hangs():
    yield
    threading.Event().wait()

def test(hangs):
    assert False, "it failed"
"""


def test_what_hangs_once_its_test_has_failed_is_shown_and_ended(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(FAILS_AND_HANGS)
    limits = ["-o", "faulthandler_timeout=3", "-o", "faulthandler_exit_on_timeout=true"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "after_failures", "-c", os.devnull, "--rootdir", tmp_path, *limits, "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(after_failures.__file__).parent)},
        capture_output=True,
        text=True,
        timeout=GUARD_S,
        check=False,
    )
    assert "Timeout (0:00:03)!" in done.stderr
    assert "in hangs" in done.stderr
    assert done.returncode == 1


def test_what_a_program_started_ends_with_it_if_that_takes_too_long() -> None:
    with pytest.raises(TimeoutError):
        run_python("-c", "import subprocess; subprocess.run(['sleep', '100000'])", timeout_s=1.0)
