"""Dictionaries and their files, beside the formulas of the libraries that write them."""

import json
import os
import random

import pytest
import torch
from safetensors.torch import save_file

import tenterhook as th

SIZE, WIDTH = 6, 20


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def write(folder, config, weights, *, name="sae_weights.safetensors", json_name="cfg.json"):
    folder.mkdir(exist_ok=True)
    (folder / json_name).write_text(json.dumps(config))
    save_file({key: value.contiguous() for key, value in weights.items()}, folder / name)
    return folder


def weights(**more):
    return {
        "W_enc": torch.randn(SIZE, WIDTH), "b_enc": torch.randn(WIDTH), "W_dec": torch.randn(WIDTH, SIZE),
        "b_dec": torch.randn(SIZE), **more,
    }  # fmt: skip


X = torch.randn(3, 4, SIZE, generator=torch.Generator().manual_seed(1))


def topped(values, k):
    low = values.sort(-1, descending=True).values[..., k - 1 : k]
    return torch.where(values >= low, values, 0).relu()


# -- kinds -------------------------------------------------------------------------------------------------------------


def test_topk_keeps_the_largest_of_each_row():
    sae = th.Dictionary(SIZE, WIDTH, kind="topk", k=3)
    assert torch.equal(sae.encode(X), topped(X @ sae.W_enc + sae.b_enc, 3))


def test_batchtopk_keeps_the_largest_of_the_batch_in_training_and_those_above_a_threshold_otherwise():
    sae = th.Dictionary(SIZE, WIDTH, kind="batchtopk", k=3).train()
    before = X @ sae.W_enc
    assert torch.equal(sae.encode(X), topped(before.reshape(-1), 36).reshape(before.shape))
    sae.eval().threshold.fill_(0.5)
    assert torch.equal(sae.encode(X), torch.where(before > 0.5, before, 0))


def test_bad_options_are_errors():
    with pytest.raises(th.SpliceError, match="kind= is one of 'relu'"):
        th.Dictionary(SIZE, WIDTH, kind="top")
    with pytest.raises(th.SpliceError, match="from 1 to 20; got None"):
        th.Dictionary(SIZE, WIDTH, kind="topk")
    with pytest.raises(th.SpliceError, match="k= is for kind='topk'"):
        th.Dictionary(SIZE, WIDTH, k=3)
    for options in ({"size": 0, "width": WIDTH}, {"size": SIZE, "width": 2.5}, {"size": SIZE, "width": -1}):
        with pytest.raises(th.SpliceError, match="is a positive int"):
            th.Dictionary(**options)
    with pytest.raises(th.SpliceError, match="got 6 and 4"):
        th.Dictionary(SIZE, WIDTH, center=True, out=4)


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["relu", "topk", "batchtopk", "jumprelu", "gated"])
def test_a_saved_dictionary_is_the_same_after_loading(kind, tmp_path):
    k = {"topk": 3, "batchtopk": 3}.get(kind)
    sae = th.Dictionary(SIZE, WIDTH, kind=kind, k=k, center=True).eval()
    for each in sae.parameters():
        torch.nn.init.normal_(each)
    if kind in ("jumprelu", "batchtopk"):
        sae.threshold.data.fill_(0.7)
    sae.save(tmp_path / "sae", notes={"hook_name": "h.6"})
    again = th.load_dictionary(tmp_path / "sae")
    assert torch.equal(again(X), sae(X))
    assert again.notes["metadata"] == {"hook_name": "h.6"}
    assert not any(each.requires_grad for each in again.parameters())


@pytest.mark.parametrize("seed", range(20))
def test_any_dictionary_is_the_same_after_loading(seed, tmp_path):
    rng = random.Random(seed)
    kind = rng.choice(["relu", "topk", "batchtopk", "jumprelu", "gated"])
    center, out = (True, SIZE) if rng.random() < 0.5 else (False, rng.choice([SIZE, 4]))
    k = 3 if "topk" in kind else None
    sae = th.Dictionary(SIZE, WIDTH, kind=kind, k=k, out=out, center=center, skip=rng.random() < 0.5).eval()
    for each in sae.parameters():
        torch.nn.init.normal_(each)
    if hasattr(sae, "threshold"):
        sae.threshold.data.fill_(0.4)
    sae.to(rng.choice([torch.float32, torch.bfloat16, torch.float64]))
    sae.save(tmp_path)
    again, x = th.load_dictionary(tmp_path), X.to(sae.W_enc.dtype)
    assert all(
        torch.equal(tensor, again.state_dict()[name]) for name, tensor in sae.state_dict().items() if tensor.ndim
    )
    again, sae = again.double(), sae.double()
    assert torch.allclose(again(x.double()), sae(x.double()))  # The weights may have other strides.


