"""A trainer over TransferQueue that is cut off and comes again: ``python transfer_queue_drill.py FOLDER KILL``.

Two ranks of one process train what two storage units hold, and TransferQueue's checkpoint is saved with every step, as
a trainer saves its model's. ``KILL`` is "storage" or "controller", which dies in the midst; then this process gives up.
With "nothing" it begins from the checkpoint that is there, and trains to the end. Rows trained go to FOLDER/trained,
a line of JSON a step.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ |= {"TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT": "3", "TQ_SIMPLE_STORAGE_PROBE_TIMEOUT": "2"}

import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import interface

from stream_balancer.integrations.transfer_queue import MARK, BalancedSampler

ROWS, RANKS, PER_RANK, KILLED_AT = 40, 2, 4, 2
LENGTHS = [30 + (row * 7919) % 400 for row in range(ROWS)]
CONTROLLER_S = 20.0
"""A request to a controller that is dead never ends by itself."""


def put() -> None:
    for first in range(0, ROWS, 8):
        lengths = LENGTHS[first : first + 8]
        rows = [torch.full((length,), first + place) for place, length in enumerate(lengths)]
        ids = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        tags = [{"total_lengths": length} for length in lengths]
        names = [f"{first + place}" for place in range(len(lengths))]
        transfer_queue.kv_batch_put(names, "train", TensorDict({"input_ids": ids}, len(rows)), tags)


def share(rank: int, step: int) -> list[int]:
    """Names of the rows that a rank trains in a step, read from the storage units."""
    asked = {"dp_rank": rank, "batch_index": step, "partition_id": "train", "task_name": "train", "end": True}
    client = transfer_queue.get_client()
    meta = client.get_meta(["input_ids"], PER_RANK, "train", task_name="train", sampling_config=asked)
    if not meta.size:
        return []
    rows = client.get_data(meta)["input_ids"].unbind()
    return [int(row[0]) for row, tags in zip(rows, meta.custom_meta, strict=True) if tags[MARK]["weight"]]


def shares(step: int) -> list[int]:
    """The step's rows. Raises TimeoutError if nobody answers, RuntimeError if a storage unit does not."""
    found: list[Any] = []

    def ask() -> None:
        try:
            found.append([row for rank in range(RANKS) for row in share(rank, step)])
        except Exception as reason:  # noqa: BLE001 - any failure of theirs ends this trainer
            found.append(RuntimeError(f"{type(reason).__name__}: {reason}"))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(CONTROLLER_S)
    if not found:
        raise TimeoutError("the controller does not answer")
    if isinstance(found[0], Exception):
        raise found[0]
    rows: list[int] = found[0]
    return rows


def kill_now(actor: Any) -> None:
    """Returns when it is dead: ray.kill is a message, and on a busy machine a step may pass before it comes."""
    ray.kill(actor)
    with suppress(ray.exceptions.RayActorError):
        while True:
            ray.get(actor.__ray_ready__.remote())


def main(folder: Path, kill: str) -> None:
    ray.init(
        "local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        _system_config={"worker_niceness": 0},
    )
    controller = {"polling_mode": True, "sampler": BalancedSampler(RANKS)}
    config = {"controller": controller, "backend": {"SimpleStorage": {"num_data_storage_units": 2}}}
    transfer_queue.init(OmegaConf.create(config, flags={"allow_objects": True}))
    checkpoint, trained = folder / "checkpoint", folder / "trained"
    if checkpoint.exists():
        transfer_queue.load_checkpoint(str(checkpoint))
    else:
        put()
    step = len(trained.read_text().splitlines()) if trained.exists() else 0
    while True:
        if step == KILLED_AT and kill == "storage":
            kill_now(next(iter(interface._TQ_STORAGE["SimpleStorage"].values())))
        if step == KILLED_AT and kill == "controller":
            kill_now(ray.get_actor("TransferQueueController", namespace="transfer_queue"))
        try:
            rows = shares(step)
        except (TimeoutError, RuntimeError) as reason:
            sys.stdout.write(f"step {step}: {reason}\n")
            break
        if not rows:
            break
        transfer_queue.save_checkpoint(str(checkpoint))
        with trained.open("a") as file:
            file.write(json.dumps(rows) + "\n")
        step += 1
    sys.stdout.flush()
    ray.shutdown()
    os._exit(0)  # their threads wait for what is dead


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
