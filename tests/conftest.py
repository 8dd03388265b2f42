"""Every test begins as a process that has compiled nothing, and with a small heap for the garbage collector."""

import gc
import sys

import pytest
from torch import nn

from tenterhook.pytorch.dynamo import has_compiled_anything


@pytest.fixture(autouse=True, scope="module")
def freeze_older_objects():
    """Exclude the objects of earlier tests and imports from garbage collection, which many tests do many times.

    They are several million in a process that has loaded a compiler and transformers.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def forget_compiled_code():
    """Reset the compiler after a test that used it, because sessions act differently after a compilation."""
    yield
    if "torch._dynamo" in sys.modules and has_compiled_anything():
        sys.modules["torch._dynamo"].reset()


@pytest.fixture(autouse=True)
def forget_hooks_of_failed_exports():
    """Remove the global hooks that torch.export leaves behind if the model raises, in releases up to 2.12."""
    hooks = nn.modules.module._global_buffer_registration_hooks
    before = dict(hooks)
    yield
    if hooks.keys() != before.keys():
        hooks.clear()
        hooks.update(before)
