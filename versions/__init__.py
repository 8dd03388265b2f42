"""The test suite on several releases of PyTorch and Python, each pair in its own environment: `make versions`."""
