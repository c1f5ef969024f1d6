"""Experts that do not fit into fast memory: how they get from disk into slots."""
