import tempfile

import anyio

import stream_balancer as sb
from tests.snippets._stage import rollout

saved, trained = [-1], []
load_checkpoint, save_checkpoint, train = lambda: saved[-1], saved.append, trained.append
config = sb.BalancerConfig(dp_size=1, batch_size=1, window=1, capacity=200, max_skips=300)
path = tempfile.mkdtemp()


async def main():
    async with sb.StreamBalancer(config, journal=path) as balancer:
        for n in range(120):
            await balancer.put(rollout(n))
    for _ in range(2):  # the second life begins where the first one's last checkpoint was
        with anyio.move_on_after(3):
            await one_life()
    assert saved[1:] == [49, 99]
    assert [batch.step for batch in trained] == [*range(120), *range(100, 120)]


async def one_life():
    pass  # the snippet


anyio.run(main)
