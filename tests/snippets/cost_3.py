from tests.snippets._stage import *

model = torch.nn.Linear(1, 1)
model.no_sync = nullcontext
optimizer = SimpleNamespace(step=lambda: None, zero_grad=model.zero_grad)  # a real one imports torch.compile
all_reduce_gradients = lambda model: None


def loss(micro_batch):
    return model(micro_batch.packed()["input_ids"][:, None].float()).sum()


with world():
    pass  # the snippet
    feed.close()
