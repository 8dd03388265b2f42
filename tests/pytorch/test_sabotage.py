"""A PyTorch in which one private name has changed: tenterhook is right, or says that this release is not supported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sabotage import run, wrong
from sabotage_process import LOUD, RIGHT
from sabotage_targets import Target

# One of each way in which a name is changed, and of each kind of name; what is expected at least once.
SHORT = {
    "torch._C._current_graph_task_id": {LOUD},
    "torch.nn.Module._call_impl": {RIGHT, LOUD},
    "torch.nn.modules.module._global_forward_hooks_always_called": {RIGHT, LOUD},
    "nn.Module._modules": {LOUD},
    "Tensor._backward_hooks": {RIGHT, LOUD},
    "checkpoint frame.recompute_fn": {RIGHT, LOUD},
    "variable new_frame in torch/utils/checkpoint.py": {RIGHT},
    "variable result in torch/nn/modules/module.py": {RIGHT, LOUD},
    "patched: nn.Module.__call__ without instance forwards": {LOUD},
    "patched: checkpoint by another library": {RIGHT, LOUD},
}


@pytest.fixture(scope="module")
def targets():
    """Everything that is sabotaged; listed by a process of its own, because that loads the compiler."""
    code = "import json, sabotage_targets as s; print(json.dumps([*s.targets().values()]))"
    listed = json.loads(subprocess.check_output([sys.executable, "-c", code], text=True, cwd=Path(__file__).parent))
    return {label: Target(label, *rest) for label, *rest in listed}


@pytest.mark.parametrize("name", SHORT)
def test_what_a_changed_name_breaks_is_loud_and_the_rest_is_right(name, targets):
    found = run(targets[name], slow=False)
    assert wrong(found) == {}
    assert SHORT[name] <= {outcome for outcome, _ in found.values()}


@pytest.mark.slow
def test_no_changed_name_gives_a_wrong_number_or_another_error(targets):
    found = {name: wrong(run(target, slow=True)) for name, target in targets.items()}
    assert {name: scenarios for name, scenarios in found.items() if scenarios} == {}
