from tests.snippets._stage import *

pass  # the snippet
assert cost.flops_per_pair == 14 * 32 * 128 * 48
