"""Dictionaries and their files, beside the formulas of the libraries that write them."""

import json

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
    "kind", ["AutoEncoder", "AutoEncoderTopK", "BatchTopKSAE", "JumpReluAutoEncoder", "GatedAutoEncoder"]
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
