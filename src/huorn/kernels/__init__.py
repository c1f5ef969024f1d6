"""The native kernels: which variant runs, weights as they want them, memory on huge pages."""
