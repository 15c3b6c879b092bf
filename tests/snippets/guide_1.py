from tests.snippets._stage import *

pass  # the snippet

rollouts, model = to_train_on(), Model()
optimizer, ADDRESS = Optimizer(model), ""
batches = batches_of(rollouts, dp_size=2, batch_size=8, micro_batches=sb.MicroBatches(max_tokens=30), sync="step")


class sb:
    """The feeds of two ranks, one rank after the other."""

    @staticmethod
    def RankFeed(address, *, rank, dp_size):
        return [batch.ranks[rank] for batch in batches]


for rank in (0, 1):
    train(rank, 2)
for batch, one, other in zip(batches, optimizer.gradients[:3], optimizer.gradients[3:], strict=True):
    assert same((one + other) / 2, gradient_of_sequences(model, of_batch(rollouts, batch)))
