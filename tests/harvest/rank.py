"""One process of several: ``python rank.py KIND FOLDER``, with the variables that torchrun sets."""

import os
import sys

import killed
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tenterhook as th


def plain(folder):
    killed.run(folder)


def stream(folder):
    class Some:
        def __iter__(self):
            return iter(killed.batches())

    th.harvest(killed.model(), Some(), "0", "1", to=folder, shard_rows=4 * killed.SIZE)


def fsdp(folder):
    dist.init_process_group("gloo")
    model = killed.model()
    for module in (*model, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    th.harvest(model, killed.batches(), "0", "1", to=folder, shard_rows=4 * killed.SIZE)


def tensor_parallel(folder):
    dist.init_process_group("gloo")
    plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
    model = parallelize_module(killed.model(), init_device_mesh("cpu", (2,)), plan)
    th.harvest(model, killed.batches(), "0", "1", to=folder, shard_rows=4 * killed.SIZE)


def both(folder):
    """Four processes, two by two: a tensor-parallel plan along one side, FSDP2 along the other."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
    model = parallelize_module(killed.model(), mesh["model"], plan)
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh["data"])
    th.harvest(model, killed.batches(), "0", "1", to=folder, shard_rows=4 * killed.SIZE)


def hybrid(folder):
    """Four processes: parameters are spread over two, and there are two copies of that."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
    model = killed.model()
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    th.harvest(model, killed.batches(), "0", "1", to=folder, shard_rows=4 * killed.SIZE)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "SLOW" in os.environ:
        killed.slow(float(os.environ["SLOW"]))
    globals()[sys.argv[1]](sys.argv[2])
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
