from tests.snippets._stage import *

saved, trained, lives = [-1], [], []
load_checkpoint, save_checkpoint = lambda: saved[-1], saved.append
config = sb.BalancerConfig(dp_size=1, batch_size=1, window=1, capacity=200, max_skips=300)
path = tempfile.mkdtemp()


def train(batch):
    trained.append(batch.step)
    if batch.step == 119:
        lives[-1].cancel()


async def main():
    async with sb.StreamBalancer(config, journal=path) as balancer:
        for n in range(120):
            await balancer.put(rollout(n))
    for _ in range(2):  # the second life begins where the first one's last checkpoint was
        with anyio.CancelScope() as life:
            lives.append(life)
            await one_life()
    assert saved[1:] == [49, 99]
    assert trained == [*range(120), *range(100, 120)]


async def one_life():
    pass  # the snippet


anyio.run(main)
