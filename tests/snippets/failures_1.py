import stream_balancer as sb
from tests.snippets._stage import controller

rank, dp_size = 0, 1


class checkpoint:
    next_step = 2


with controller(rollouts=8) as address:
    pass  # the snippet
    assert batch.step == 3
    batch.ack()  # and every one before it
