"""Environment variables that change the behaviour of PyTorch."""

from __future__ import annotations

import os

from tenterhook.doctor.redact import redact_value

__all__ = ["environment"]

PREFIXES = ("PYTORCH_", "TORCH", "TRITON_")
NAMES = frozenset(
    {
        "CUBLAS_WORKSPACE_CONFIG",
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "KMP_AFFINITY",
        "MKL_NUM_THREADS",
        "OMP_NUM_THREADS",
        "ONEDNN_MAX_CPU_ISA",
        "ROCR_VISIBLE_DEVICES",
    }
)


def environment() -> dict[str, str]:
    """Return the relevant variables that are set, sorted by name, with secrets redacted."""
    chosen = (name for name in sorted(os.environ) if name in NAMES or name.startswith(PREFIXES))
    return {name: redact_value(name, os.environ[name]) for name in chosen}
