from tests.snippets._stage import *

sizes = []


async def train(feed):
    sizes.extend([batch.dp_size async for batch in feed])


async def main():
    async with in_memory(dp_size=2) as (balancer, transport, tasks):  # noqa: RUF059 - the snippet serves it

        async def ranks():
            feeds = [sb.RankFeed(transport.connect(rank)) for rank in range(2)]
            for feed in feeds:
                await anext(feed)
            await feeds[1].aclose()  # without acknowledging
            while transport.dp_size == 2:
                await anyio.sleep(0.01)
            await train(sb.RankFeed(transport.connect(0, incarnation=1)))

        tasks.start_soon(ranks)
        pass  # the snippet: rejoin_timeout_s=60 -> rejoin_timeout_s=0.01


anyio.run(main)
assert sizes == [1, 1]
