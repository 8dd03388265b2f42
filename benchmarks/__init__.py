"""The cost of tenterhook, compared with the plain model and with PyTorch's own hooks."""
