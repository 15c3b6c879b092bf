import anyio
import torch

import stream_balancer as sb
from stream_balancer.controller.serve import serve
from stream_balancer.transport.memory import MemoryTransport

sizes = []


async def train(feed):
    sizes.extend([batch.dp_size async for batch in feed])


async def main():
    config = sb.BalancerConfig(dp_size=2, batch_size=2)
    async with sb.StreamBalancer(config) as balancer, MemoryTransport(dp_size=2) as transport:
        for _ in range(4):
            await balancer.put(sb.Rollout(tokens={"input_ids": torch.arange(5)}))
        balancer.end()
        async with anyio.create_task_group() as tasks:

            async def ranks():
                feeds = [sb.RankFeed(transport.connect(rank)) for rank in range(2)]
                for feed in feeds:
                    await anext(feed)
                await feeds[1].aclose()  # without acknowledging
                while transport.dp_size == 2:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
                await train(sb.RankFeed(transport.connect(0, incarnation=1)))

            tasks.start_soon(ranks)
            pass  # the snippet: rejoin_timeout_s=60 -> rejoin_timeout_s=0.01


anyio.run(main)
assert sizes == [1, 1]
