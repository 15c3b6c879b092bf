pass  # the snippet
# of (weight - 1) ** 2 over the tokens from the second on: two steps of 0.1 * 2 * (1 - weight)
assert abs(weight.item() - 0.36) < 1e-6
