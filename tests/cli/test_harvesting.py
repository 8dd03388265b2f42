"""``tenterhook harvest`` and ``tenterhook verify``, as a person at a terminal sees them."""

import json
import sys

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import tenterhook as th
from tenterhook.cli.command import tenterhook

SOURCE = """
import torch
from torch import nn

class Rows(nn.Sequential):
    def __init__(self, width=8):
        super().__init__(nn.Linear(4, width), nn.Dropout(), nn.Linear(width, 3))

class Broken(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.Linear(9, 3))

batches = [torch.ones(2, 4)] * 3

def made():
    return batches
"""
X = torch.arange(400, dtype=torch.float32).reshape(100, 4) / 400


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Run the command in a directory with a few models and data."""
    (tmp_path / "rows_nets.py").write_text(SOURCE)
    np.save(tmp_path / "x.npy", X.numpy())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield lambda *args: CliRunner().invoke(tenterhook, [str(arg) for arg in args])
    sys.modules.pop("rows_nets", None)


ROWS = ["harvest", "rows_nets.py:Rows", "0", "2", "--data", "x.npy", "-o", "acts", "--batch-size", 10]


def rows_model(width=8):
    """What the command makes: the seed is 0."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Dropout(), nn.Linear(width, 3)).eval()


def test_rows_are_those_of_the_model_and_the_same_command_goes_on(call):
    told = call(*ROWS, "--shard-rows", 30, "--json")
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["made"] == 4
    store, model = th.open("acts"), rows_model()
    assert store.points == ("0", "2")
    expected = torch.cat([model(part) for part in X.split(10)])
    assert torch.equal(store["2"][:], expected)
    again = json.loads(call(*ROWS, "--json").stdout)
    assert (again["made"], again["found"]) == (0, 4)
    assert "shards found" in call(*ROWS).stdout
    other = call(*ROWS, "--set", "width=9")
    assert other.exit_code == 2
    assert "model.weights: the store has" in other.stderr


def test_damage_is_reported_dropped_and_made_again(call, tmp_path):
    call(*ROWS, "--shard-rows", 30)
    assert call("verify", "acts").exit_code == 0
    (tmp_path / "acts/shards/00000001/0.safetensors").unlink()
    told = call("verify", "acts")
    assert told.exit_code == 1
    assert "it is missing" in told.stdout
    damaged = json.loads(call("verify", "acts", "--json").stdout)
    assert damaged["damaged"] == [{"shard": 1, "file": "shards/00000001/0.safetensors", "what": "it is missing"}]
    assert damaged["complete"] is False
    dropped = call("verify", "acts", "--drop")
    assert dropped.exit_code == 0
    assert "dropped 1 shard, which" in dropped.stdout
    assert json.loads(call(*ROWS, "--json").stdout)["made"] == 1
    whole = json.loads(call("verify", "acts", "--json").stdout)
    assert (whole["complete"], whole["rows"], whole["damaged"]) == (True, 100, [])


@pytest.mark.parametrize("name", ["batches", "made"])
def test_batches_can_be_named_in_python(call, name):
    told = call("harvest", "rows_nets.py:Rows", "0", "--data", f"rows_nets.py:{name}", "-o", "named")
    assert told.exit_code == 0, told.output
    assert torch.equal(th.open("named")["0"][:], torch.cat([rows_model()[0](torch.ones(2, 4))] * 3))


