"""Running reductions of many tensors at once, sketches of their distribution, and kernels for GPUs."""
