"""Recorded routing: what it was like, and what a cache policy would have made of it."""
