import stream_balancer as sb

pass  # the snippet
assert config.cost.prior.quadratic == 1.0
