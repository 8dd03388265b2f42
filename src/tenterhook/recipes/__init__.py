"""What people use hooks for, each in one line. Built on the public names alone.

Attribution: ``saliency``, ``input_x_gradient``, ``guided_backprop``, ``deconvnet``, ``smoothgrad``,
``integrated_gradients``, ``layer_integrated_gradients``, ``conductance``, ``gradcam``, ``gradcam_plus_plus``,
``layercam``, ``scorecam``, ``guided_gradcam``, ``occlusion``, ``feature_ablation``, ``channel_ablation``, ``deeplift``,
``lrp``, ``attention_rollout``. ``probe``: linear probes.
``patching``: activation, attribution and path patching.
"""

from tenterhook.recipes import patching
from tenterhook.recipes.cam import gradcam, gradcam_plus_plus, guided_gradcam, layercam, scorecam
from tenterhook.recipes.gradients import deconvnet, guided_backprop, input_x_gradient, saliency, smoothgrad
from tenterhook.recipes.path import conductance, integrated_gradients, layer_integrated_gradients
from tenterhook.recipes.perturbation import channel_ablation, feature_ablation, occlusion
from tenterhook.recipes.probes import Probes, probe
from tenterhook.recipes.relevance import deeplift, lrp
from tenterhook.recipes.result import Attribution
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
    "smoothgrad",
]
