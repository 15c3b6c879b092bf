from tests.snippets._stage import *

saved, taken = [], []
accumulate, time_to_save, save_checkpoint = taken.append, lambda step: step % 2, lambda: saved.append(len(taken))
rank, dp_size = 0, 1

with controller(rollouts=8) as address:
    pass  # the snippet
assert saved == [2, 4]
