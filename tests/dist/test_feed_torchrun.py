"""A trainer that torchrun restarts, beside a controller that lives on: every rollout ends up in the weights once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import anyio
import pytest
from forked import TORCHRUN, started
from guard import GUARD_S
from scripted import ScriptedBalancer, make_batch

import stream_balancer as sb

SCRIPT = str(Path(__file__).with_name("torchrun_rank.py"))
STEPS = 10


@pytest.mark.slow  # test_crash.py kills ranks that checkpoint, without torchrun
def test_restarts_under_torchrun_train_on_everything_once(tmp_path: Path) -> None:
    anyio.run(_drill, tmp_path)  # it is about the trainer's processes: one loop will do


async def _drill(folder: Path) -> None:
    balancer = ScriptedBalancer([make_batch(step, 2) for step in range(STEPS)])
    with anyio.fail_after(GUARD_S):
        async with sb.TorchTransport.listen(dp_size=2) as transport:
            options = ["--nproc-per-node", 2, "--max-restarts", 2]
            # torchrun lets restarted processes use the old store, where gloo may read the address of one that died
            environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            command = ["-c", TORCHRUN, *options, SCRIPT, transport.address or "", folder]
            with started(*command, environment=environment) as trainer:
                await sb.serve(balancer, transport, rejoin_timeout_s=GUARD_S)
                _, errors = await anyio.to_thread.run_sync(trainer.communicate, GUARD_S)
    assert trainer.returncode == 0, errors
    assert balancer.acknowledged == list(range(STEPS))
    for rank in range(2):
        weights = json.loads((folder / f"rank{rank}-{STEPS - 1}.json").read_text())
        rollouts = [r.rollout_id for step in range(STEPS) for r in make_batch(step, 2).ranks[rank].rollouts]
        assert weights["trained"] == rollouts
    saved_not_acknowledged = json.loads((folder / f"rank0-{STEPS - 1}.json").read_text())["skipped"]
    assert saved_not_acknowledged[-1] == 5, "the step that was saved and not acknowledged came again"
