from tests.snippets._stage import *

called = []
groups = {(0, 1): "the ring"}
by_place = Model()
rollouts = [
    sb.Rollout(tokens={"input_ids": torch.arange(length) % 11}, rollout_id=f"r{length}") for length in (200, 8, 9, 10)
]
(batch,) = batches_of(
    rollouts, dp_size=2, batch_size=4, window=4, context_parallel=sb.ContextParallel(sizes=(1, 2), min_tokens=16)
)


def model(input_ids, position_ids, cu_seqlens, ring):
    assert input_ids.shape == position_ids.shape == (cu_seqlens[-1],)
    called.append((ring, len(input_ids)))
    return by_place(input_ids, position_ids)


feed = batch.ranks
pass  # the snippet
assert [one for one in called if one[0]] == [("the ring", 100)] * 2
assert same(
    by_place.gradient(), gradient_of_sequences(by_place, rollouts, lambda ids: by_place(ids, torch.arange(len(ids))))
)
