"""The same balancer without an event loop, threads and a plain loop: `python examples/blocking_loop.py`."""

import random
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch

import stream_balancer as sb

config = sb.BalancerConfig(dp_size=4, batch_size=32, micro_batches=sb.MicroBatches(max_tokens=4096), sync="step")


def generate(number: int, balancer: sb.BlockingBalancer) -> None:
    """One rollout, of an unpredictable length; put() may be called from any thread."""
    length = min(int(random.lognormvariate(5, 1)) + 2, 4096)
    time.sleep(length * 1e-4)
    balancer.put(sb.Rollout(tokens={"input_ids": torch.randint(0, 1000, (length,))}, rollout_id=f"rollout-{number}"))


def generate_all(balancer: sb.BlockingBalancer) -> None:
    """200 rollouts on 16 threads; then nothing more will come."""
    with ThreadPoolExecutor(16) as pool:
        for future in as_completed([pool.submit(generate, n, balancer) for n in range(200)]):
            future.result()
    balancer.end()


def main() -> None:
    """Generate beside, train here."""
    with sb.blocking(config) as balancer, ThreadPoolExecutor(1) as beside:
        generating = beside.submit(generate_all, balancer)
        for batch in balancer.batches():
            micro_batches = len(batch.ranks[0].micro_batches)  # the same number on every rank
            print(
                f"step {batch.step} ({batch.reason}): {batch.num_rollouts} rollouts, {batch.num_tokens} tokens, "
                f"{micro_batches} micro-batches a rank, imbalance {batch.imbalance:.2%}"
            )
        generating.result()
        print(f"{balancer.statistics().accepted} rollouts accepted")


if __name__ == "__main__":
    main()
