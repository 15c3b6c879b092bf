"""A training all_reduce beside the feed: how much slower it gets while batches arrive, and whether its result changes.

``python bench/beside_training.py [--json] [--megabytes 10] [--rounds 6]``. Two rank processes in a gloo world of their
own sum 4 MB again and again; in every second round they also take batches. A step is eight sums and one batch.
"""

from __future__ import annotations

import json
import math
import socket
import statistics
import time
from functools import partial

import anyio
import torch
import torch.distributed as dist
from _common import Rows, arguments, keep_putting, peer

import stream_balancer as sb

ELEMENTS = 2**20  # float32: 4 MB
SUMS_PER_STEP = 8
STEPS_PER_ROUND = 12
BAR = 1.5


def rank_main(rank: int, address: str, port: int, rounds: int, shared_memory: bool) -> None:
    """Prints its times and a checksum of its sums."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    feed = sb.RankFeed(address, rank=rank, dp_size=2, movers=("shared_memory",) if shared_memory else ())
    times: dict[str, list[float]] = {"quiet": [], "beside": []}
    sums: dict[str, list[float]] = {"quiet": [], "beside": []}
    gradient = torch.empty(ELEMENTS)
    for lap in range(2 * rounds):
        kind = "beside" if lap % 2 else "quiet"
        generator = torch.Generator().manual_seed(1000 * (lap // 2) + rank)
        for _ in range(STEPS_PER_ROUND):
            if kind == "beside":
                next(feed)
            else:
                time.sleep(0.02)  # what was on its way has arrived
            for _ in range(SUMS_PER_STEP):
                gradient.normal_(generator=generator)
                dist.barrier()
                began = time.perf_counter()
                dist.all_reduce(gradient)
                times[kind].append(time.perf_counter() - began)
            sums[kind].append(float(gradient.view(torch.int32).sum(dtype=torch.int64)))
    feed.close()
    dist.destroy_process_group()
    print(json.dumps({"times": times, "equal": sums["quiet"] == sums["beside"]}))


async def measure(rows: Rows, num_tokens: int, rounds: int, shared_memory: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = sb.BalancerConfig(dp_size=2, batch_size=8, window=8, capacity=16)
    async with (
        sb.TorchTransport.listen(dp_size=2, movers=["shared_memory"] * shared_memory) as transport,
        sb.StreamBalancer(config) as balancer,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(keep_putting, balancer, num_tokens)
        tasks.start_soon(partial(sb.serve, balancer, transport, rejoin_timeout_s=math.inf))
        plan = (transport.address, port, rounds, shared_memory)
        with peer(0, *plan) as first, peer(1, *plan) as second:
            told = [json.loads((await anyio.to_thread.run_sync(rank.communicate))[0]) for rank in (first, second)]
        tasks.cancel_scope.cancel()
    median = {kind: statistics.median(told[0]["times"][kind]) for kind in ("quiet", "beside")}
    if not all(one["equal"] for one in told):
        raise SystemExit("FAILED: sums beside the feed differ from sums without it")
    rows.add(
        f"all_reduce_4MB_beside_{'shared' if shared_memory else 'sockets'}",
        median["beside"] / median["quiet"],
        "ratio",
        BAR,
        quiet_ms=round(1e3 * median["quiet"], 2),
        beside_ms=round(1e3 * median["beside"], 2),
        results="bit-equal",
    )


def main() -> None:
    options = arguments(__doc__, megabytes=10.0, rounds=6)
    if options.as_peer:
        rank_main(*options.as_peer)
        return
    torch.set_num_threads(1)
    num_tokens = int(options.megabytes * 1e6 / 4 / 8)  # four rollouts a rank, 8 bytes a token on the wire
    for shared_memory in (False, True):
        anyio.run(
            measure, Rows(options.json, options.results, more=shared_memory), num_tokens, options.rounds, shared_memory
        )


if __name__ == "__main__":
    main()
