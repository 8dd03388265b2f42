"""The test suite on several releases of PyTorch and Python, each pair in an environment of its own: `make versions`."""
