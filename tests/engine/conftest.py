"""The engine acts otherwise in a process that has used torch.compile: every test here is run as in both."""

import pytest

from tenterhook.compiled import late_start
from tenterhook.engine import session
from tenterhook.pytorch import dynamo


@pytest.fixture
def nothing_compiled(monkeypatch):
    """As in a process that has not used torch.compile."""
    for user in (dynamo, session):
        monkeypatch.setattr(user, "has_compiled_anything", lambda: False)


@pytest.fixture(params=[False, True, "model"], ids=["", "after-compile", "compiled-model"], autouse=True)
def compile_was_used(request, monkeypatch):
    for user in (dynamo, session):
        monkeypatch.setattr(user, "has_compiled_anything", lambda: bool(request.param))
    if request.param == "model":
        monkeypatch.setattr(late_start, "runs", lambda _: True)
    return request.param
