from tests.snippets._stage import *

rank, dp_size, gradient, met = 0, 1, [], []


def accumulate(micro_batch):
    gradient.append(micro_batch)


def all_reduce(gradient, among):
    assert len(gradient) == 1
    met.append(among)


def scale(gradient, factor):
    assert 0 < factor <= 1 / 10


class optimizer:
    step = staticmethod(lambda: None)
    zero_grad = gradient.clear


with controller(rollouts=8) as address:
    pass  # the snippet
assert met == [(0,)] * 4
