"""Functions of PyTorch that another library has replaced are found, and named with that library."""

import functools
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from tenterhook.pytorch.replaced import replaced_functions

LIBRARY = """
import functools

def wrap(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper

class Callable:
    def __init__(self, function):
        self.function = function
    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    (tmp_path / "otherlib.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    import otherlib

    yield otherlib
    del sys.modules["otherlib"]


def test_a_fresh_process_has_none():
    code = "import tenterhook; from tenterhook.pytorch.replaced import replaced_functions as f; print(f())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "{}"


def test_a_wrapper_is_named_with_its_own_module_though_it_copies_the_name_of_what_it_wraps(library, monkeypatch):
    monkeypatch.setattr(nn.Module, "__call__", library.wrap(nn.Module.__call__))
    assert nn.Module.__call__.__module__.startswith("torch")
    assert replaced_functions() == {"torch.nn.Module.__call__": "otherlib.wrap.<locals>.wrapper"}


def test_an_object_in_the_place_of_a_function_is_named_by_its_class(library, monkeypatch):
    monkeypatch.setattr(torch_checkpoint, "checkpoint", library.Callable(torch_checkpoint.checkpoint))
    assert replaced_functions() == {"torch.utils.checkpoint.checkpoint": "otherlib.Callable"}


def test_a_partial_is_named_by_its_function(library, monkeypatch):
    monkeypatch.setattr(torch.autograd, "grad", functools.partial(library.wrap(torch.autograd.grad)))
    assert replaced_functions() == {"torch.autograd.grad": "otherlib.wrap.<locals>.wrapper"}


def test_a_function_that_this_release_does_not_have_is_not_reported(monkeypatch):
    monkeypatch.delattr(torch, "compile")
    assert replaced_functions() == {}
