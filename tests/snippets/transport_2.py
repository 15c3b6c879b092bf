from tests.snippets._stage import *

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dp = tp = 1
hsdp = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
with controller(rollouts=8, stay_s=3.0) as address:
    pass  # the snippet: "cuda" -> "cpu"
    # it may have joined before the controller had ended, which then waits until it leaves
    feed.close()
dist.destroy_process_group()
