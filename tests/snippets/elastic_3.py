from tests.snippets._stage import *

with sb.blocking(sb.BalancerConfig(dp_size=8, batch_size=64)) as balancer:
    pass  # the snippet
    assert balancer.config.dp_size == 6
