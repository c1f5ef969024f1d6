"""Experts between disk and RAM: where they lie, slots, policies, copies."""
