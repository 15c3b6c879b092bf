"""Runs verl's own test files against what this project puts in the place of verl's code.

    PYTHONPATH=. .venv-peers/bin/python tests/integrations/verls_own_tests.py PATH/TO/verl [pytest options]

PATH/TO/verl is a checkout of verl near the installed version (its wheel and sdist have no such tests). The files are
copied aside and changed, and every change is printed. Ours is put in the place of verl's in this process and in those
that a test spawns; ``ReplayBufferAsync`` is ``BalancedReplayBuffer``, whose metrics of its own are left out where a
test asks for none. Ray is told that it has eight CPUs, or TransferQueue would wait for a third one on a small machine.
A test that asks for two CUDA devices and NCCL gets the CPU and gloo; and where it asks, of random rows, for exactly
ceil(tokens / cap) micro-batches, more are allowed: no micro-batch may exceed the cap (nor in verl after its pull
request 7553, whose own function then meets that number in a quarter of the runs).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

SEQLEN_BALANCING = "tests/utils/test_seqlen_balancing.py"
REPLAY_BUFFER = "tests/trainer/ppo/v1/test_replay_buffer_on_cpu.py"

CHANGES = {
    SEQLEN_BALANCING: {
        "import torch\n": "import torch\n\nfrom stream_balancer.integrations.verl import patch\n\npatch()\n",
        "get_torch_device().set_device(rank)": "pass",
        "backend=get_nccl_backend()": 'backend="gloo"',
        'f"{get_device_name()}:{rank}"': '"cpu"',
        "assert len(micros) == ": "assert len(micros) >= ",
    },
    REPLAY_BUFFER: {
        "import ReplayBuffer, ReplayBufferAsync": "import ReplayBuffer\n"
        "from stream_balancer.integrations.verl.sampler import BalancedReplayBuffer as ReplayBufferAsync",
        "sampler_kwargs={}": 'sampler_kwargs={"dp_size": 2}',
        "    tq.init()": '    ray.init("local", num_cpus=8, include_dashboard=False)\n    tq.init()',
        "assert metrics == {}": "assert not [name for name in metrics if '/window/' not in name]",
        "import threading\n": "import ray\nimport threading\n",
    },
}


def changed(text: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        if old not in text:
            sys.exit(f"{old!r} is not in it: this version of the test is not known here; mend CHANGES")
        sys.stdout.write(f"  {old!r} -> {new!r}\n")
        text = text.replace(old, new)
    return text


def main(checkout: Path, options: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        for name, changes in CHANGES.items():
            sys.stdout.write(f"{name}\n")
            Path(folder, Path(name).name).write_text(changed((checkout / name).read_text(), changes))
        sys.stdout.flush()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), folder])}
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "300", *options, folder],
            env=environment,
            cwd=folder,
            check=False,
        ).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
