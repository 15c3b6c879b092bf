from tests.snippets._stage import *

pass  # the snippet
assert config.cost.prior.quadratic == 1.0
