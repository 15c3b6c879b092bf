from tests.snippets._stage import *

rollout = rollout(1)
there = sb.connect
sb.connect = lambda: there(address)  # as inside torchrun

with controller(rollouts=0) as address:
    pass  # the snippet
