"""MODEL in all its forms."""

import sys
import types

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from tenterhook.cli.errors import CommandError
from tenterhook.cli.inputs import read_inputs
from tenterhook.cli.models import load_model

SMALL = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 12, "n_positions": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face model on disk, with a tokenizer of a few words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("gpt2")
    ids = {"bos_token_id": None, "eos_token_id": None}
    GPT2LMHeadModel(GPT2Config(**SMALL, **ids)).save_pretrained(folder)
    words = Tokenizer(WordLevel({"the": 0, "cat": 1, "sat": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)
    return folder


def test_a_local_directory_gives_the_model_with_its_own_head_and_weights(folder):
    model = load_model(str(folder), {})
    again = GPT2LMHeadModel.from_pretrained(folder)
    assert type(model) is GPT2LMHeadModel
    assert not model.training
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_a_text_is_read_with_the_models_own_tokenizer(folder):
    inputs = read_inputs(("text:the cat flew",), load_model(str(folder), {}), folder=folder)
    assert inputs.kwargs["input_ids"].tolist() == [[0, 1, 3]]
    assert inputs.tokens == ["the", "cat", "?"]


def test_a_text_without_a_tokenizer_says_so():
    with pytest.raises(CommandError, match="needs a tokenizer"):
        read_inputs(("text:hello",), nn.Linear(1, 1))


@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama"])
def test_a_directory_without_the_files_of_a_tokenizer_has_none(kind, tmp_path):
    (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    with pytest.raises(CommandError, match="there is no tokenizer in "):
        read_inputs(("text:the cat",), nn.Linear(1, 1), folder=tmp_path)


def test_a_text_without_tokens_is_no_input(folder):
    with pytest.raises(CommandError, match="the text '' has no tokens"):
        read_inputs(("text:",), nn.Linear(1, 1), folder=folder)


def test_a_directory_without_weights_is_no_model(folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CommandError, match=r"a config\.json and no weights"):
        load_model(str(tmp_path), {})
    (tmp_path / "config.json").unlink()
    with pytest.raises(CommandError, match=r"has no config\.json"):
        load_model(str(tmp_path), {})


def test_a_configuration_makes_a_model_with_the_head_it_is_used_with():
    model = load_model("transformers:GPT2Config", SMALL | {"bos_token_id": 0, "eos_token_id": 0})
    assert type(model) is GPT2LMHeadModel
    assert model.config.n_layer == 1
    assert (
        type(load_model("transformers:GPT2Model", SMALL | {"bos_token_id": 0, "eos_token_id": 0})).__name__
        == "GPT2Model"
    )


def test_an_unknown_configuration_names_the_nearest():
    with pytest.raises(CommandError, match="GPT2Config"):
        load_model("transformers:GTP2Config", {})


def test_timm_is_asked_for_random_weights(monkeypatch):
    asked = []

    def create_model(name, *, pretrained, **more):
        asked.append((name, pretrained, more))
        return nn.Linear(1, 1)

    stub = types.SimpleNamespace(create_model=create_model, list_models=lambda: ["resnet18", "vit_tiny"])
    monkeypatch.setitem(sys.modules, "timm", stub)
    load_model("timm:resnet18", {"num_classes": 3})
    assert asked == [("resnet18", False, {"num_classes": 3})]
    with pytest.raises(CommandError, match="Did you mean resnet18"):
        load_model("timm:resnet81", {})


def test_a_missing_library_is_reported_with_its_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(CommandError, match="pip install timm"):
        load_model("timm:resnet18", {})


def test_weights_are_read_without_running_code(tmp_path):
    source = nn.Linear(2, 2)
    torch.save(source.state_dict(), tmp_path / "good.pt")
    model = load_model("torch.nn:Linear", {"in_features": 2, "out_features": 2}, tmp_path / "good.pt")
    assert torch.equal(model.weight, source.weight)
    torch.save({"weight": _Evil()}, tmp_path / "evil.pt")
    with pytest.raises(
        CommandError, match="could not be read as weights: it holds objects that would run code"
    ) as told:
        load_model("torch.nn:Linear", {"in_features": 2, "out_features": 2}, tmp_path / "evil.pt")
    assert "weights_only" not in str(told.value)
    (tmp_path / "text.pt").write_text("no pickle")
    with pytest.raises(CommandError, match=r"torch\.save did not write it, or it is damaged"):
        read_inputs((str(tmp_path / "text.pt"),), model)
    torch.save({"weight": torch.zeros(3, 3)}, tmp_path / "other.pt")
    with pytest.raises(CommandError, match="do not fit the model"):
        load_model("torch.nn:Linear", {"in_features": 2, "out_features": 2}, tmp_path / "other.pt")


class _Evil:
    def __reduce__(self):
        return (exec, ("raise SystemExit('code from a file was run')",))
