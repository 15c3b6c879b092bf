"""Four faults of TransferQueue 0.1.11 that any sampler meets, each as small as it gets: report-ready, and ours alone.

    pip install transferqueue==0.1.11 "ray[default]" tensordict omegaconf && python transfer_queue_faults.py

1. A row is ready before its length is there. `kv_batch_put` sends the data, which makes the row ready, and then its
   tags. `SeqlenBalancedSampler` counts a row without a tag as length 1. Repair: send `custom_meta` before the data.
2. `SeqlenBalancedSampler` hands rows out twice when a rank is a step ahead: it plans a step from all ready rows, among
   them those of the step before that other ranks have not fetched. Repair: keep planned rows out of the next plan.
3. Indices of cleared rows are given again, so siblings are not neighbours, and `GRPOGroupNSampler`, which takes
   neighbours for siblings, mixes groups. Repair: allocate a put's rows consecutively, or name the group in a tag.
4. Nobody is served while a sampler runs: a sampler that waits for more rows keeps them from coming. Repair: let
   `sample` answer "later" with a time, or run it beside the thread that serves requests.
"""

import sys
import threading
import time
from typing import Any

import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue.sampler import BaseSampler, GRPOGroupNSampler, SeqlenBalancedSampler, SequentialSampler


class Watching(SequentialSampler):  # type: ignore[misc]
    """Says how many ready rows had no length yet."""

    def sample(self, ready_indexes: list[int], *args: Any, **asked: Any) -> tuple[list[int], list[int]]:
        tags = asked["partition"].get_custom_meta(ready_indexes)
        missing = sum("total_lengths" not in tags.get(row, {}) for row in ready_indexes)
        with open("/tmp/rows_without_length", "a") as file:
            file.write(f"{missing}\n")
        return [], []


class Sleeping(SequentialSampler):  # type: ignore[misc]
    def sample(self, *args: Any, **asked: Any) -> tuple[list[int], list[int]]:
        time.sleep(2)
        answer: tuple[list[int], list[int]] = super().sample(*args, **asked)
        return answer


def put(partition: str, names: range, length: int = 100) -> None:
    rows = torch.nested.as_nested_tensor([torch.zeros(length, dtype=torch.int64)] * len(names), layout=torch.jagged)
    fields = TensorDict({"input_ids": rows}, batch_size=len(names))
    transfer_queue.kv_batch_put([f"{n}" for n in names], partition, fields, [{"total_lengths": length} for _ in names])


def get(partition: str, count: int, **config: Any) -> Any:
    asked = {"partition_id": partition, "task_name": "t", **config}
    return transfer_queue.get_client().get_meta(["input_ids"], count, partition, task_name="t", sampling_config=asked)


def use(sampler: BaseSampler) -> None:
    controller = ray.get_actor("TransferQueueController", namespace="transfer_queue")
    ray.get(controller.register_sampler.remote(sampler))


def a_row_is_ready_before_its_length_is_there() -> str:
    open("/tmp/rows_without_length", "w").close()
    use(Watching())

    def put_all() -> None:
        for first in range(0, 200, 4):
            put("early", range(first, first + 4))

    putting = threading.Thread(target=put_all)
    putting.start()
    while putting.is_alive():
        get("early", 1)
    with open("/tmp/rows_without_length") as file:
        missing = [int(line) for line in file]
    return f"{sum(map(bool, missing))} of {len(missing)} calls met rows without a length, up to {max(missing)} at once"


def rows_are_handed_out_twice() -> str:
    use(SeqlenBalancedSampler(n_samples_per_prompt=1, dp_size=2))
    put("twice", range(64))
    asked = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]  # (rank, step): rank 0 is two steps ahead
    rows = [row for rank, step in asked for row in get("twice", 4, dp_rank=rank, batch_index=step).global_indexes]
    return f"{len(rows)} rows handed out, {len(set(rows))} distinct"


def groups_are_mixed() -> str:
    use(SequentialSampler())
    client, size = transfer_queue.get_client(), 4

    def there() -> Any:
        return client.get_meta(["input_ids"], 8, "mixed", mode="force_fetch")

    put("mixed", range(8))
    client.clear_samples(there().select_samples([1, 3, 4, 6]))  # trained, as in a partition that is never cleared whole
    old = {*there().global_indexes}
    put("mixed", range(100, 100 + size))
    group_of = dict.fromkeys({*there().global_indexes} - old, "new")
    use(GRPOGroupNSampler(size))
    taken = get("mixed", 2 * size).global_indexes
    groups = [[group_of.get(row, "old") for row in taken[at : at + size]] for at in range(0, len(taken), size)]
    return f"groups of {size} as it takes them: {groups}"


def nobody_is_served_while_a_sampler_waits() -> str:
    use(Sleeping())
    put("slow", range(8))
    waiting = threading.Thread(target=lambda: get("slow", 4))
    waiting.start()
    time.sleep(0.3)
    began = time.perf_counter()
    put("other", range(1))
    took = time.perf_counter() - began
    waiting.join()
    return f"a sampler sleeps for 2 s, and another client's put took {took:.1f} s"


if __name__ == "__main__":
    ray.init("local", num_cpus=16, include_dashboard=False, log_to_driver=False)
    transfer_queue.init(OmegaConf.create({"controller": {"polling_mode": True}}))
    for fault in (
        a_row_is_ready_before_its_length_is_there,
        rows_are_handed_out_twice,
        groups_are_mixed,
        nobody_is_served_while_a_sampler_waits,
    ):
        sys.stdout.write(f"{fault.__name__}: {fault()}\n")
        sys.stdout.flush()
    transfer_queue.close()
