import itertools

from tests.snippets._stage import *

rank, dp_size, met = 0, 1, []
model = Model()
optimizer = Optimizer(model)


def all_reduce(model, among):
    met.append(among)


def scale(model, factor):
    for one in model.parameters():
        if one.grad is not None:
            one.grad *= factor


with controller(rollouts=6) as address:
    pass  # the snippet
assert met == [(0,)] * 3
of_pairs = {
    (n, m): gradient_of_sequences(model, [rollout(n), rollout(m)]) for n, m in itertools.combinations(range(6), 2)
}
trained = [pair for found in optimizer.gradients for pair, expected in of_pairs.items() if same(found, expected)]
assert sorted(sum(trained, ())) == list(range(6))
