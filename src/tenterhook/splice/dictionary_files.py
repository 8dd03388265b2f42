"""Files of dictionaries: the layouts of SAELens, sparsify and dictionary_learning.

Each layout is a folder with a JSON file and a file of weights. Weights are read from safetensors. The ``ae.pt`` of
dictionary_learning is read by ``torch.load(weights_only=True)``, which runs no code.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tenterhook.errors import SpliceError
from tenterhook.splice.dictionary import Dictionary

__all__ = ["load_dictionary", "save"]

SAELENS = {
    "standard": "relu",
    "topk": "topk",
    "batchtopk": "jumprelu",  # SAELens saves a trained one with a threshold for each latent.
    "matryoshka_batchtopk": "jumprelu",
    "jumprelu": "jumprelu",
    "gated": "gated",
    "transcoder": "relu",
    "skip_transcoder": "relu",
    "jumprelu_transcoder": "jumprelu",
    "jumprelu_skip_transcoder": "jumprelu",
}
RENAMED = {  # Names in files of dictionary_learning, which stores nn.Linear weights.
    "encoder.weight": "W_enc", "encoder.bias": "b_enc", "decoder.weight": "W_dec", "decoder.bias": "b_dec",
    "bias": "b_dec", "decoder_bias": "b_dec", "gate_bias": "b_gate", "mag_bias": "b_mag",
}  # fmt: skip
NOT_FOUND = (
    "{folder} holds no dictionary that is known: it needs cfg.json with sae_weights.safetensors (SAELens) or "
    "sae.safetensors (sparsify), or config.json with ae.safetensors or ae.pt (dictionary_learning). It has {names}."
)
NORMALIZED = (
    "{folder}: normalize_activations={how!r} scales each value by a statistic of the data, which the file does not "
    "hold. Fold it into the weights with SAELens and save again."
)
NORMALIZED_ROWS = (
    "{folder}: normalize_activations={how!r} changes each value by its own size, which decode() needs again; a "
    "Dictionary has no such step. th.splice takes the SAE that SAELens itself loads."
)
NO_TENSORS = "{file} is damaged, or holds other things than a dict of tensors; no other things are loaded"
NOT_SUPPORTED = "{folder}: {name}={given!r} is not supported; the weights would give other latents without it"

Made = tuple[dict[str, Any], dict[str, Tensor]]


def load_dictionary(
    folder: str | os.PathLike[str], *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Dictionary:
    """Read a dictionary from the files of SAELens, sparsify or dictionary_learning. No code in them is executed.

    >>> import tempfile, torch, tenterhook as th
    >>> folder = tempfile.mkdtemp()
    >>> th.Dictionary(8, 32, kind="topk", k=4).save(folder)
    >>> th.load_dictionary(folder)
    Dictionary(8, 32, kind='topk', k=4)

    Args:
        folder: the folder with the JSON file and the weights.
        device: the device for the weights. The default is the CPU.
        dtype: the dtype for the weights. By default they keep theirs.

    Returns:
        A :class:`tenterhook.Dictionary` in eval mode, whose parameters require no gradient. ``.notes`` has the content
        of the JSON file, such as the name of the model and of the point.

    Raises:
        SpliceError: the folder holds no dictionary of a known layout, or one that needs more than the file holds.
    """
    place = Path(folder)
    names = sorted(each.name for each in place.iterdir()) if place.is_dir() else []
    for config, weights, read in LAYOUTS:
        if config in names and weights in names:
            notes = _json(place / config)
            try:
                options, tensors = read(place, notes, _weights(place / weights))
                made = _filled(options, tensors)
            except SpliceError:
                raise
            except (KeyError, TypeError, RuntimeError, AttributeError, ValueError) as error:
                text = f"{place} is malformed: {type(error).__name__}: {error}"
                raise SpliceError(text) from error
            made.notes = notes
            return made.to(device=device, dtype=dtype or _common(made))
    shown = ", ".join(names[:8]) or ("nothing" if place.is_dir() else "not been found")
    raise SpliceError(NOT_FOUND.format(folder=place, names=shown))


def save(dictionary: Dictionary, folder: str | os.PathLike[str], notes: Mapping[str, Any]) -> None:
    """Write a dictionary in the layout of SAELens."""
    from safetensors.torch import save_file

    from tenterhook.record.tensor_file import replacing

    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in dictionary.state_dict().items()}
    kind = dictionary.kind
    if kind == "batchtopk":  # SAELens also saves one threshold for each latent, and calls the result a JumpReLU.
        tensors["threshold"] = tensors["threshold"].expand(dictionary.width).contiguous()
        kind = "jumprelu"
    # A transcoder does not subtract b_dec, so a centered dictionary with a linear path is an SAE with one.
    crosses = not dictionary.center and (dictionary.out != dictionary.size or hasattr(dictionary, "W_skip"))
    architecture = {"relu": "standard"}.get(kind, kind)
    if crosses and kind in ("relu", "jumprelu"):
        skip = "skip_" if hasattr(dictionary, "W_skip") else ""
        architecture = f"{'jumprelu_' if kind == 'jumprelu' else ''}{skip}transcoder"
    config = {
        "architecture": architecture, "d_in": dictionary.size, "d_sae": dictionary.width, "d_out": dictionary.out,
        "dtype": str(dictionary.W_dec.dtype).removeprefix("torch."), "device": "cpu",
        "apply_b_dec_to_input": dictionary.center, "normalize_activations": "none", "reshape_activations": "none",
        "metadata": dict(notes),
    }  # fmt: skip
    config |= {"k": dictionary.k} if dictionary.kind == "topk" else {}
    with replacing(place / "sae_weights.safetensors") as file:
        save_file(tensors, file)
    with replacing(place / "cfg.json") as file:
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


# -- layouts -----------------------------------------------------------------------------------------------------------


def _saelens(place: Path, notes: Mapping[str, Any], tensors: dict[str, Tensor]) -> Made:
    how = notes.get("normalize_activations", "none")
    if how not in ("none", None):
        text = NORMALIZED if how == "expected_average_only_in" else NORMALIZED_ROWS
        raise SpliceError(text.format(folder=place, how=how))
    name = notes.get("architecture", "standard")
    if name not in SAELENS:
        raise SpliceError(f"{place}: the architecture {name!r} is not supported; known are {', '.join(SAELENS)}")
    options: dict[str, Any] = {"kind": SAELENS[name], "center": "transcoder" not in name}
    options["center"] &= bool(notes.get("apply_b_dec_to_input", True))
    older = notes.get("activation_fn_kwargs") or {}
    activation = notes.get("activation_fn", notes.get("activation_fn_str")) or "relu"
    if activation not in ("relu", "topk"):
        raise SpliceError(NOT_SUPPORTED.format(folder=place, name="activation_fn", given=activation))
    if name == "topk" or activation == "topk":
        options |= {"kind": "topk", "k": int(notes.get("k", older.get("k")))}
    if "scaling_factor" in tensors:  # Latents are multiplied by it before they are decoded.
        factor = tensors.pop("scaling_factor")
        if notes.get("finetuning_scaling_factor"):
            tensors["W_dec"] = tensors["W_dec"] * factor[:, None]
    if notes.get("rescale_acts_by_decoder_norm"):
        tensors = _by_norm(tensors)
    if "topk_threshold" in tensors:  # A checkpoint of the training, which has one threshold for all latents.
        tensors["threshold"] = tensors.pop("topk_threshold").to(tensors["b_enc"].dtype).expand(len(tensors["b_enc"]))
    return options, {("b_dec" if each == "b_dec_out" else each): tensor for each, tensor in tensors.items()}


def _sparsify(place: Path, notes: Mapping[str, Any], tensors: dict[str, Tensor]) -> Made:
    activation = notes.get("activation", "topk")
    if activation != "topk":
        raise SpliceError(f"{place}: the activation {activation!r} of sparsify is not supported; 'topk' is")
    for name in ("signed", "embed_skip", "gram_lookup"):
        if notes.get(name):
            raise SpliceError(NOT_SUPPORTED.format(folder=place, name=name, given=notes[name]))
    options = {"kind": "topk", "k": int(notes["k"]), "center": not notes.get("transcode", False)}
    renamed = {"encoder.bias": "b_enc"}
    found = {renamed.get(name, name): tensor for name, tensor in tensors.items() if name != "encoder.weight"}
    return options, found | {"W_enc": tensors["encoder.weight"].T}


def _dictionary_learning(place: Path, notes: Mapping[str, Any], tensors: dict[str, Tensor]) -> Made:
    name = notes["trainer"].get("dict_class", "AutoEncoder")
    k = notes["trainer"].get("k", tensors.pop("k", None))
    linear = {"encoder.weight", "decoder.weight"}
    found = {RENAMED.get(each, each): tensor.T if each in linear else tensor for each, tensor in tensors.items()}
    if name in ("AutoEncoder", "AutoEncoderNew"):
        return {"kind": "relu", "center": name == "AutoEncoder"}, found
    if name == "AutoEncoderTopK":
        found.pop("threshold", None)
        return {"kind": "topk", "k": int(k), "center": True}, found
    if name in ("BatchTopKSAE", "MatryoshkaBatchTopKSAE"):
        found.pop("group_sizes", None)
        found["threshold"] = found["threshold"].reshape(())
        return {"kind": "batchtopk", "k": int(k), "center": True}, found
    if name == "GatedAutoEncoder":
        return {"kind": "gated", "center": True}, _by_norm(found)
    if name == "JumpReluAutoEncoder":
        return {"kind": "jumprelu", "center": False}, _by_norm(found)
    raise SpliceError(f"{place}: the class {name!r} of dictionary_learning is not supported")


def _by_norm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fold a scale of the latents into the weights: encode multiplies by the norms of ``W_dec``, decode divides."""
    norms = tensors["W_dec"].norm(dim=1)
    scaled: dict[str, Tensor] = {
        name: tensors[name] * norms for name in ("W_enc", "b_enc", "threshold") if name in tensors
    }
    if "r_mag" in tensors:  # The magnitude is exp(r_mag) times the encoder plus b_mag; the gate keeps its own scale.
        scaled = {"r_mag": tensors["r_mag"] + norms.log(), "b_mag": tensors["b_mag"] * norms}
    return tensors | scaled | {"W_dec": tensors["W_dec"] / norms[:, None]}


