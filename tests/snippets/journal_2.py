import stream_balancer as sb
from tests.snippets._stage import controller

saved, trained = [], []
load_checkpoint, save_checkpoint, train = lambda: 0, saved.append, trained.append
rank, dp_size = 0, 1

with controller(rollouts=8) as address:
    pass  # the snippet
assert [batch.step for batch in trained] == [1, 2, 3], "step 0 was in the checkpoint"
assert saved == [3]
