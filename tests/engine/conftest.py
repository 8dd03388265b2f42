"""The engine acts otherwise in a process that has used torch.compile: every test here is run as in both."""

import pytest

from tenterhook.compiled import begin


@pytest.fixture(params=[False, True], ids=["", "after-compile"], autouse=True)
def compile_was_used(request, monkeypatch):
    monkeypatch.setattr(begin, "is_used", lambda: request.param)
    return request.param
