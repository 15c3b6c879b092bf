from tests.snippets._stage import *

called = []
groups = {(0, 1): "the ring"}
weight = torch.ones(11, requires_grad=True)


async def main():
    config = sb.BalancerConfig(
        dp_size=2, batch_size=4, window=4, context_parallel=sb.ContextParallel(sizes=(1, 2), min_tokens=16)
    )
    async with sb.StreamBalancer(config) as balancer:
        for length in (200, 8, 9, 10):
            await balancer.put(sb.Rollout(tokens={"input_ids": torch.arange(length) % 11}))
        return await anext(balancer.batches())


def model(input_ids, position_ids, cu_seqlens, ring):
    assert input_ids.shape == position_ids.shape == (cu_seqlens[-1],)
    called.append((ring, len(input_ids)))
    return weight * torch.ones(len(input_ids), 1)


feed = anyio.run(main).ranks
pass  # the snippet
assert [one for one in called if one[0]] == [("the ring", 100)] * 2
assert weight.grad is not None
