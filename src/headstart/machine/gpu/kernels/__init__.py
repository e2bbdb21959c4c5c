"""The Triton kernels, one family a file."""
