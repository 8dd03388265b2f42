"""Distributed wrappers, with one process on a GPU: `PYTHONPATH=src python -m benchmarks.gpu_distributed OUT.json`.

Nothing is timed. Each kind of wrapper is recorded with gradients, edited and stopped, and compared with the plain model
on the same device. `--tiny` runs everything on the CPU, as a test of the script.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import tenterhook as th

TINY = "--tiny" in sys.argv
DEVICE = "cpu" if TINY else "cuda"
POINTS = ("a", "act", "b:in", ":hidden")


class Net(nn.Module):
    """Two layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b, self.head = nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.b(self.act(self.a(x)))
        return self.head(hidden)  # type: ignore[no-any-return]


def net(device: str = DEVICE) -> nn.Module:
    """Return a model with the same weights every time."""
    torch.manual_seed(0)
    return Net().to(device)


def given() -> Tensor:
    """Return the same input every time."""
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def offloaded() -> nn.Module:
    """Return a model whose weights `accelerate` loads only during a call."""
    import accelerate

    return accelerate.cpu_offload(net("cpu"), execution_device=torch.device(DEVICE))  # type: ignore[no-any-return]


def kinds() -> Iterator[tuple[str, Callable[[], nn.Module], str]]:
    """Yield the name of a kind, the function that builds it, and the prefix of its names."""
    mesh = init_device_mesh(DEVICE, (1,))
    plan = {"a": ColwiseParallel(), "b": RowwiseParallel()}
    yield "itself", net, ""
    yield "DistributedDataParallel", lambda: DistributedDataParallel(net()), "module."
    yield "FSDP2", lambda: fully_shard(net(), mesh=mesh), ""
    yield "tensor parallel", lambda: parallelize_module(net(), mesh, plan), ""
    yield "DataParallel", lambda: nn.DataParallel(net(), [0] if not TINY else None), "module."
    if not TINY:
        policy = CPUOffloadPolicy()
        yield "FSDP2, weights on the CPU", lambda: fully_shard(net("cpu"), mesh=mesh, offload_policy=policy), ""
    yield "accelerate, weights on the CPU", offloaded, ""


def check(make: Callable[[], nn.Module], before: str) -> None:
    """Record with gradients, edit, stop, and run again, and compare with the plain model."""
    plain, hides = net(), make is offloaded
    points = [point for point in POINTS if not (hides and point.startswith(":"))]
    names = {point: (before.removesuffix(".") if point.startswith(":") else before) + point for point in points}
    with th.record(plain, *points, grad=True) as wanted:
        plain(given()).sum().backward()
    model = make()
    with th.record(model, *names.values(), grad=True) as tape:
        model(given()).sum().backward()
    for point, name in names.items():
        same(tape[name], wanted[point], point)
        same(tape.grad[name], wanted.grad[point], f"the gradient of {point}")
    edit = {"act": th.scale(2.0)}
    with th.edit(model, {f"{before}act": th.scale(2.0)}), th.edit(plain, edit), torch.no_grad():
        same(model(given()), plain(given()), "an edit")
    with th.record(model, f"{before}act", stop=True) as stopped, torch.no_grad():
        model(given())
        raise AssertionError("it did not stop")
    same(stopped[f"{before}act"], wanted["act"], "a stop")
    with torch.no_grad():
        same(model(given()), plain(given()), "what comes after")


def same(found: Any, wanted: Tensor, what: str) -> None:
    """Raise if two values differ."""
    whole = found.full_tensor() if hasattr(found, "full_tensor") else found
    assert torch.allclose(whole, wanted, atol=1e-6), what  # noqa: S101


def main(path: str | None) -> int:
    """Check every kind, and write the results."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listening.getsockname()[1])}
    dist.init_process_group("gloo" if TINY else "nccl", rank=0, world_size=1)
    result = {}
    for name, make, before in kinds():
        try:
            check(make, before)
            result[name] = "right"
        except ImportError as error:
            result[name] = f"not here: {error}"
        except Exception:  # noqa: BLE001  # any error is reported
            result[name] = traceback.format_exc()
        print(f"{name}: {result[name]}", flush=True)
    dist.destroy_process_group()
    if path is not None:
        Path(path).write_text(json.dumps({"torch": torch.__version__, "kinds": result}, indent=1), encoding="utf-8")
    return 0 if all(said == "right" or said.startswith("not here") for said in result.values()) else 1


if __name__ == "__main__":
    given_paths = [each for each in sys.argv[1:] if not each.startswith("--")]
    sys.exit(main(given_paths[0] if given_paths else None))
