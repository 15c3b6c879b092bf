"""Siblings share their prompt, and the model computes it once: `python examples/shared_prefixes.py`.

`tree()` has every prompt once, and `tree.index` leads to the dense layout, where masks and loss are any trainer's.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from stream_balancer_demo.model import Decoder
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

import stream_balancer as sb
from stream_balancer.rollouts.trees import Tree

SIBLINGS, VOCABULARY = 6, 512
COST = sb.cost.TransformerCost(hidden_size=128, num_layers=2, num_heads=4, intermediate_size=512, vocab_size=VOCABULARY)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # queries, keys, values -> values, [U, heads, head_dim] each


def by_node(tree: Tree) -> Attend:
    """Each node's queries against its prefix's keys and its own, as variable-length kernels do it on a GPU."""
    keys = tree.varlen_keys()
    queries, many = keys.cu_seqlens_q.diff().tolist(), keys.cu_seqlens_k.diff().tolist()
    masks = [causal_lower_right(*lengths) for lengths in zip(queries, many, strict=True)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = ((q, queries), (k[keys.rows], many), (v[keys.rows], many))
        nodes = zip(*(torch.split(x.transpose(0, 1)[None], lengths, 2) for x, lengths in rows), masks, strict=True)
        return torch.cat([scaled_dot_product_attention(*node) for node in nodes], 2)[0].transpose(0, 1)

    return attend


def by_flex_attention(tree: Tree) -> Attend:
    """The same in one kernel. On an accelerator compile `flex_attention`, once."""
    flex = partial(flex_attention, block_mask=tree.block_mask())
    return lambda *qkv: flex(*(x.transpose(0, 1)[None] for x in qkv))[0].transpose(0, 1)


def loss_sum(
    model: Decoder, micro_batch: sb.rollouts.MicroBatch, attention: Callable[[Tree], Attend] = by_node
) -> Tensor:
    """Policy-gradient loss, to be divided by the step's `global_num_loss_tokens`."""
    packed, tree = micro_batch.packed(shift=True), micro_batch.tree()
    x, attend = model.embedding(tree["input_ids"]), attention(tree)  # [U, hidden]
    for block in model.layers():
        x = block.finish(x, attend(*block.project(x, model.rotation(tree.position_ids, x))))
    logprobs = model.head(model.norm(x)).log_softmax(-1)  # [U, vocabulary]
    logprobs = logprobs[tree.index, packed["targets"]]  # [T] of the token that follows each
    return -torch.sum(logprobs * packed.per_token("advantage") * packed["loss_mask"])


def rollouts(declare: bool) -> Iterator[sb.Rollout]:
    """12 prompts, six answers to each. Where nobody declares a prefix, a tree is of whole rollouts."""
    for group in range(12):
        prompt = torch.randint(VOCABULARY, (450,))
        for length in torch.empty(SIBLINGS).log_normal_(4, 1).int().clamp(2, 1000).tolist():
            ids = torch.cat([prompt, torch.randint(VOCABULARY, (length,))])
            columns = {"input_ids": ids, "loss_mask": torch.arange(len(ids)) >= 450}
            yield sb.Rollout(tokens=columns, scalars={"advantage": 0.5}, group_id=f"g{group}", prefix=450 * declare)


def train(share: bool) -> float:
    """CPU seconds of all steps, each as long as its slowest rank."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, seconds = Decoder(vocab_size=VOCABULARY), 0.0
    groups = sb.Groups(size=SIBLINGS, share_prefixes=share)
    config = sb.BalancerConfig(dp_size=4, batch_size=36, groups=groups, cost=COST)
    with sb.blocking(config) as balancer:
        for rollout in rollouts(declare=share):
            balancer.put(rollout)
        balancer.end()
        for batch in balancer.batches():
            times = [time.process_time()]
            for rank_batch in batch.ranks:
                for micro_batch in rank_batch.micro_batches:
                    torch.autograd.backward(loss_sum(model, micro_batch) / rank_batch.global_num_loss_tokens)
                times.append(time.process_time())
            seconds += torch.tensor(times, dtype=torch.float64).diff().max().item()  # then an optimizer's step
    return seconds


if __name__ == "__main__":
    dense, shared = train(share=False), train(share=True)
    print(f"dense {dense:.2f} s, with shared prefixes {shared:.2f} s: {shared / dense:.2f} of it")
