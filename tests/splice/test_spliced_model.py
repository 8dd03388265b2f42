"""What the code of a model, and code that walks it, sees of a module that has a dictionary."""

import copy
import pickle

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.pytorch.module_proxy import ModuleProxy

SIZE = 8


@pytest.fixture
def sae():
    torch.manual_seed(1)
    return th.Dictionary(SIZE, 32, kind="topk", k=4)


@pytest.fixture
def x():
    return torch.randn(2, 4, SIZE, generator=torch.Generator().manual_seed(2))


class Curious(nn.Module):
    """A model whose code looks at its children in many ways."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stage = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE))
        self.last = nn.Linear(SIZE, SIZE)
        self.last.scale = 2.0

    def forward(self, x):
        x = self.stage(x) + len(self.stage) + self.stage[0].bias.sum() + sum(1 for _ in self.stage)
        x = self.last(x) * self.last.scale if isinstance(self.last, nn.Linear) else x
        self.last.seen = x.shape
        return x if self.stage and self.stage[1] in self.stage else 0 * x


def test_the_models_code_sees_the_module_itself(sae, x):
    model = Curious()
    plain = model(x)
    del model.last.seen
    with th.splice(model, {"stage": sae, "last": sae}, error=True):
        assert torch.equal(model(x), plain)
        assert isinstance(model.get_submodule("last"), ModuleProxy)
    assert model.last.seen == plain.shape


def test_attributes_that_are_set_in_the_session_are_those_of_the_module(sae):
    model = Curious()
    weight = nn.Parameter(torch.zeros(SIZE, SIZE))
    with th.splice(model, {"last": sae}):
        model.last.weight = weight
        model.last.scale = 3.0
        model.last.other = nn.ReLU()
        del model.last.bias
        model.last.register_parameter("bias", None)
    assert model.last.weight is weight
    assert (model.last.scale, model.last.bias) == (3.0, None)
    assert isinstance(model.last.other, nn.ReLU)


def test_modes_weights_and_names_are_those_of_the_model(sae):
    model, sae = Curious().eval(), sae.eval()
    names = [name for name, _ in model.named_parameters()]
    modules = dict(model.named_modules())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with th.splice(model, {"stage": sae, "last": sae}):
        model.train()
        model.load_state_dict({name: torch.ones_like(tensor) for name, tensor in state.items()})
        inside = [name for name, _ in model.named_parameters()]
        assert {name: each for name, each in model.named_modules() if name in modules} == modules
        counted = []
        model.apply(counted.append)
    assert [name for name in inside if ".splice." not in name] == names
    with th.splice(model, {"last": sae}):
        assert [name for name, _ in model.last.named_parameters(recurse=False)] == ["weight", "bias"]
    assert counted[-1] is model
    assert len(counted) == len(modules)
    assert model.stage[0].training
    assert not sae.training
    assert all(bool((tensor == 1).all()) for tensor in model.state_dict().values())
    assert not any(bool((tensor == 1).all()) for tensor in (sae.W_enc, sae.W_dec))


def test_strict_loading_still_finds_wrong_names(sae):
    model = Curious()
    state = model.state_dict()
    state["last.other"] = state.pop("last.bias")
    with th.splice(model, {"last": sae}), pytest.raises(RuntimeError, match=r"Missing key.*last.*bias"):
        model.load_state_dict(state)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_has_no_dictionary(copied, sae, x):
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 2))
    plain = model(x)
    with th.splice(model, {"0": sae}):
        other = copied(model)
    assert torch.equal(other(x), plain)
    assert [type(each) for each in other] == [nn.Linear, nn.Linear]


def test_hidden_states_are_collected_once(sae):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=SIZE, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2, vocab_size=20
    )
    model, ids = LlamaForCausalLM(config).eval(), torch.randint(1, 20, (2, 5))
    with torch.no_grad():
        plain = model(ids, output_hidden_states=True)
        with th.splice(model, {"model.layers.1": sae}, error=True):
            found = model(ids, output_hidden_states=True)
    for one, other in zip(found.hidden_states, plain.hidden_states, strict=True):
        assert torch.equal(one, other)


# -- modules that are not called ---------------------------------------------------------------------------------------


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.read, self.unused = (nn.Linear(SIZE, SIZE) for _ in range(3))
        self.attention = nn.MultiheadAttention(SIZE, 2, batch_first=True)

    def forward(self, x):
        x = self.used(x) + nn.functional.linear(x, self.read.weight)
        return self.attention(x, x, x)[0]


@pytest.mark.parametrize("name", ["read", "unused", "attention.out_proj"])
def test_a_dictionary_at_a_module_that_is_not_called_is_an_error(name, sae, x):
    model = Unused().eval()
    before = list(model.named_modules())
    with pytest.raises(th.NeverReached, match=name), th.splice(model, {"used": sae, name: sae}):
        model(x)
    assert list(model.named_modules()) == before
    with th.splice(model, {name: sae}):  # Nothing has run.
        assert th.points(model, f"{name}@latents")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # The plain model makes one.
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["layers.0", "layers.0.linear1", "layers.1.self_attn", "layers.1.norm2"])
def test_a_fused_encoder_runs_its_dictionaries(name, padded, x):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(SIZE, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    size = 16 if name.endswith("linear1") else SIZE
    mask = torch.tensor([[False] * 4, [False, False, True, True]])
    given = {"src_key_padding_mask": mask} if padded else {}
    with torch.no_grad():
        plain = model(x, **given)
        with th.splice(model, {name: th.Dictionary(size, 32)}, error=True):
            kept = model(x, **given)
        with th.splice(model, {name: th.Dictionary(size, 32)}):
            changed = model(x, **given)
    valid = ~mask if padded else torch.ones(2, 4, dtype=torch.bool)
    assert torch.allclose(kept[valid], plain[valid], atol=1e-5)
    assert not torch.allclose(changed[valid], plain[valid], atol=1e-3)


# -- transcoders -------------------------------------------------------------------------------------------------------


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.act = nn.Linear(SIZE, SIZE), nn.ReLU(inplace=True)
        self.one, self.other = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x):
        x = self.act(self.norm(x))
        return self.one(x) + self.other(x)


@pytest.mark.parametrize("how", ["method", "module", "weight"])
def test_the_linear_path_of_any_transcoder_is_added(how, x):
    class Foreign(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.path = th.Dictionary(SIZE, 16), nn.Parameter(torch.randn(SIZE, SIZE))
            if how == "weight":
                self.W_skip = self.path
            elif how == "method":
                self.skip = lambda value: value @ self.path.T
            else:
                self.skip = nn.Linear(SIZE, SIZE, bias=False)
                self.skip.weight = self.path

        def encode(self, value):
            return self.inner.encode(value)

        def decode(self, latents):
            return self.inner.decode(latents)

    model, made = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)), Foreign()
    with th.splice(model, {("0", "1"): made}):
        found = model(x)
    value = model[0](x)
    assert torch.allclose(found, made.inner(value) + value @ made.path.T, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads it of each tensor behind a graph break.
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_transcoders_share_an_input_that_the_model_overwrites(grad, compiled, x):
    torch.manual_seed(0)
    model, one, other = Shared(), th.Dictionary(SIZE, 16), th.Dictionary(SIZE, 24)
    called = torch.compile(model, backend="eager") if compiled else model
    with torch.set_grad_enabled(grad), th.splice(called, {("norm", "one"): one, ("norm", "other"): other}):
        found = called(x)
    value = model.norm(x)
    assert torch.allclose(found, one(value) + other(value), atol=1e-5)


def test_a_value_that_the_model_changes_through_an_alias_stays_one(sae, x):
    class Aliased(nn.Module):
        def __init__(self):
            super().__init__()
            self.same, self.linear = nn.Identity(), nn.Linear(SIZE, SIZE)

        def forward(self, x):
            value = self.linear(x)
            again = self.same(value)
            again += 1
            return again * value

    model = Aliased()
    plain = model(x)
    with th.splice(model, {"same": sae}, error=True):
        assert torch.equal(model(x), plain)


# -- harvests ----------------------------------------------------------------------------------------------------------


def test_a_harvest_knows_dictionaries_sources_and_error_terms(sae, x, tmp_path):
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))

    def harvest(splices, *, error=False):
        with th.splice(model, splices, error=error):
            th.harvest(model, [x], "2", to=tmp_path, progress=False)

    other = copy.deepcopy(sae)
    with torch.no_grad():
        other.W_dec[3, 2] += 1e-3
    harvest({("0", "1"): sae})
    harvest({("0", "1"): copy.deepcopy(sae)})
    for splices, error in (({("0", "1"): other}, False), ({"1": sae}, False), ({("0", "1"): sae}, True)):
        with pytest.raises(th.DifferentHarvest):
            harvest(splices, error=error)


# -- compiled parts ----------------------------------------------------------------------------------------------------


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.part = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU())
        self.last = nn.Linear(SIZE, 3)

    def forward(self, x):
        return self.last(self.part(x))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", ["", "part", "part.0"])
@pytest.mark.parametrize("point", ["part", "part.0"])
def test_a_part_that_is_compiled_before_or_in_the_session_runs_the_dictionary(name, point, inside, sae, x):
    model, plain = Nested(), Nested()
    with torch.no_grad(), th.splice(plain, {point: sae}, error=True):
        with th.edit(plain, {f"{point}@latents": th.set(3.0, at=th.at[:, 0, 5])}):
            expected = plain(x)
    if not inside:
        model.get_submodule(name).compile(backend="eager")
    with torch.no_grad(), th.splice(model, {point: sae}, error=True):
        if inside:
            model.get_submodule(name).compile(backend="eager")
        kept = [model(x) for _ in range(3)]
        with th.edit(model, {f"{point}@latents": th.set(3.0, at=th.at[:, 0, 5])}):
            found = [model(x) for _ in range(2)]
    assert all(torch.equal(each, Nested()(x)) for each in kept)
    assert all(torch.allclose(each, expected, atol=1e-6) for each in found)
