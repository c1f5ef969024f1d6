"""What this machine has: cores and their limits, instruction sets, RAM, GPUs, and rough speeds. Knows nothing of models."""
