"""The loading hook of OpenRLHF and ROLL: in the process that it starts, and in workers of its Ray job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from children import ending_with_us
from guard import GUARD_S

from stream_balancer.integrations import autopatch

PROGRAM = """
import sys
import ray

def homes():
    from openrlhf.utils.seqlen_balancing import get_seqlen_balanced_partitions as openrlhf
    from roll.utils.functionals import get_seqlen_balanced_partitions as roll
    return openrlhf.__module__, roll.__module__

ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"A": "1"}})
print(sys.argv[1:], homes(), ray.get(ray.remote(homes).remote()))
"""


@pytest.mark.parametrize("as_module", [False, True])
def test_every_process_of_the_job_partitions_with_ours(tmp_path: Path, *, as_module: bool) -> None:
    pytest.importorskip("ray")
    pytest.importorskip("openrlhf")
    tmp_path.joinpath("train.py").write_text(PROGRAM)
    utils = tmp_path / "roll" / "utils"  # ROLL is in no registry
    utils.mkdir(parents=True)
    utils.joinpath("functionals.py").write_text("def get_seqlen_balanced_partitions(): ...\n")
    program = "train" if as_module else str(tmp_path / "train.py")
    command = ending_with_us(sys.executable, "-m", autopatch.__name__, program, "--steps", "3")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PYTHONPATH": f"{root}:{tmp_path}", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=GUARD_S,
        check=False,
    )
    ours = ("stream_balancer.integrations.partitions",) * 2
    assert f"['--steps', '3'] {ours} {ours}" in done.stdout, done.stderr


def test_another_setup_hook_is_not_replaced_silently() -> None:
    assert autopatch.with_install(None) == {"worker_process_setup_hook": f"{autopatch.__name__}.install"}
    with pytest.raises(ValueError, match=r"hook 'mine\.hook' already: call stream_balancer\.integrations\.autopatch"):
        autopatch.with_install({"worker_process_setup_hook": "mine.hook"})
