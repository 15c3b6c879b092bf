"""Rollouts and rank batches as bytes, and back. Pure: no socket, event loop or clock."""
