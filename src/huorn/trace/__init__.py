"""Recorded routing, and what a cache policy would have made of it."""
