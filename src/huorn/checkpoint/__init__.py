"""What is on disk: config, tensor names, safetensors files, FP8 blocks."""
