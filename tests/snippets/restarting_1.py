from tests.snippets._stage import *

rollout = rollout()
config = sb.BalancerConfig(dp_size=1, batch_size=2)
folder = tempfile.mkdtemp()


async def main():
    pass  # the snippet: "/data/run7/journal" -> folder


anyio.run(main)
again = sb.StreamBalancer(config, journal=folder)


async def look():
    async with again:
        assert again.recovered.found


anyio.run(look)
