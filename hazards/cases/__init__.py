"""The cases. Each takes a tool and tells whether what it got is right; an exception is a refusal, which is loud."""

from hazards.cases import cycle, gradients, values
from hazards.cases.base import CASES, Case

__all__ = ["CASES", "SECTIONS", "Case", "cycle", "gradients", "values"]

SECTIONS = ("Values", "Gradients", "Recomputation", "Compiled models", "Life cycle")

CASES.sort(key=lambda case: SECTIONS.index(case.section))
