"""What people use hooks for, each in one line. Built on the public names alone.

Attribution: ``saliency``, ``input_x_gradient``, ``guided_backprop``, ``deconvnet``, ``smoothgrad``,
``integrated_gradients``, ``layer_integrated_gradients``, ``conductance``, ``gradcam``, ``gradcam_plus_plus``,
``layercam``, ``scorecam``, ``guided_gradcam``, ``occlusion``, ``feature_ablation``, ``channel_ablation``, ``deeplift``,
``lrp``, ``attention_rollout``. ``probe``: linear probes.
``side_by_side``: several attributions in one picture.
``patching``: activation, attribution and path patching.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tenterhook.recipes import patching

if TYPE_CHECKING:
    from tenterhook.recipes.cam import gradcam, gradcam_plus_plus, guided_gradcam, layercam, scorecam
    from tenterhook.recipes.gradients import deconvnet, guided_backprop, input_x_gradient, saliency, smoothgrad
    from tenterhook.recipes.path import conductance, integrated_gradients, layer_integrated_gradients
    from tenterhook.recipes.perturbation import channel_ablation, feature_ablation, occlusion
    from tenterhook.recipes.probes import Probes, probe
    from tenterhook.recipes.relevance import deeplift, lrp
    from tenterhook.recipes.result import Attribution, side_by_side
    from tenterhook.recipes.rollout import attention_rollout

__all__ = [
    "Attribution",
    "Probes",
    "attention_rollout",
    "channel_ablation",
    "conductance",
    "deconvnet",
    "deeplift",
    "feature_ablation",
    "gradcam",
    "gradcam_plus_plus",
    "guided_backprop",
    "guided_gradcam",
    "input_x_gradient",
    "integrated_gradients",
    "layer_integrated_gradients",
    "layercam",
    "lrp",
    "occlusion",
    "patching",
    "probe",
    "saliency",
    "scorecam",
    "side_by_side",
    "smoothgrad",
]

# Each file and what it has; it is loaded when one of them is asked for, which keeps `import tenterhook` fast.
_FILES = {
    "cam": ("gradcam", "gradcam_plus_plus", "guided_gradcam", "layercam", "scorecam"),
    "gradients": ("deconvnet", "guided_backprop", "input_x_gradient", "saliency", "smoothgrad"),
    "path": ("conductance", "integrated_gradients", "layer_integrated_gradients"),
    "perturbation": ("channel_ablation", "feature_ablation", "occlusion"),
    "probes": ("Probes", "probe"),
    "relevance": ("deeplift", "lrp"),
    "result": ("Attribution", "side_by_side"),
    "rollout": ("attention_rollout",),
}
_HOME = {name: file for file, names in _FILES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
