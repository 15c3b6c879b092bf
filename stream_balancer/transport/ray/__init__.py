"""Ranks and producers of a balancer that lives in a Ray actor."""
