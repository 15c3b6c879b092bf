from tests.snippets._stage import *

pass  # the snippet
assert config.cost.prior.flops_per_pair == 1.0
