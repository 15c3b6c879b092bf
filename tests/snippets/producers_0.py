from tests.snippets._stage import *

rollout = rollout(1)
there = sb.connect
sb.connect = lambda given: there(address)


async def main():
    pass  # the snippet


with controller(rollouts=0) as address:
    anyio.run(main)
