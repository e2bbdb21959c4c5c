"""How kernels get compiled, kept and launched."""
