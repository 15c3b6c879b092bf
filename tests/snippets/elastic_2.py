from tests.snippets._stage import *


async def train(feed):
    async for step in feed:
        assert [micro_batch.num_tokens for micro_batch in step]
        assert (await step.async_finish()).ranks == (0,)


async def main():
    async with in_memory(dp_size=1) as (balancer, transport, tasks):  # noqa: RUF059 - the snippet serves it
        tasks.start_soon(train, sb.RankFeed(transport.connect(0)))
        pass  # the snippet


anyio.run(main)
