"""The rollout worker's process: the same ``put`` from elsewhere."""
