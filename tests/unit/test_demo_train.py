"""A rank's training loop: one step over several ranks is the step one process would make over all rollouts."""

import scripted
import torch
from stream_balancer_demo.model import build_model
from stream_balancer_demo.options import DemoOptions
from stream_balancer_demo.rank import train
from stream_balancer_demo.rollouts import make_rollout

from stream_balancer.types import Denominators

OPTIONS = DemoOptions(hidden_size=16, num_layers=1, num_heads=2, vocab_size=32)
ROLLOUTS = [make_rollout(f"r{i}", 2 + n, 2, "g", 32) for i, n in enumerate((3, 20, 7, 11))]


def rank_batch(rank, *micro_batches):
    trained = sum(r.num_loss_tokens for r in ROLLOUTS)
    return scripted.rank_batch(*micro_batches, rank=rank, dp_size=2, denominators=Denominators(4, 0, trained, 4))


def gradient_of(batch):
    """The flat gradient a rank brings to the all-reduce, and its step."""
    gradients = []
    (done,) = train([batch], build_model(OPTIONS, torch.float64), lambda g: gradients.append(g.clone()))
    return gradients[0], done


def test_uneven_rank_batches_sum_to_the_gradient_of_the_whole_batch():
    a, b, c, d = ROLLOUTS
    first, done_first = gradient_of(rank_batch(0, [a], [b, c]))
    second, done_second = gradient_of(rank_batch(1, [d]))
    whole, done_whole = gradient_of(rank_batch(0, [d, c, b, a]))
    torch.testing.assert_close(first + second, whole, rtol=1e-10, atol=1e-14)
    assert abs(done_first.loss + done_second.loss - done_whole.loss) < 1e-12
