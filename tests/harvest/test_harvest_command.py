import numpy as np
import pytest
import torch
from click.testing import CliRunner

import tenterhook as th
from tenterhook.harvest.command import commands, found

MODEL = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 3))

batches = [torch.ones(2, 4)] * 3
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my_model.py").write_text(MODEL)
    np.save(tmp_path / "x.npy", np.arange(400, dtype=np.float32).reshape(100, 4))
    return tmp_path


def call(name, *arguments):
    return CliRunner().invoke(commands()[name], [str(argument) for argument in arguments])


def test_harvest_and_verify_from_the_command_line(folder):
    arguments = [f"{folder}/my_model.py:net", "0", "2", "--data", folder / "x.npy", "-o", folder / "acts"]
    options = ["--batch-size", 10, "--shard-rows", 30, "--dtype", "bfloat16", "--memory", "1M"]
    told = call("harvest", *arguments, *options)
    assert told.exit_code == 0, told.output
    assert "shards made" in told.output
    store = th.open(folder / "acts")
    assert store.points == ("0", "2")
    assert store["0"].dtype == torch.bfloat16
    assert len(store) == 100
    again = call("harvest", *arguments, *options)
    assert again.exit_code == 0
    assert call("verify", folder / "acts").exit_code == 0
    (folder / "acts/shards/00000001/0.safetensors").unlink()
    told = call("verify", folder / "acts")
    assert told.exit_code == 1
    assert "it is not there" in told.output
    assert "dropped 1 shards" in call("verify", folder / "acts", "--drop").output
    assert call("harvest", *arguments, *options).exit_code == 0
    assert call("verify", folder / "acts").exit_code == 0


def test_batches_can_be_named_in_python(folder):
    told = call(
        "harvest", f"{folder}/my_model.py:net", "0", "--data", f"{folder}/my_model.py:batches", "-o", folder / "b"
    )
    assert told.exit_code == 0, told.output
    assert len(th.open(folder / "b")) == 6


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nothing", "neither a file"),
        ("torch:nope", "no attribute|cannot be loaded"),
        ("nowhere.py:x", "there is no file"),
    ],
)
def test_what_cannot_be_found_is_told(text, said):
    with pytest.raises(th.HarvestError, match=said):
        found(text)


def test_what_is_no_model_no_type_and_no_size_is_told(folder):
    rest = ["--data", folder / "x.npy", "-o", folder / "c"]
    told = call("harvest", f"{folder}/my_model.py:batches", "0", *rest)
    assert "no model" in str(told.exception)
    told = call("harvest", f"{folder}/my_model.py:net", "0", *rest, "--dtype", "float12")
    assert "--dtype is a type of torch" in str(told.exception)
    told = call("harvest", f"{folder}/my_model.py:net", "0", *rest, "--memory", "lots")
    assert "write 512M or 2G" in str(told.exception)
