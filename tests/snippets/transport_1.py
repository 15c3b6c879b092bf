from tests.snippets._stage import *

trained = []
train = trained.append
rank, dp_size = 0, 1

with controller(rollouts=8) as address:
    pass  # the snippet: "tcp://10.0.0.1:29400" -> address
assert len(trained) == 4