def test_a_saved_transcoder_is_the_same_after_loading(tmp_path):
    sae = th.Dictionary(SIZE, WIDTH, out=4, skip=True)
    torch.nn.init.normal_(sae.W_skip)
    sae.save(tmp_path)
    assert torch.equal(th.load_dictionary(tmp_path)(X), sae(X))
    assert json.loads((tmp_path / "cfg.json").read_text())["architecture"] == "skip_transcoder"


def test_saelens_standard(tmp_path):
    given = weights()
    sae = th.load_dictionary(write(tmp_path, {"architecture": "standard", "apply_b_dec_to_input": True}, given))
    latents = ((X - given["b_dec"]) @ given["W_enc"] + given["b_enc"]).relu()
    assert torch.equal(sae.encode(X), latents)
    assert torch.equal(sae.decode(latents), latents @ given["W_dec"] + given["b_dec"])


def test_saelens_topk_with_rescaled_latents(tmp_path):
    given = weights()
    config = {"architecture": "topk", "k": 4, "apply_b_dec_to_input": False, "rescale_acts_by_decoder_norm": True}
    sae = th.load_dictionary(write(tmp_path, config, given))
    norm = given["W_dec"].norm(dim=-1)
    latents = topped((X @ given["W_enc"] + given["b_enc"]) * norm, 4)
    assert torch.allclose(sae.encode(X), latents, atol=1e-5)
    assert torch.allclose(sae(X), latents / norm @ given["W_dec"] + given["b_dec"], atol=1e-4)


def test_saelens_older_config_with_topk_as_activation(tmp_path):
    config = {"activation_fn_str": "topk", "activation_fn_kwargs": {"k": 2}, "apply_b_dec_to_input": True}
    assert th.load_dictionary(write(tmp_path, config, weights())).k == 2


def test_saelens_jumprelu(tmp_path):
    given = weights(threshold=torch.rand(WIDTH))
    sae = th.load_dictionary(write(tmp_path, {"architecture": "jumprelu", "apply_b_dec_to_input": False}, given))
    before = X @ given["W_enc"] + given["b_enc"]
    assert torch.equal(sae.encode(X), before.relu() * (before > given["threshold"]))


def test_saelens_checkpoint_of_a_batchtopk_training(tmp_path):
    given = weights(topk_threshold=torch.tensor(0.3, dtype=torch.float64))
    config = {"architecture": "batchtopk", "k": 3.0, "rescale_acts_by_decoder_norm": True}
    sae = th.load_dictionary(write(tmp_path, config, given))
    norm = given["W_dec"].norm(dim=-1)
    before = ((X - given["b_dec"]) @ given["W_enc"] + given["b_enc"]) * norm
    latents = torch.where(before > 0.3, before, 0)
    assert torch.allclose(sae.encode(X), latents, atol=1e-5)
    assert torch.allclose(sae(X), latents / norm @ given["W_dec"] + given["b_dec"], atol=1e-4)


def test_weights_of_several_dtypes_get_the_one_that_holds_all(tmp_path):
    given = weights()
    given["W_enc"] = given["W_enc"].half()
    sae = th.load_dictionary(write(tmp_path, {"apply_b_dec_to_input": True}, given))
    assert {each.dtype for each in sae.parameters()} == {torch.float32}
    assert torch.allclose(sae.encode(X), ((X - given["b_dec"]) @ given["W_enc"].float() + given["b_enc"]).relu())


def test_saelens_gated(tmp_path):
    given = weights(b_gate=torch.randn(WIDTH), b_mag=torch.randn(WIDTH), r_mag=torch.randn(WIDTH))
    given.pop("b_enc")
    sae = th.load_dictionary(write(tmp_path, {"architecture": "gated", "apply_b_dec_to_input": False}, given))
    gate = (X @ given["W_enc"] + given["b_gate"]) > 0
    size = (X @ (given["W_enc"] * given["r_mag"].exp()) + given["b_mag"]).relu()
    assert torch.allclose(sae.encode(X), gate * size, atol=1e-4)


