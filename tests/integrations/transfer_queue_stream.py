"""A recorded stream through TransferQueue's own processes: ``python transfer_queue_stream.py TRACE SAMPLER...``.

Two ranks put four rows at a time, a controller with the sampler and two storage units hold them, and the ranks read in
lockstep. Prints what each sampler did as a line of JSON.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue.sampler import SeqlenBalancedSampler

import stream_balancer as sb
from stream_balancer.integrations import transfer_queue as ours

RANKS, PER_RANK, ROWS, CAP = 2, 4, 96, 32_768
SAMPLERS = {
    "theirs": lambda: SeqlenBalancedSampler(n_samples_per_prompt=1, dp_size=RANKS),
    # loads below are sums of tokens
    "ours": lambda: ours.BalancedSampler(  # type: ignore[attr-defined]
        RANKS, micro_batches=sb.MicroBatches(max_tokens=CAP), cost="tokens", sync="step"
    ),
}


@ray.remote(num_cpus=0)
class Client:
    """A rank that rolls out, too."""

    def __init__(self) -> None:
        transfer_queue.init()
        self.queue = transfer_queue.get_client()

    def put(self, partition: str, lengths: dict[int, int]) -> None:
        rows = [torch.full((length,), name) for name, length in lengths.items()]
        ids = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        fields, tags = TensorDict({"input_ids": ids}, len(rows)), [{"total_lengths": n} for n in lengths.values()]
        transfer_queue.kv_batch_put([f"{name}" for name in lengths], partition, fields, tags)

    def read(self, partition: str, rank: int, step: int, *, end: bool) -> list[list[tuple[int, int, float]]] | None:
        """Micro-batches of (row, tokens, weight), read from the storage units; None where there is nothing yet."""
        asked = {"dp_rank": rank, "batch_index": step, "partition_id": partition, "task_name": "train", "end": end}
        meta = self.queue.get_meta(["input_ids"], PER_RANK, partition, task_name="train", sampling_config=asked)
        if not meta.size:
            return None
        rows = [(int(ids[0]), len(ids)) for ids in self.queue.get_data(meta)["input_ids"].unbind()]
        if ours.MARK not in meta.custom_meta[0]:
            return [[(*row, 1.0) for row in rows]]
        weights = [tags[ours.MARK]["weight"] for tags in meta.custom_meta]
        return [[(*rows[place], weights[place]) for place in places] for places in ours.micro_batches(meta)]


def run(kind: str, lengths: list[int], clients: list[Any]) -> dict[str, Any]:
    controller = ray.get_actor("TransferQueueController", namespace="transfer_queue")
    ray.get(controller.register_sampler.remote(SAMPLERS[kind]()))
    coming = [{row: lengths[row] for row in range(first, first + 4)} for first in range(0, len(lengths), 4)]
    steps: list[list[Any]] = []
    share: list[Any] = [None] * RANKS
    while True:
        puts = [client.put.remote(kind, coming.pop()) for client in clients if coming]
        ended = not ray.get(puts)
        missing = [rank for rank in range(RANKS) if share[rank] is None]
        asked = [clients[rank].read.remote(kind, rank, len(steps), end=ended) for rank in missing]
        for rank, answer in zip(missing, ray.get(asked), strict=True):
            share[rank] = answer
        if all(one is not None for one in share):
            steps.append(share)
            share = [None] * RANKS
        elif ended:
            break  # and theirs leaves what does not fill a step
    loads = [[sum(n for one in of_rank for _, n, weight in one if weight) for of_rank in step] for step in steps]
    trained = [row for step in steps for of_rank in step for one in of_rank for row, _, weight in one if weight]
    return {
        "sampler": kind,
        "idle": 1 - sum(map(sum, loads)) / RANKS / sum(map(max, loads)),
        "rows": len(trained),
        "distinct": len({*trained}),
        "in_step": all(len({len(of_rank) for of_rank in step}) == 1 for step in steps),
        "over_cap": sum(
            len(one) > 1 and sum(n for _, n, _ in one) > CAP for step in steps for of in step for one in of
        ),
    }


def main(trace: Path, kinds: list[str]) -> None:
    lengths = random.Random(0).sample(sb.load_trace(trace).lengths.tolist(), ROWS)
    ray.init(
        "local",
        num_cpus=4,  # Ray starts as many processes at once
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 * 2**20,
        # Ray's own 15 lets its workers wait behind whatever else the machine does
        _system_config={"worker_niceness": 0},
    )
    config = {"controller": {"polling_mode": True}, "backend": {"SimpleStorage": {"num_data_storage_units": 2}}}
    transfer_queue.init(OmegaConf.create(config))
    clients = [Client.remote() for _ in range(RANKS)]
    for kind in kinds:
        sys.stdout.write(json.dumps(run(kind, lengths, clients)) + "\n")
        sys.stdout.flush()
    transfer_queue.close()
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
