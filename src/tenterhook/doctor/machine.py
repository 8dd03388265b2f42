"""Python, torch and the GPUs of this machine, read without initialising CUDA."""

from __future__ import annotations

import platform
import shutil
import subprocess
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from tenterhook.doctor.redact import redact
from tenterhook.pytorch.release import why_untested

__all__ = ["Gpu", "Python", "Torch", "python", "torch_build"]

TIMEOUT = 10  # seconds to wait for nvidia-smi, which is slow if its daemon does not run


@dataclass(frozen=True, slots=True)
class Python:
    """The running Python and its platform."""

    version: str
    implementation: str
    platform: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU model, and the number of GPUs of that model."""

    name: str
    count: int


@dataclass(frozen=True, slots=True)
class Torch:
    """The installed torch, the platform that it was built for, and the GPUs."""

    version: str
    untested: str
    """the reason if this release is untested; empty if it is tested"""
    git: str | None
    cuda: str | None
    rocm: str | None
    accelerator: str | None
    """the device type that torch was built for, such as ``cuda``"""
    devices: int | None
    """the number of devices that torch can use; None if counting them fails"""
    gpus: tuple[Gpu, ...]
    """the GPUs by name, if known; includes GPUs that CUDA_VISIBLE_DEVICES hides"""


def python() -> Python:
    """Return the version and platform of the running Python."""
    return Python(platform.python_version(), platform.python_implementation(), platform.platform())


def torch_build() -> Torch:
    """Return the version, build and devices of the installed torch."""
    kind, devices = _devices()
    version = str(torch.__version__)
    return Torch(
        version=version,
        untested=why_untested(version),
        git=getattr(torch.version, "git_version", None),
        cuda=getattr(torch.version, "cuda", None),
        rocm=getattr(torch.version, "hip", None),
        accelerator=kind,
        devices=devices,
        gpus=tuple(Gpu(name, count) for name, count in Counter(_names(kind, devices)).items()),
    )


def _devices() -> tuple[str | None, int | None]:
    """Return the device type that torch was built for, and how many devices it can use."""
    kind = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # If the driver is too old, the count shows it.
            device = torch.accelerator.current_accelerator()
            kind = None if device is None else device.type
            return kind, torch.get_device_module(kind).device_count() if kind else 0
    except Exception:  # noqa: BLE001 - a broken driver must not prevent the rest of the report
        return kind, None


def _names(kind: str | None, devices: int | None) -> list[str]:
    if kind is None:
        return []
    module: Any = torch.get_device_module(kind)
    if devices and getattr(module, "is_initialized", bool)():
        return [redact(module.get_device_name(index)) for index in range(devices)]
    # Asking torch for the names would initialise CUDA, and then forked workers of this process could not use CUDA.
    return _names_by_nvidia_smi() if kind == "cuda" and torch.version.hip is None else []


def _names_by_nvidia_smi() -> list[str]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    try:
        found = subprocess.run(  # noqa: S603 - a fixed command without a shell
            [command, "--query-gpu=name", "--format=csv,noheader"],
            check=True, capture_output=True, text=True, timeout=TIMEOUT,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    return [redact(line.strip()) for line in found.stdout.splitlines() if line.strip()]
