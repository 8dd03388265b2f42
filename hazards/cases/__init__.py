"""The cases. Each one runs a tool and returns whether its result is right. An exception counts as a loud refusal."""

from hazards.cases import cycle, gradients, values
from hazards.cases.base import CASES, Case

__all__ = ["CASES", "SECTIONS", "Case", "cycle", "gradients", "values"]

SECTIONS = ("Values", "Gradients", "Recomputation", "Compiled models", "Life cycle")

CASES.sort(key=lambda case: SECTIONS.index(case.section))
