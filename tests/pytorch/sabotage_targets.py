"""What is sabotaged: every private name that tenterhook uses, the variables that it reads, and patched PyTorchs."""

import importlib
import pkgutil
import types
from typing import NamedTuple

from sabotage_renames import Rename

__all__ = ["Target", "import_room", "targets"]


class Target(NamedTuple):
    """One sabotage, in a process of its own."""

    label: str
    renames: tuple[Rename, ...] = ()
    patch: str = ""
    """the name of a function in ``sabotage_patches``"""
    slow: bool = True
    """whether PyTorch still runs compiled models so"""


CHECKPOINT = "torch/utils/checkpoint.py"
CALL = "torch/nn/modules/module.py"
OPTIMIZER = "torch/optim/optimizer.py"

# Words that mean other things in PyTorch too, or that C++ uses: tenterhook looks for another name instead.
COMMON = {
    "DisableTorchFunction", "PROXY", "TorchDispatchMode", "Unsupported", "_foreach_copy_", "_foreach_norm", "counters",
    "disable", "graph_break", "is_fake", "skip_code",
}  # fmt: skip
COMMON |= {"_fsdp_param_group"}  # A file has that name too.
IN_C = {"AsStridedBackward0", "Tensor", "UntypedStorage", "autograd.Node"}

# Attributes of private objects whose names are common words: the room looks for others.
ROOM = "tenterhook/pytorch/"
BEHIND = {
    "FSDPParamGroup", "TensorGuards", "_FrameAction", "_WrappedHook", "autograd engine", "compilation settings",
    "pytree node", "stance", "trace_rules",
}  # fmt: skip

# Words that only these files of PyTorch use in the sense that is meant.
ONLY_IN = {
    ("checkpoint frame", "recompute_fn"): (CHECKPOINT,),
    ("CheckpointFunction context", "run_function"): (CHECKPOINT,),
    ("nn.Module", "_backward_hooks"): (
        CALL, "torch/jit/_recursive.py", "torch/jit/_trace.py", "_aot_autograd/frontend_utils.py", "split_module.py",
    ),
}  # fmt: skip

# Local variables and closures that are read, or could be, in PyTorch's frames.
VARIABLES = {
    CHECKPOINT: ("ctx", "frame", "gen", "new_frame", "pack_hook", "self", "target_frame_ref"),
    CALL: ("args", "called_always_called_hooks", "forward_call", "hook_id", "inner", "kwargs", "result", "self"),
    OPTIMIZER: ("self",),
}
PATCHES = (
    "nn.Module.__call__ in a wrapper",
    "nn.Module.__call__ without instance forwards",
    "nn.Module._call_impl in a wrapper",
    "checkpoint in a wrapper",
    "checkpoint by another library",
    "checkpoint of PyTorch moved to another file",
    "register_hook in a wrapper",
)


def import_room():
    """Import every module of tenterhook.pytorch, so that all names are known."""
    import tenterhook.pytorch as room

    for module in pkgutil.iter_modules(room.__path__):
        importlib.import_module(f"{room.__name__}.{module.name}")


def targets():
    """Every sabotage that makes sense with the installed release."""
    from tenterhook.pytorch import names

    import_room()
    found = [Target("nothing")]
    found += [_of_path(path) for path, there in sorted(names.NAMES.items()) if there]
    found += [Target(f"module {path}", (Rename(path, "tenterhook"),)) for path in sorted(set(_modules(names.NAMES)))]
    found += [_of_attribute(owner, name) for owner, name in sorted(names.ATTRIBUTES)]
    found += [
        Target(f"variable {name} in {file}", (Rename(name, "torch", (file,)),))
        for file, words in VARIABLES.items()
        for name in words
    ]
    found += [Target(f"patched: {name}", patch=name, slow="without instance" not in name) for name in PATCHES]
    return {target.label: target for target in found}


def _of_path(path):
    parent, _, word = path.rpartition(".")
    owner = importlib.import_module(parent) if parent != "torch" and _is_module(parent) else None
    if word in COMMON or _is_module(path):
        return Target(path, (Rename(path, "tenterhook"),))
    if owner is not None and parent.startswith("torch._C"):
        return Target(path, (Rename(word, "torch", moved_from=parent),))
    return Target(path, (Rename(word, "torch"),))


def _of_attribute(owner, name):
    if name in COMMON:
        rename = Rename(name, "tenterhook")
    elif owner in BEHIND or name == "config":
        rename = Rename(name, "tenterhook", (ROOM,), only_attributes=True)
    else:
        rename = Rename(name, "tenterhook" if owner in IN_C else "torch", ONLY_IN.get((owner, name), ()))
    return Target(f"{owner}.{name}", (rename,))


def _modules(paths):
    """The private modules that names are looked up in."""
    for path in paths:
        steps = path.split(".")
        for length in range(2, len(steps)):
            parent = ".".join(steps[:length])
            if _is_module(parent) and any(step.startswith("_") for step in steps[:length]):
                yield parent


def _is_module(path):
    try:
        return isinstance(importlib.import_module(path), types.ModuleType)
    except ImportError:
        return False
