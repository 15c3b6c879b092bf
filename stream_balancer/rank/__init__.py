"""The trainer's process: the feed, its acknowledgements, device copies, model-parallel peers, the barrier."""
