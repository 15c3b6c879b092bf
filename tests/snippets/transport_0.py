from tests.snippets._stage import *

config = sb.BalancerConfig(dp_size=1, batch_size=2)
addresses = []
print = addresses.append


async def main():
    with anyio.move_on_after(1.0):
        pass  # the snippet


anyio.run(main)
assert addresses[0].startswith("tcp://127.0.0.1:")
