"""``tenterhook doctor``, as it is run to report a bug: it works where little else does."""

import json
import subprocess
import sys

from click.testing import CliRunner

import tenterhook as th
from tenterhook.cli.command import tenterhook
from tenterhook.pytorch.support import FEATURES, Status

SABOTAGE = """
import sys, torch
{}
sys.argv = ["tenterhook", "doctor", *{!r}]
from tenterhook.cli import main
main()
"""


def call(*args):
    return CliRunner().invoke(tenterhook, ["doctor", *args])


def sabotaged(code, *args):
    """Run the command in a process in which some code ran before tenterhook was imported."""
    code = SABOTAGE.format(code, args)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_it_prints_plain_text_and_ends_with_0_where_everything_works():
    result = subprocess.run([sys.executable, "-m", "tenterhook", "doctor"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"tenterhook doctor\ntenterhook    {th.__version__}\n")
    assert "\x1b" not in result.stdout


def test_json_has_the_keys_that_programs_read():
    result = call("--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert list(found)[:7] == ["tenterhook", "python", "torch", "tested", "features", "packages", "environment"]
    assert isinstance(found["tested"], bool)
    assert {each["status"] for each in found["features"]} <= {"fast", "fallback", "unavailable"}


def test_a_feature_that_is_unavailable_ends_it_with_1(monkeypatch):
    monkeypatch.setattr(FEATURES["modes"], "status", Status.UNAVAILABLE)
    assert call().exit_code == call("--json").exit_code == 1


def test_a_fallback_ends_it_with_0(monkeypatch):
    monkeypatch.setattr(FEATURES["modes"], "status", Status.FALLBACK)
    assert call().exit_code == 0


def test_a_private_name_that_is_gone_is_reported_where_no_session_can_start():
    result = sabotaged("del torch._C._current_graph_task_id", "--json")
    status = {each["name"]: each for each in json.loads(result.stdout)["features"]}
    assert (result.returncode, result.stderr) == (1, "")
    assert "_current_graph_task_id" in status["backward passes"]["why"]
    assert status["module calls"]["status"] == "fast"


def test_a_broken_compiler_is_reported():
    result = sabotaged("sys.modules['torch._dynamo'] = None")
    assert result.returncode == 1
    row = next(line for line in result.stdout.splitlines() if line.startswith("compiled models"))
    assert row.split()[2] == "unavailable"


def test_a_replaced_function_that_breaks_a_feature_is_named_with_it():
    code = "torch.utils.checkpoint.checkpoint = lambda function, *args, use_reentrant=None: function(*args)"
    result = sabotaged(code, "--json")
    found = json.loads(result.stdout)
    assert result.returncode == 1
    assert [each["name"] for each in found["features"] if each["status"] == "unavailable"] == ["checkpointed edits"]
    assert found["patched"] == {"torch.utils.checkpoint.checkpoint": "__main__.<lambda>"}


def test_it_needs_no_package_but_click_and_torch():
    code = """
import importlib.abc
class Blocks(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"safetensors", "xxhash", "rich", "matplotlib", "PIL", "transformers"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocks())
"""
    result = sabotaged(code)
    assert (result.returncode, result.stderr) == (0, "")
