"""A PyTorch in which one private name has changed: tenterhook is right, or says that this release is not supported."""

import pytest
from sabotage import run, targets, wrong
from sabotage_process import LOUD, RIGHT
from sabotage_targets import named

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


@pytest.mark.parametrize("name", SHORT)
def test_what_a_changed_name_breaks_is_loud_and_the_rest_is_right(name):
    found = run(named(name), slow=False)
    assert wrong(found) == {}
    assert SHORT[name] <= {outcome for outcome, _ in found.values()}


@pytest.mark.slow
def test_no_changed_name_gives_a_wrong_number_or_another_error():
    known = targets()
    assert {name: known[name] for name in SHORT} == {name: named(name) for name in SHORT}
    found = {name: wrong(run(target, slow=True)) for name, target in known.items()}
    assert {name: scenarios for name, scenarios in found.items() if scenarios} == {}
