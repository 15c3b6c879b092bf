from tests.snippets._stage import *

config = sb.BalancerConfig(dp_size=1, batch_size=2)


async def main():
    pass  # the snippet: port=9400 -> port=0


anyio.run(main)
