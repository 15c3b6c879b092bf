import stream_balancer as sb

pass  # the snippet
assert config.cost.quadratic == 1.0
