"""Running reductions of many tensors at once, sketches of their distributions, and GPU kernels."""
