"""Copies of a model, and of the process, made while a session is open."""

import copy
import io
import os
import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import tenterhook as th
from tenterhook.testing import untouched

X = torch.linspace(-1, 1, 6).reshape(2, 3)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


def by_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle, by_torch_save])
def test_a_copy_made_between_the_calls_of_a_session_is_a_plain_model(duplicate):
    model = mlp()
    wanted = model(X)
    with th.edit(model, {"1": th.zero(), "2.bias": th.zero()}), th.record(model, "**") as tape:
        model(X)
        twin = duplicate(model)
        assert torch.equal(twin(X), wanted)
        assert len(tape.calls("0")) == 1
    assert torch.equal(twin(X), wanted)


def test_the_state_dict_and_shared_memory_know_nothing_of_a_session():
    model = mlp()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with th.edit(model, {"2.bias": th.zero()}), th.record(model, "0"):
        model(X)
        state = model.state_dict()
        model.share_memory()
        model.load_state_dict(before)
        model(X)
    assert list(state) == list(before)
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
    assert all(parameter.is_shared() for parameter in model.parameters())


def in_a_fork(work):
    """What ``work`` says in a forked process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, str(work()).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as said:
        return said.read()


def test_a_forked_process_has_a_copy_of_the_session_and_the_parent_does_not_see_it():
    model = mlp()
    with torch.no_grad(), th.record(model, "0") as tape, th.edit(model, {"1": th.zero()}):
        model(X)

        def work():
            found = model(X)
            return len(tape.calls("0")), torch.equal(found, model[2].bias.expand(2, 3))

        assert in_a_fork(work) == "(2, True)"
        assert len(tape.calls("0")) == 1


class Random(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return X[index % 2]


def test_a_loader_with_workers_runs_while_a_session_is_open():
    model = mlp()
    loader = DataLoader(Random(), batch_size=2, num_workers=1, multiprocessing_context="fork")
    with untouched(model, rng=False), torch.no_grad(), th.record(model, "0", keep=2) as tape:
        for batch in loader:
            model(batch)
    assert torch.equal(torch.stack(tape.calls("0")), torch.stack([model[0](X)] * 2))


def test_inference_mode_and_autocast_record_and_edit_what_passes():
    model = mlp()
    with torch.inference_mode(), th.record(model, "2") as tape, th.edit(model, {"1": th.zero(at=th.at[:, 0])}):
        found = model(X)
    assert torch.equal(tape["2"], found)
    assert not tape["2"].is_inference()
    with torch.autocast("cpu", dtype=torch.float16):
        before = model(X)
        with th.edit(model, {"0.weight": th.scale(2)}), th.record(model, "0") as tape:
            during = model(X)
        after = model(X)
    assert tape["0"].dtype == torch.float16
    assert torch.equal(before, after)  # What autocast remembers of the weight is not the edited one.
    assert not torch.equal(before, during)
