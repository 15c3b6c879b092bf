import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import stream_balancer as sb
from tests.snippets._stage import controller

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dp = tp = 1
hsdp = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
with controller(rollouts=8, stay_s=3.0) as address:
    pass  # the snippet: "cuda" -> "cpu"
    # it may have joined before the controller had ended, which then waits until it leaves
    feed.close()
dist.destroy_process_group()
