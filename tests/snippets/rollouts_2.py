import copy

from tests.snippets._stage import *

epochs, updates = sb.rollouts.RankBatch.epochs, []


def noted(step, count):
    for mini_batch in epochs(step, count):
        before = copy.deepcopy(model)
        yield mini_batch
        rollouts = [one for micro_batch in mini_batch.micro_batches for one in micro_batch.rollouts]
        assert same(flat([model.weight.grad]), gradient_of_sequences(before, rollouts))
        updates.append(len(rollouts))


sb.rollouts.RankBatch.epochs = noted
pass  # the snippet
assert updates == [2] * 24
