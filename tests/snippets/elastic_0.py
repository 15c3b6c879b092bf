from tests.snippets._stage import *

rank, dp_size, saved, trained = 0, 1, {}, []
time_to_save = lambda step: step % 2


def train(batch):
    assert batch.micro_batches
    trained.append(batch.step)


def save(feed):
    saved["feed"] = feed


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with controller(rollouts=8) as address:
    pass  # the snippet
dist.destroy_process_group()
assert trained == [0, 1, 2, 3]
assert saved["feed"]["next_step"] == 4
