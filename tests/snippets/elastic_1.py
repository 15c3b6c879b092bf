import itertools

from tests.snippets._stage import *

rank, dp_size, met, failures = 0, 1, [], [RuntimeError("a rank died")]
model = Model()
optimizer = Optimizer(model)


def all_reduce(model, among):
    met.append(among)
    if len(met) == 2 and failures:
        raise failures.pop()


def scale(model, factor):
    for one in model.parameters():
        if one.grad is not None:
            one.grad *= factor


with controller(rollouts=6, on_rank_loss="replan") as address:
    pass  # the snippet
assert met == [(0,)] * 4  # one of three steps failed once, and came again
of_pairs = {
    (n, m): gradient_of_sequences(model, [rollout(n), rollout(m)]) for n, m in itertools.combinations(range(6), 2)
}
trained = [pair for found in optimizer.gradients for pair, expected in of_pairs.items() if same(found, expected)]
assert sorted(sum(trained, ())) == list(range(6))
