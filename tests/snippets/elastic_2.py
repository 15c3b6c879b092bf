from tests.snippets._stage import *

lengths = []


async def train(feed):
    async for step in feed:
        lengths.extend([micro_batch.num_tokens async for micro_batch in step])
        await step.async_finish()


async def main():
    config = sb.BalancerConfig(dp_size=1, batch_size=2, sync="step")
    async with sb.StreamBalancer(config) as balancer, MemoryNetwork(dp_size=1) as transport:
        for _ in range(4):
            await balancer.put(sb.Rollout(tokens={"input_ids": torch.arange(5)}))
        balancer.end()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(train, sb.RankFeed(transport.connect(0)))
            pass  # the snippet


anyio.run(main)
assert lengths == [10, 10]
