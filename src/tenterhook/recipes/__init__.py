"""What people use hooks for, each in one line. Built on the public names alone.

``patching``: activation, attribution and path patching.

Adversarial examples: ``fgsm``, ``bim``, ``pgd``, ``deepfool``, ``feature_attack``.

Interventions: ``steering``, ``ablate``, ``logit_lens``, ``tuned_lens``, ``causal_trace``, ``direct_logits``.

Training: ``clip_gradient``, ``scale_gradient``, ``reverse_gradient``, ``freeze``, ``activation_penalty``,
``learning_signal``, ``per_sample_gradients``.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenterhook.recipes import patching
    from tenterhook.recipes.ablation import ablate
    from tenterhook.recipes.adversarial import bim, deepfool, feature_attack, fgsm, pgd
    from tenterhook.recipes.direct import direct_logits
    from tenterhook.recipes.lens import logit_lens, tuned_lens
    from tenterhook.recipes.samples import per_sample_gradients
    from tenterhook.recipes.signal import learning_signal
    from tenterhook.recipes.steer import steering
    from tenterhook.recipes.tracing import causal_trace
    from tenterhook.recipes.training import activation_penalty, clip_gradient, freeze, reverse_gradient, scale_gradient

__all__ = [
    "ablate",
    "activation_penalty",
    "bim",
    "causal_trace",
    "clip_gradient",
    "deepfool",
    "direct_logits",
    "feature_attack",
    "fgsm",
    "freeze",
    "learning_signal",
    "logit_lens",
    "patching",
    "per_sample_gradients",
    "pgd",
    "reverse_gradient",
    "scale_gradient",
    "steering",
    "tuned_lens",
]

# A recipe is loaded when it is first asked for, so that those that nobody uses cost nothing.
MODULES = {
    "ablation": ("ablate",),
    "adversarial": ("bim", "deepfool", "feature_attack", "fgsm", "pgd"),
    "direct": ("direct_logits",),
    "lens": ("logit_lens", "tuned_lens"),
    "samples": ("per_sample_gradients",),
    "signal": ("learning_signal",),
    "steer": ("steering",),
    "tracing": ("causal_trace",),
    "training": ("activation_penalty", "clip_gradient", "freeze", "reverse_gradient", "scale_gradient"),
}
HOMES = {name: module for module, names in MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "patching":
        return importlib.import_module("tenterhook.recipes.patching")
    if name not in HOMES:
        raise AttributeError(f"module 'tenterhook.recipes' has no recipe {name!r}; it has {', '.join(__all__)}")
    found = getattr(importlib.import_module(f"tenterhook.recipes.{HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
