"""What people use hooks for, each in one line. Built on the public names alone.

``patching``: activation, attribution and path patching.

Adversarial examples: ``fgsm``, ``bim``, ``pgd``, ``deepfool``, ``feature_attack``.

Interventions: ``steering``.
"""

from tenterhook.recipes import patching
from tenterhook.recipes.adversarial import bim, deepfool, feature_attack, fgsm, pgd
from tenterhook.recipes.steer import steering

__all__ = ["bim", "deepfool", "feature_attack", "fgsm", "patching", "pgd", "steering"]
