"""The peak speed of devices: operations and bytes per second, from the data sheets of their makers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

__all__ = ["Peak", "known_peak"]


@dataclass(frozen=True)
class Peak:
    """The fastest that a device can be: dense FLOPs per second for each dtype, and bytes of memory per second."""

    flops: Mapping[torch.dtype, float]
    bandwidth: float

    def seconds(self, flops: float, moved: float, dtype: torch.dtype) -> float:
        """Return the shortest time for an operation: the roofline."""
        speed = self.flops.get(dtype, 0.0)
        return max(flops / speed if speed else 0.0, moved / self.bandwidth)


def _tensor_cores(half: float, single: float, bandwidth: float) -> Peak:
    return Peak({torch.bfloat16: half, torch.float16: half, torch.float32: single}, bandwidth)


# Names are matched from the first to the last. float32 is without TF32, which PyTorch does not use by default.
KNOWN = {
    "H200": _tensor_cores(989e12, 67e12, 4.8e12),
    "H100 PCIe": _tensor_cores(756e12, 51e12, 2.0e12),
    "H100": _tensor_cores(989e12, 67e12, 3.35e12),
    "GH200": _tensor_cores(989e12, 67e12, 4.0e12),
    "B200": _tensor_cores(2250e12, 80e12, 8.0e12),
    "A100-SXM4-80GB": _tensor_cores(312e12, 19.5e12, 2.039e12),
    "A100": _tensor_cores(312e12, 19.5e12, 1.555e12),
    "L40S": _tensor_cores(362e12, 91.6e12, 0.864e12),
    "L4": _tensor_cores(121e12, 30.3e12, 0.3e12),
    "A10G": _tensor_cores(70e12, 31.2e12, 0.6e12),
    "T4": _tensor_cores(65e12, 8.1e12, 0.32e12),
    "V100": _tensor_cores(125e12, 15.7e12, 0.9e12),
}


def known_peak(device: torch.device) -> Peak | None:
    """Return the peak of a device, or None if it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in KNOWN.items() if known in name), None)
