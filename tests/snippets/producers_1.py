import stream_balancer as sb
from tests.snippets._stage import controller
from tests.snippets._stage import rollout as numbered

rollout = numbered(1)
there = sb.connect
sb.connect = lambda: there(address)  # as inside torchrun

with controller(rollouts=0) as address:
    pass  # the snippet