LAYOUTS = (
    ("cfg.json", "sae_weights.safetensors", _saelens),
    ("cfg.json", "sae.safetensors", _sparsify),
    ("config.json", "ae.safetensors", _dictionary_learning),
    ("config.json", "ae.pt", _dictionary_learning),
)
"""the names of the options and of the weights, and the function that reads them"""


# -- parts -------------------------------------------------------------------------------------------------------------


def _filled(options: dict[str, Any], tensors: dict[str, Tensor]) -> Dictionary:
    size, width = tensors["W_enc"].shape
    with torch.device("meta"):
        made = Dictionary(size, width, out=tensors["W_dec"].shape[1], skip="W_skip" in tensors, **options)
    made.load_state_dict({name: tensor.contiguous() for name, tensor in tensors.items()}, assign=True)
    return made.requires_grad_(requires_grad=False).eval()


def _common(made: Dictionary) -> torch.dtype:
    """Return the dtype of the weights, or the one to which several of them promote."""
    found: torch.dtype = functools.reduce(torch.promote_types, (each.dtype for each in made.state_dict().values()))
    return found


def _weights(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".pt":
        try:
            return dict(torch.load(file, map_location="cpu", weights_only=True))
        except (pickle.UnpicklingError, EOFError, RuntimeError, TypeError, ValueError) as error:
            raise SpliceError(NO_TENSORS.format(file=file)) from error
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except SafetensorError as error:
        raise SpliceError(f"{file} is damaged: {error}") from error


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise SpliceError(f"{file} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise SpliceError(f"{file} is not a dict of options")
    return found
