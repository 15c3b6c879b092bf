from tests.snippets._stage import *

rollouts, model = to_train_on(), Model()
optimizer, address = Optimizer(model), ""
batches = batches_of(rollouts, dp_size=2, batch_size=8, micro_batches=sb.MicroBatches(max_tokens=30), sync="step")


class Feed:
    auto_ack = True

    def __init__(self, rank):
        self._left = iter([batch.ranks[rank] for batch in batches])

    def __next__(self):
        return next(self._left)


class sb:
    """The feeds of two ranks, one rank after the other."""

    @staticmethod
    def RankFeed(address, *, rank, dp_size, device):
        return Feed(rank)


dp_size = 2
for rank in range(dp_size):  # noqa: B007 - the snippet's
    pass  # the snippet
for batch, one, other in zip(batches, optimizer.gradients[:3], optimizer.gradients[3:], strict=True):
    expected = gradient_of_sequences(
        model, of_batch(rollouts, batch), lambda ids: model(ids, torch.arange(len(ids)), torch.tensor([0, len(ids)]))
    )
    assert same((one + other) / 2, expected)
