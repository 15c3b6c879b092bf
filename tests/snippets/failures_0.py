import stream_balancer as sb
from tests.snippets._stage import controller

rank, dp_size = 0, 1
with controller(rollouts=8) as address:
    pass  # the snippet: "tcp://controller:29400" -> address
assert batch.step == 3
