import stream_balancer as sb
from tests.snippets._stage import controller

rank, dp_size, gradient, met = 0, 1, [], []


def accumulate(micro_batch):
    gradient.append(micro_batch)


def all_reduce(gradient, among):
    met.append(among)


class optimizer:
    def step():
        gradient.clear()


with controller(rollouts=8) as address:
    pass  # the snippet
assert met == [(0,)] * 4
