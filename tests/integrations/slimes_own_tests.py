"""slime's own tests of its schedule, run on ours: ``python tests/integrations/slimes_own_tests.py PATH_OF_A_CHECKOUT``.

slime is in no package registry, so `make test-integrations` cannot run them. Needs pytest and numpy only.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    source = Path(sys.argv[1]).resolve()
    sys.path[:0] = [str(source), str(Path(__file__).resolve().parents[2])]
    from slime.utils import dp_schedule

    from stream_balancer.integrations import slime

    slime.patch()  # before slime's tests import the schedule by name
    assert dp_schedule.build_dp_schedule.__module__ == slime.__name__
    tests = source / "tests" / "test_dp_schedule.py"
    sys.exit(pytest.main(["-q", "-c", "/dev/null", "--rootdir", str(source), "-W", "ignore", str(tests)]))
