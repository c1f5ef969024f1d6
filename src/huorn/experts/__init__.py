"""Experts in slots: which of them stay, and what one session remembers of them for the next."""
