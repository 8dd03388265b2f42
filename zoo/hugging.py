"""transformers: every model type, built from a small configuration."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zoo.case import Case, NotRunnable
from zoo.feed import feeds

__all__ = ["build", "names"]

MOST = 60_000_000
"""Maximum number of parameters. Larger models are skipped."""
LAYERS = {
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_encoder_layers": 2, "num_decoder_layers": 2, "depth": 2, "layers": 2, "num_blocks": 2, "num_mamba_layers": 2,
    "vocab_size": 99, "text_vocab_size": 99, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "moe_num_experts": 4, "num_queries": 10, "max_position_embeddings": 64, "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
WIDTHS = LAYERS | {
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embed_dim": 32, "emb_dim": 32, "embedding_size": 32,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "intermediate_size": 64, "ffn_dim": 64, "d_ff": 64,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "d_kv": 8, "hidden_dim": 64, "n_positions": 64, "projection_dim": 32,
    "word_embed_proj_dim": 32, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "dim_ff": 64,
    "expert_intermediate_size": 32, "state_size": 8, "image_size": 32, "patch_size": 8, "num_mel_bins": 16,
    "max_source_positions": 32, "max_target_positions": 32, "mlp_dim": 64, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "encoder_hidden_size": 32, "decoder_hidden_size": 32,
    "cross_attention_hidden_size": 32, "qformer_hidden_size": 32, "d_embed": 32, "d_head": 8, "d_inner": 64,
    "adapter_dim": 32, "output_dim": 32, "num_codevectors_per_group": 8, "encoder_attention_heads_num": 4,
}  # fmt: skip
HEADS = (
    "head_dim",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
    "q_lora_rank",
    "kv_lora_rank",
    "d_head",
    "d_kv",
)
FREE = {key: size for key, size in WIDTHS.items() if key not in (*HEADS, "num_key_value_heads", "state_size")}
DEEP = {key: 8 if size == 2 and "layer" in key else size for key, size in FREE.items()}  # noqa: PLR2004
LEVELS: tuple[dict[str, int], ...] = (WIDTHS, FREE, DEEP, LAYERS, {})
"""Sizes to try in turn: everything small; heads as the model computes them; deep enough for every kind of layer."""


def names() -> Iterator[tuple[str, str]]:
    """Yield each model type once, with its family, even if several configuration names refer to it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

    yield from ((name, model_type_to_module_name(name)) for name in sorted(CONFIG_MAPPING_NAMES))


def build(name: str) -> Case:
    """Return a case with the smallest model of that type that runs, and inputs for it."""
    reasons: list[str] = []
    for level in LEVELS:
        try:
            config = _small(_config_class(name), level)
            case = _case(config)
        except NotRunnable as error:
            reasons.append(str(error))
        except Exception as error:  # noqa: BLE001 - a configuration may be refused in any way
            reasons.append(f"does not build: {_described(error)}")
        else:
            return case
    raise NotRunnable(reasons[0])


def _config_class(name: str) -> type[Any]:
    from transformers import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[name]
    except Exception as error:
        raise NotRunnable(f"has no configuration: {_described(error)}") from error


def _small(kind: type[Any], sizes: dict[str, int]) -> Any:
    """Return a configuration with the known sizes set, also in nested configurations."""
    usual = kind()
    inner = {key: _small(type(value), sizes) for key, value in vars(usual).items() if _is_config(value)}
    outer = {key: size for key, size in sizes.items() if type(getattr(usual, key, None)) in (int, type(None))}
    wanted = {key: size for key, size in outer.items() if key in vars(usual)}
    if sizes and isinstance(depths := getattr(usual, "depths", None), list | tuple):
        wanted["depths"] = [1] * len(depths)  # type: ignore[assignment]
    for given in ({**wanted, **inner}, inner):
        with contextlib.suppress(Exception):  # Each configuration validates its values in its own way.
            return kind(**given)
    return usual


def _is_config(value: Any) -> bool:
    from transformers import PretrainedConfig

    return isinstance(value, PretrainedConfig)


def _case(config: Any) -> Case:
    """Return a case for a model of this configuration that runs."""
    classes = list(_classes(config))
    if not classes:
        raise NotRunnable("has no model of its own")
    reasons: list[str] = []
    for kind in classes[:3]:
        try:
            model = _model(kind, config)
        except NotRunnable as error:
            reasons.append(str(error))
            continue
        for kwargs in feeds(model, config):
            try:
                with torch.no_grad():
                    torch.manual_seed(0)
                    model(**kwargs)
            except Exception as error:  # noqa: BLE001 - inputs are tried until some fit
                reasons.append(f"no fitting input: {_described(error)}")
            else:
                return Case(model, (), kwargs)
    raise NotRunnable(reasons[0] if reasons else "no input is known")


def _model(kind: type[nn.Module], config: Any) -> nn.Module:
    try:
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in kind._from_config(config).parameters())
        torch.manual_seed(0)
        model = kind._from_config(config).eval() if size <= MOST else None
    except Exception as error:
        raise NotRunnable(f"does not build: {_described(error)}") from error
    if model is None:
        raise NotRunnable(f"too large: more than {MOST:,} parameters")
    return model


def _classes(config: Any) -> Iterator[type[Any]]:
    """Yield the model classes of a configuration: the class from AutoModel, then others from its file."""
    from transformers import MODEL_MAPPING, PreTrainedModel

    known: list[type[Any]] = []
    if type(config) in MODEL_MAPPING:
        found = MODEL_MAPPING[type(config)]
        known += found if isinstance(found, list | tuple) else [found]
    known = [kind for kind in known if "TF" not in kind.__name__]
    yield from known
    with contextlib.suppress(ImportError):
        module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
        for kind in vars(module).values():
            if not (inspect.isclass(kind) and issubclass(kind, PreTrainedModel)) or kind in known:
                continue
            # A base class has no forward.
            if kind.config_class is type(config) and kind.forward is not nn.Module.forward:
                yield kind


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:160]


@functools.cache
def load() -> None:
    """Import the modules that every build needs, once, before processes are forked."""
    import transformers

    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    names()
    importlib.import_module("transformers.models.auto.modeling_auto")
    importlib.import_module("transformers.modeling_utils")