def test_saelens_skip_transcoder(tmp_path):
    given = weights(W_skip=torch.randn(4, SIZE)) | {"W_dec": torch.randn(WIDTH, 4), "b_dec": torch.randn(4)}
    sae = th.load_dictionary(write(tmp_path, {"architecture": "skip_transcoder", "d_out": 4}, given))
    latents = (X @ given["W_enc"] + given["b_enc"]).relu()
    assert torch.allclose(sae(X), latents @ given["W_dec"] + given["b_dec"] + X @ given["W_skip"].T, atol=1e-5)


@pytest.mark.parametrize("transcode", [False, True])
def test_sparsify(transcode, tmp_path):
    given = {
        "encoder.weight": torch.randn(WIDTH, SIZE), "encoder.bias": torch.randn(WIDTH),
        "W_dec": torch.randn(WIDTH, SIZE), "b_dec": torch.randn(SIZE), "W_skip": torch.randn(SIZE, SIZE),
    }  # fmt: skip
    config = {"activation": "topk", "k": 3, "d_in": SIZE, "transcode": transcode, "skip_connection": True}
    sae = th.load_dictionary(write(tmp_path, config, given, name="sae.safetensors"))
    centred = X if transcode else X - given["b_dec"]
    latents = topped(centred @ given["encoder.weight"].T + given["encoder.bias"], 3)
    assert torch.allclose(sae.encode(X), latents, atol=1e-5)
    assert torch.allclose(sae(X), latents @ given["W_dec"] + given["b_dec"] + X @ given["W_skip"].T, atol=1e-4)


def learned(kind):
    """Return the weights of a class of dictionary_learning, its options, and its latents and reconstruction of X."""
    enc, dec, b_enc, b_dec = torch.randn(WIDTH, SIZE), torch.randn(SIZE, WIDTH), torch.randn(WIDTH), torch.randn(SIZE)
    linear = {"encoder.weight": enc, "encoder.bias": b_enc, "decoder.weight": dec}
    before = (X - b_dec) @ enc.T + b_enc
    if kind == "AutoEncoder":
        f = before.relu()
        return linear | {"bias": b_dec}, f, f @ dec.T + b_dec
    if kind == "AutoEncoderTopK":
        f = topped(before.relu(), 3)
        return linear | {"b_dec": b_dec, "k": torch.tensor(3), "threshold": torch.tensor(-1.0)}, f, f @ dec.T + b_dec
    if kind == "MatryoshkaBatchTopKSAE":
        f = before.relu() * (before > 0.3)
        given = {"W_enc": enc.T, "b_enc": b_enc, "W_dec": dec.T, "b_dec": b_dec, "k": torch.tensor(3)}
        return given | {"threshold": torch.tensor(0.3), "group_sizes": torch.tensor([5, 15])}, f, f @ dec.T + b_dec
    if kind == "BatchTopKSAE":
        f = before.relu() * (before > 0.3)
        return linear | {"b_dec": b_dec, "k": torch.tensor(3), "threshold": torch.tensor(0.3)}, f, f @ dec.T + b_dec
    norm = dec.norm(dim=0)
    if kind == "JumpReluAutoEncoder":
        limit = torch.rand(WIDTH)
        pre = X @ enc.T + b_enc
        f = (pre * (pre > limit)).relu() * norm
        given = {"W_enc": enc.T, "b_enc": b_enc, "W_dec": dec.T, "b_dec": b_dec, "threshold": limit}
        return given, f, f / norm @ dec.T + b_dec
    r_mag, gate, mag = torch.randn(WIDTH), torch.randn(WIDTH), torch.randn(WIDTH)
    inside = (X - b_dec) @ enc.T
    f = ((inside + gate) > 0) * (r_mag.exp() * inside + mag).relu() * norm
    given = {"encoder.weight": enc, "decoder.weight": dec, "decoder_bias": b_dec}
    return given | {"r_mag": r_mag, "gate_bias": gate, "mag_bias": mag}, f, f / norm @ dec.T + b_dec


