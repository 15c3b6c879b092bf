from contextlib import nullcontext

import torch

import stream_balancer as sb
from tests.snippets._stage import world

model = torch.nn.Linear(1, 1)
model.no_sync = nullcontext
optimizer = torch.optim.SGD(model.parameters())
all_reduce_gradients = lambda model: None


def loss(micro_batch):
    return model(micro_batch.packed()["input_ids"][:, None].float()).sum()


with world():
    pass  # the snippet
    feed.close()
