"""Llama-shaped models on the CPU's own kernels: C++, compiled here on first use, weights of 8 or 4 bits."""
