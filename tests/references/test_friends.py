"""Libraries that the development environment does not have: Lightning, peft, datasets."""

import warnings

import pytest
import torch
import transformers as hf
from torch import nn

import tenterhook as th
from tenterhook.integrations.transformers import aliases, generate
from tenterhook.testing import untouched

pytestmark = pytest.mark.references

GPT = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 50, "n_positions": 64, "pad_token_id": 0}
IDS = torch.randint(1, 50, (2, 5), generator=torch.Generator().manual_seed(0))


def gpt2():
    torch.manual_seed(0)
    return hf.GPT2LMHeadModel(hf.GPT2Config(**GPT)).eval()


# -- Lightning --------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(tmp_path):
    """Train a small module, with a callback or without."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pytorch_lightning as pl
    from torch.utils.data import DataLoader, TensorDataset

    class Module(pl.LightningModule):
        def __init__(self, fail=None):
            super().__init__()
            self.net, self.fail = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), fail

        def training_step(self, batch, index):
            if index == self.fail:
                raise ValueError("a bad batch")
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def run(*callbacks, fail=None):
        torch.manual_seed(0)
        module = Module(fail)
        data = DataLoader(TensorDataset(torch.randn(20, 4)), batch_size=2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = pl.Trainer(
                max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                enable_model_summary=False, callbacks=list(callbacks), default_root_dir=tmp_path,
            )  # fmt: skip
            trainer.fit(module, data)
        return module

    return run


def test_a_callback_passes_on_a_tape_every_so_many_steps(trained):
    from tenterhook.integrations.lightning import sampling

    seen = []
    module = trained(sampling("net.*", every=4, then=lambda step, tape: seen.append((step, tape))))
    assert [step for step, _ in seen] == [0, 4, 8]
    assert all(tape.grad["net.0"].shape == (2, 8) for _, tape in seen)
    plain = trained()
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))
    assert not any("forward" in vars(each) or each._forward_hooks for each in module.modules())


def test_a_step_that_fails_leaves_nothing_on_the_module(trained):
    from tenterhook.integrations.lightning import sampling

    seen = []
    with pytest.raises(ValueError, match="a bad batch"):
        trained(sampling("net.*", every=1, then=lambda step, tape: seen.append(step)), fail=3)
    assert seen == [0, 1, 2]


def test_points_that_are_not_there_are_reported_before_the_first_step(trained):
    from tenterhook.integrations.lightning import sampling

    with pytest.raises(th.AddressError, match="has no 'nett'"):
        trained(sampling("nett", every=1, then=print))


# -- peft -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapted():
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    return peft.get_peft_model(gpt2(), config).eval()


def test_the_aliases_of_an_adapted_model(adapted):
    names = aliases(adapted)
    assert names.attn[1] == "base_model.model.transformer.h.1.attn"
    with untouched(adapted), th.record(adapted, *names.layers, *names.attn) as tape, torch.no_grad():
        output = adapted(input_ids=IDS)
    found = th.recipes.logit_lens(
        adapted, {"input_ids": IDS}, points=list(names.layers), norm=names.norm, head=names.head
    )
    torch.testing.assert_close(found.logits[-1], output.logits)
    assert tape[names.layers[0]].shape == (2, 5, 16)


def test_an_adapter_is_edited_away(adapted):
    """With what LoRA adds set to zero, the model is the one that was adapted."""
    truth = gpt2()(IDS).logits
    assert not torch.allclose(adapted(input_ids=IDS).logits, truth)
    with th.edit(adapted, {"**.lora_B.default": th.zero()}):
        torch.testing.assert_close(adapted(input_ids=IDS).logits, truth)


def test_an_adapted_model_is_steered_while_it_generates(adapted):
    names = aliases(adapted)
    found = th.recipes.steering(
        adapted, {"input_ids": IDS}, {"input_ids": IDS.flip(1)}, point=names.layers[0], at=th.at[:, -1]
    )
    plain = generate(adapted, {"input_ids": IDS}, names.layers[0], max_new_tokens=5, do_sample=False)
    with found.unit().apply(adapted, 50):
        steered = generate(adapted, {"input_ids": IDS}, names.layers[0], max_new_tokens=5, do_sample=False)
    assert not torch.equal(plain.tokens, steered.tokens)


# -- datasets ---------------------------------------------------------------------------------------------------------


def test_what_passes_becomes_a_column():
    import datasets

    from tenterhook.integrations.datasets import features

    model = gpt2()
    data = datasets.Dataset.from_dict({"input_ids": IDS.tolist() * 3, "label": [0, 1] * 3})
    datasets.disable_progress_bars()
    add = features(model, {"transformer.h.0": "first", "transformer.h.1.mlp": "mlp"}, at=th.at[:, -1])
    found = data.map(add, batched=True, batch_size=2, new_fingerprint="a").with_format("torch")
    with th.record(model, "transformer.h.0", "transformer.h.1.mlp") as tape, torch.no_grad():
        model(IDS)
    torch.testing.assert_close(found["first"][:2], tape["transformer.h.0"][:, -1])
    torch.testing.assert_close(found["mlp"][4:6], tape["transformer.h.1.mlp"][:, -1])
    assert len(found) == 6
    with pytest.raises(th.UnsupportedModel, match="the batch has none of input_ids"):
        add({"text": ["a"]})
    with pytest.raises(ValueError, match="Pad the examples to one length"):
        add({"input_ids": [[1, 2], [1]]})
