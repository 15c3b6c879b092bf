import anyio

import stream_balancer as sb
from tests.snippets._stage import controller
from tests.snippets._stage import rollout as numbered

rollout = numbered(1)
there = sb.connect


def connect(given=None):  # outside torchrun, inside it
    global rollout
    if given is None:
        rollout = numbered(2)
    return there(address)


sb.connect = connect


async def main():
    pass  # the snippet


with controller(rollouts=0) as address:
    anyio.run(main)
