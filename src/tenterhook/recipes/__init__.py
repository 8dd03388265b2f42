"""Ready-made functions for common uses of hooks. They use only tenterhook's public names.

Attribution: ``saliency``, ``input_x_gradient``, ``guided_backprop``, ``deconvnet``, ``smoothgrad``,
``integrated_gradients``, ``layer_integrated_gradients``, ``conductance``, ``gradcam``, ``gradcam_plus_plus``,
``layercam``, ``scorecam``, ``guided_gradcam``, ``occlusion``, ``feature_ablation``, ``channel_ablation``, ``deeplift``,
``lrp``, ``attention_rollout``; of text, ``text``. ``side_by_side`` draws several attributions in one figure.

Linear probes: ``probe``. Dictionaries: ``dictionary``, ``feature_texts``,
``feature_edges``.

Patching: the module ``patching``, with activation, attribution and path patching. Circuits: the module ``circuit``.

Attention heads: ``patch_heads``, ``ablate_heads``, ``head_paths``, ``attention_patterns``.

Adversarial examples: ``fgsm``, ``bim``, ``pgd``, ``deepfool``, ``feature_attack``.

Interventions: ``steering``, ``ablate``, ``logit_lens``, ``tuned_lens``, ``jacobian_lens``, ``causal_trace``,
``direct_logits``.

Training: ``clip_gradient``, ``scale_gradient``, ``reverse_gradient``, ``freeze``, ``activation_penalty``,
``learning_signal``, ``per_sample_gradients``.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenterhook.recipes import circuit, patching
    from tenterhook.recipes.ablation import ablate
    from tenterhook.recipes.adversarial import bim, deepfool, feature_attack, fgsm, pgd
    from tenterhook.recipes.cam import gradcam, gradcam_plus_plus, guided_gradcam, layercam, scorecam
    from tenterhook.recipes.causal_tracing import causal_trace
    from tenterhook.recipes.dictionary_training import TrainedDictionary, dictionary
    from tenterhook.recipes.direct import direct_logits
    from tenterhook.recipes.feature_paths import FeatureEdges, feature_edges
    from tenterhook.recipes.features_in_text import FeatureTexts, feature_texts
    from tenterhook.recipes.gradients import deconvnet, guided_backprop, input_x_gradient, saliency, smoothgrad
    from tenterhook.recipes.heads import ablate_heads, attention_patterns, head_paths, patch_heads
    from tenterhook.recipes.jacobian import jacobian_lens
    from tenterhook.recipes.learning_signals import learning_signal
    from tenterhook.recipes.lens import logit_lens, tuned_lens
    from tenterhook.recipes.path import conductance, integrated_gradients, layer_integrated_gradients
    from tenterhook.recipes.perturbation import channel_ablation, feature_ablation, occlusion
    from tenterhook.recipes.probes import Probes, probe
    from tenterhook.recipes.relevance import deeplift, lrp
    from tenterhook.recipes.result import Attribution, side_by_side
    from tenterhook.recipes.rollout import attention_rollout
    from tenterhook.recipes.sample_gradients import per_sample_gradients
    from tenterhook.recipes.steer import steering
    from tenterhook.recipes.text_attribution import TextAttribution, text
    from tenterhook.recipes.training import activation_penalty, clip_gradient, freeze, reverse_gradient, scale_gradient

__all__ = [
    "Attribution",
    "FeatureEdges",
    "FeatureTexts",
    "Probes",
    "TextAttribution",
    "TrainedDictionary",
    "ablate",
    "ablate_heads",
    "activation_penalty",
    "attention_patterns",
    "attention_rollout",
    "bim",
    "causal_trace",
    "channel_ablation",
    "circuit",
    "clip_gradient",
    "conductance",
    "deconvnet",
    "deepfool",
    "deeplift",
    "dictionary",
    "direct_logits",
    "feature_ablation",
    "feature_attack",
    "feature_edges",
    "feature_texts",
    "fgsm",
    "freeze",
    "gradcam",
    "gradcam_plus_plus",
    "guided_backprop",
    "guided_gradcam",
    "head_paths",
    "input_x_gradient",
    "integrated_gradients",
    "jacobian_lens",
    "layer_integrated_gradients",
    "layercam",
    "learning_signal",
    "logit_lens",
    "lrp",
    "occlusion",
    "patch_heads",
    "patching",
    "per_sample_gradients",
    "pgd",
    "probe",
    "reverse_gradient",
    "saliency",
    "scale_gradient",
    "scorecam",
    "side_by_side",
    "smoothgrad",
    "steering",
    "text",
    "tuned_lens",
]

# Each recipe's module is imported on first use, so that `import tenterhook` stays fast.
MODULES = {
    "ablation": ("ablate",),
    "adversarial": ("bim", "deepfool", "feature_attack", "fgsm", "pgd"),
    "cam": ("gradcam", "gradcam_plus_plus", "guided_gradcam", "layercam", "scorecam"),
    "dictionary_training": ("TrainedDictionary", "dictionary"),
    "direct": ("direct_logits",),
    "feature_paths": ("FeatureEdges", "feature_edges"),
    "features_in_text": ("FeatureTexts", "feature_texts"),
    "gradients": ("deconvnet", "guided_backprop", "input_x_gradient", "saliency", "smoothgrad"),
    "jacobian": ("jacobian_lens",),
    "heads": ("ablate_heads", "attention_patterns", "head_paths", "patch_heads"),
    "lens": ("logit_lens", "tuned_lens"),
    "path": ("conductance", "integrated_gradients", "layer_integrated_gradients"),
    "perturbation": ("channel_ablation", "feature_ablation", "occlusion"),
    "probes": ("Probes", "probe"),
    "relevance": ("deeplift", "lrp"),
    "result": ("Attribution", "side_by_side"),
    "rollout": ("attention_rollout",),
    "sample_gradients": ("per_sample_gradients",),
    "learning_signals": ("learning_signal",),
    "steer": ("steering",),
    "text_attribution": ("TextAttribution", "text"),
    "causal_tracing": ("causal_trace",),
    "training": ("activation_penalty", "clip_gradient", "freeze", "reverse_gradient", "scale_gradient"),
}
WHOLE = ("circuit", "patching")  # Modules that are public as a whole.
HOMES = {name: module for module, names in MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in WHOLE:
        return importlib.import_module(f"tenterhook.recipes.{name}")
    if name not in HOMES:
        raise AttributeError(f"module 'tenterhook.recipes' has no recipe {name!r}; it has {', '.join(__all__)}")
    found = getattr(importlib.import_module(f"tenterhook.recipes.{HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
