import stream_balancer as sb
from tests.snippets._stage import controller

gradient, met = [], []


def accumulate(micro_batch):
    gradient.append(micro_batch)


def all_reduce(gradient, among):
    assert len(gradient) == 1
    met.append(among)


class optimizer:
    def step():
        gradient.clear()


with controller(rollouts=8) as address:
    feed = sb.RankFeed(address, rank=0, dp_size=1)
    pass  # the snippet
assert met == [(0,)] * 4
