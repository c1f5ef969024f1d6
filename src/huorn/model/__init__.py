"""What is computed: the reference decoder in plain PyTorch, T tokens at a time, no batch dimension."""
