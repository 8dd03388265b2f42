"""Every test begins as a process that has compiled nothing, because sessions act differently after a compilation."""

import sys

import pytest

from tenterhook.pytorch.dynamo import has_compiled_anything


@pytest.fixture(autouse=True)
def forget_compiled_code():
    """Reset the compiler after a test that used it."""
    yield
    if "torch._dynamo" in sys.modules and has_compiled_anything():
        sys.modules["torch._dynamo"].reset()