@pytest.mark.parametrize("file", ["ae.safetensors", "ae.pt"])
@pytest.mark.parametrize(
    "kind",
    [
        "AutoEncoder",
        "AutoEncoderTopK",
        "BatchTopKSAE",
        "MatryoshkaBatchTopKSAE",
        "JumpReluAutoEncoder",
        "GatedAutoEncoder",
    ],
)
def test_dictionary_learning(kind, file, tmp_path):
    given, latents, found = learned(kind)
    config = {"trainer": {"dict_class": kind, "k": 3}}
    write(tmp_path, config, given, name="ae.safetensors", json_name="config.json")
    if file == "ae.pt":
        (tmp_path / "ae.safetensors").unlink()
        torch.save(given, tmp_path / file)
    sae = th.load_dictionary(tmp_path)
    assert torch.allclose(sae.encode(X), latents, atol=1e-4)
    assert torch.allclose(sae(X), found, atol=1e-4)


def test_folders_without_a_dictionary_are_errors(tmp_path):
    with pytest.raises(th.SpliceError, match="not been found"):
        th.load_dictionary(tmp_path / "none")
    with pytest.raises(th.SpliceError, match="It has nothing"):
        th.load_dictionary(tmp_path)
    with pytest.raises(th.SpliceError, match="normalize_activations='layer_norm'"):
        th.load_dictionary(write(tmp_path / "a", {"normalize_activations": "layer_norm"}, weights()))
    with pytest.raises(th.SpliceError, match="architecture 'crosscoder' is not supported"):
        th.load_dictionary(write(tmp_path / "b", {"architecture": "crosscoder"}, weights()))
    with pytest.raises(th.SpliceError, match="is malformed: KeyError"):
        th.load_dictionary(write(tmp_path / "c", {"architecture": "standard"}, {"W": torch.ones(2)}))
    write(tmp_path / "d", {}, weights())
    (tmp_path / "d" / "cfg.json").write_text("{")
    with pytest.raises(th.SpliceError, match="is damaged"):
        th.load_dictionary(tmp_path / "d")
    (tmp_path / "d" / "cfg.json").write_text("{}")
    (tmp_path / "d" / "sae_weights.safetensors").write_bytes(b"no tensors")
    with pytest.raises(th.SpliceError, match="is damaged"):
        th.load_dictionary(tmp_path / "d")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"activation_fn_str": "tanh-relu"}, "activation_fn='tanh-relu' is not supported"),
        ({"normalize_activations": "constant_norm_rescale"}, "changes each value by its own size"),
        ({"normalize_activations": "expected_average_only_in"}, "scales each value by a statistic of the data"),
        ({"architecture": "topk", "k": "many"}, "is malformed: ValueError"),
    ],
)
def test_saelens_options_that_change_the_latents_are_errors(config, message, tmp_path):
    with pytest.raises(th.SpliceError, match=message):
        th.load_dictionary(write(tmp_path, config, weights()))


@pytest.mark.parametrize("name", ["signed", "embed_skip", "gram_lookup"])
def test_sparsify_options_that_change_the_latents_are_errors(name, tmp_path):
    given = weights()
    tensors = {"encoder.weight": given["W_enc"].T, "encoder.bias": given["b_enc"], "W_dec": given["W_dec"]}
    folder = write(tmp_path, {"k": 3, name: True}, tensors | {"b_dec": given["b_dec"]}, name="sae.safetensors")
    with pytest.raises(th.SpliceError, match=f"{name}=True is not supported"):
        th.load_dictionary(folder)


class Command:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_files_of_torch_with_other_things_than_tensors_are_errors(tmp_path):
    (tmp_path / "config.json").write_text('{"trainer": {"dict_class": "AutoEncoder"}}')
    for content in ({"bias": Command(str(tmp_path / "made"))}, torch.nn.Linear(2, 2), [1, 2], torch.ones(3)):
        torch.save(content, tmp_path / "ae.pt")
        with pytest.raises(th.SpliceError, match="other things than a dict of tensors"):
            th.load_dictionary(tmp_path)
    for content in (b"", b"no pickle"):
        (tmp_path / "ae.pt").write_bytes(content)
        with pytest.raises(th.SpliceError, match="is damaged"):
            th.load_dictionary(tmp_path)
    assert not (tmp_path / "made").exists()


def test_reading_and_training_draw_no_random_numbers(tmp_path):
    th.Dictionary(SIZE, WIDTH).save(tmp_path)
    before = torch.get_rng_state()
    th.load_dictionary(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