def test_types_gradients_and_sizes(call):
    options = ["--rows-dtype", "bfloat16", "--grad", "--loss", "mean", "--shard-size", "1k", "--memory", "1MB"]
    told = call(*ROWS, *options)
    assert told.exit_code == 0, told.output
    store, model = th.open("acts"), rows_model()
    assert store["0"].dtype == torch.bfloat16
    hidden = model[0](X[:10]).detach().requires_grad_()
    model[1:](hidden).mean().backward()
    assert torch.equal(store.grad["0"][:10], hidden.grad.bfloat16())
    assert len(store.shards) > 3
    other = call(*ROWS, *options[:3], "--loss", "sum", *options[5:])
    assert other.exit_code == 2
    assert "grad.how: the store has 'mean', this call has 'sum'" in other.stderr


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=5, n_positions=16, pad_token_id=4)
    GPT2LMHeadModel(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({"the": 0, "cat": 1, "sat": 2, "?": 3, "_": 4}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", pad_token="_").save_pretrained(folder)
    return folder


def test_lines_of_text_become_rows_of_tokens_without_padding(call, gpt2, tmp_path):
    (tmp_path / "lines.txt").write_text("the cat sat\n\nthe\ncat sat the cat\n")
    told = call("harvest", gpt2, "transformer.h.0", "--data", "lines.txt", "--rows", "token", "-o", "text")
    assert told.exit_code == 0, told.output
    store = th.open("text")
    assert store.facts["token"][:].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert store.sample[:].tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    cut = call("harvest", gpt2, "transformer.h.0", "--data", "lines.txt", "--rows", "token", "--length", 2, "-o", "cut")
    assert cut.exit_code == 0, cut.output
    assert th.open("cut").facts["token"][:].tolist() == [0, 1, 0, 1, 2]


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"x.npy": "y.npy"}, 2, "there is no file y.npy"),
        ({"x.npy": "nothing"}, 2, "'nothing' is not a data set.\nDATA is one of"),
        ({"x.npy": "rows_nets.py:batch"}, 2, "Did you mean batches"),
        ({"x.npy": "lines.txt"}, 2, "needs a tokenizer"),
        ({"2": "3"}, 2, "3"),
        ({"acts": "rows_nets.py"}, 4, "is a file; a store is a directory"),
        ({"rows_nets.py:Rows": "rows_nets.py:batches"}, 2, "is a list. Name a model"),
        ({"rows_nets.py:Rows": "rows_nets.py:Broken", "2": "1"}, 3, "the model failed"),
        ({"acts": "/proc/acts"}, 4, "/proc/acts: No such file"),
        ({10: "10 --memory 3"}, 2, "--memory is 100000 bytes or more"),
        ({10: "10 --shard-rows 3 --shard-size 1k"}, 2, "not both"),
        ({10: "10 --rows-dtype float12"}, 2, "float12"),
        ({10: "10 --reduce last"}, 2, "reduce='last' reduces the tokens"),
    ],
)
def test_mistakes_are_reported_without_a_traceback(call, tmp_path, change, code, said):
    (tmp_path / "lines.txt").write_text("the cat\n")
    words = [word for part in ROWS for word in str(change.get(part, part)).split()]
    told = call(*words)
    assert told.exit_code == code, told.output
    assert said in told.stderr
    assert "Traceback" not in told.stderr


def test_a_failing_model_has_the_same_exit_code_with_debug(call):
    told = call("--debug", *({"rows_nets.py:Rows": "rows_nets.py:Broken", "2": "1"}.get(part, part) for part in ROWS))
    assert told.exit_code == 3, told.output
    assert "the model failed" in told.stderr
    assert told.stderr.count("Traceback (most recent call last)") == 1


def test_what_is_no_store_is_reported(call):
    told = call("verify", "nowhere")
    assert told.exit_code == 4
    assert "there is no directory nowhere" in told.stderr
    assert "is not a store of harvested rows" in call("verify", ".").stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_workers_of_ray_make_a_model_that_is_in_a_file(call):
    told = call(*ROWS, "--shard-rows", 30, "--engine", "ray", "--workers", 1, "--json")
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["made"] == 4
    assert torch.equal(th.open("acts")["2"][:], torch.cat([rows_model()(part) for part in X.split(10)]))


OPAQUE = """
from torch import nn

NUMBERS = (2 for _ in range(100))

class Reads(nn.Module):
    def forward(self, x):
        return x * next(NUMBERS)
"""


def test_what_cannot_be_identified_is_named_and_vouched_for(call, tmp_path):
    (tmp_path / "reads.py").write_text(OPAQUE)
    words = ["harvest", "reads.py:Reads", ":return", "--data", "x.npy", "-o", "acts"]
    told = call(*words)
    assert told.exit_code == 2
    assert "global NUMBERS: builtins.generator" in told.stderr
    assert "--trust" in told.stderr
    assert call(*words, "--trust", "--wait").exit_code == 0
    assert torch.equal(th.open("acts")[":return"][:], X * 2)
    sys.modules.pop("reads", None)


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", '{"format": "tenterhook.rows"}', "", "\0"])
def test_a_malformed_store_is_reported_without_a_traceback(call, tmp_path, text):
    call(*ROWS, "--shard-rows", 30)
    (tmp_path / "acts/manifest.json").write_text(text)
    for words in (["verify", "acts"], ["verify", "acts", "--drop"], ROWS):
        told = call(*words)
        assert told.exit_code == 4, told.output
        assert "manifest.json" in told.stderr
        assert "Traceback" not in told.output + told.stderr
