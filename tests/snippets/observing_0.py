import os
import tempfile

import anyio

import stream_balancer as sb

os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp()
config = sb.BalancerConfig(dp_size=1, batch_size=2)


async def main():
    pass  # the snippet


anyio.run(main)
