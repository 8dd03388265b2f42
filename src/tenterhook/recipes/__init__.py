"""What people use hooks for, each in one line. Built on the public names alone.

``patching``: activation, attribution and path patching.

Adversarial examples: ``fgsm``, ``bim``, ``pgd``, ``deepfool``, ``feature_attack``.

Interventions: ``steering``, ``ablate``, ``logit_lens``, ``tuned_lens``, ``causal_trace``, ``direct_logits``.
"""

from tenterhook.recipes import patching
from tenterhook.recipes.ablation import ablate
from tenterhook.recipes.adversarial import bim, deepfool, feature_attack, fgsm, pgd
from tenterhook.recipes.direct import direct_logits
from tenterhook.recipes.lens import logit_lens, tuned_lens
from tenterhook.recipes.steer import steering
from tenterhook.recipes.tracing import causal_trace

__all__ = [
    "ablate",
    "bim",
    "causal_trace",
    "deepfool",
    "direct_logits",
    "feature_attack",
    "fgsm",
    "logit_lens",
    "patching",
    "pgd",
    "steering",
    "tuned_lens",
]
