"""What is sabotaged: every private name that tenterhook uses, the variables that it reads, and patched PyTorchs."""

import functools
import importlib
import json
import pkgutil
import re
import sys
import types
from pathlib import Path
from typing import NamedTuple

from sabotage_renames import Rename

__all__ = ["VARIABLES", "Target", "import_room", "named", "targets"]


class Target(NamedTuple):
    """One sabotage, in a process of its own."""

    label: str
    rename: Rename | None = None
    patch: str = ""
    """the name of a function in ``sabotage_patches``"""
    gone: str = ""
    """the name that is not there any more"""
    slow: bool = True
    """whether PyTorch itself still runs compiled models"""


CHECKPOINT = "torch/utils/checkpoint.py"
CALL = "torch/nn/modules/module.py"
OPTIMIZER = "torch/optim/optimizer.py"
ROOM = "tenterhook/pytorch/"

# Words that mean other things in PyTorch too, or that C++ uses: tenterhook looks for another name instead.
COMMON = {
    "DisableTorchFunction", "PROXY", "TorchDispatchMode", "Unsupported", "_foreach_copy_", "_foreach_norm",
    "_checkpoint", "_fsdp_param_group", "counters", "disable", "graph_break", "is_fake", "skip_code",
}  # fmt: skip
IN_C = {"AsStridedBackward0", "Tensor", "UntypedStorage", "autograd.Node"}
# Attributes of private objects whose names are common words: only the files that use them look for others.
BEHIND = {
    "Dynamo counters", "FSDPParamGroup", "TensorGuards", "_FrameAction", "_WrappedHook", "autograd engine",
    "compilation settings", "pytree node", "stance", "trace_rules",
}  # fmt: skip
BEHIND_WORDS = {"compiler_fn", "config"}

# Words that only these files of PyTorch use in the sense that is meant.
ONLY_IN = {
    ("checkpoint frame", "recompute_fn"): (CHECKPOINT,),
    ("CheckpointFunction context", "run_function"): (CHECKPOINT,),
    ("parametrizations.spectral_norm", "_u"): ("torch/nn/utils/parametrizations.py",),
    ("parametrizations.spectral_norm", "_v"): ("torch/nn/utils/parametrizations.py",),
    ("torch.nn.utils.parametrize", "_cache"): ("torch/nn/utils/parametrize.py",),
    ("nn.Module", "_backward_hooks"): (
        CALL, "torch/jit/_recursive.py", "torch/jit/_trace.py", "_aot_autograd/frontend_utils.py", "split_module.py",
        "_dynamo/functional_export.py", "_dynamo/convert_frame.py", "_dynamo/variables/nn_module.py",
        "_dynamo/utils.py",
    ),
}  # fmt: skip

# Local variables and closures that are read, or could be, in PyTorch's frames.
VARIABLES = {
    CHECKPOINT: ("ctx", "frame", "gen", "new_frame", "pack_hook", "self", "target_frame_ref"),
    CALL: ("args", "called_always_called_hooks", "forward_call", "hook_id", "inner", "kwargs", "result", "self"),
    OPTIMIZER: ("self",),
}
PATCHES = {
    "nn.Module.__call__ in a wrapper": True,
    "nn.Module.__call__ without instance forwards": False,
    "nn.Module._call_impl in a wrapper": True,
    "checkpoint in a wrapper": True,
    "checkpoint by another library": True,
    "checkpoint of PyTorch moved to another file": True,
    "register_hook in a wrapper": True,
}


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
    found += [Target(f"module {path}", Rename(path, "tenterhook")) for path in sorted(set(_modules(names.NAMES)))]
    found += [_of_attribute(owner, name) for owner, name in sorted(names.ATTRIBUTES)]
    found += [named(f"variable {name} in {file}") for file, words in VARIABLES.items() for name in words]
    found += [named(f"patched: {name}") for name in PATCHES]
    return {target.label: target for target in found if target.rename is None or _has(target.rename)}


def named(label):
    """Return one of the targets without listing all, which takes some seconds."""
    if label.startswith("patched: "):
        name = label.removeprefix("patched: ")
        return Target(label, patch=name, slow=PATCHES[name])
    if label.startswith("variable "):
        _, name, _, file = label.split()
        return Target(label, Rename(name, "torch", (file,)))
    return _of_path(label) if label.startswith("torch.") else _of_attribute(*label.rsplit(".", 1))


def _of_path(path):
    parent, _, word = path.rpartition(".")
    is_in_class = parent.startswith("torch._C") and not _is_module(parent)
    if word in COMMON or is_in_class or _is_module(path):
        return Target(path, Rename(path, "tenterhook"))
    moved_from = parent if parent.startswith("torch._C") else ""
    return Target(path, Rename(word, "torch", moved_from=moved_from), gone=path)


def _of_attribute(owner, name):
    if name in COMMON:
        rename = Rename(name, "tenterhook")
    elif owner in BEHIND or name in BEHIND_WORDS:
        rename = Rename(name, "tenterhook", (ROOM,), only_attributes=True)
    else:
        rename = Rename(name, "tenterhook" if owner in IN_C else "torch", ONLY_IN.get((owner, name), ()))
    return Target(f"{owner}.{name}", rename)


def _modules(paths):
    """The private modules that names are looked up in."""
    for path in paths:
        steps = path.split(".")
        for length in range(2, len(steps)):
            parent = ".".join(steps[:length])
            if any(step.startswith("_") for step in steps[:length]) and _is_module(parent):
                yield parent


@functools.cache
def _is_module(path):
    try:
        return isinstance(importlib.import_module(path), types.ModuleType)
    except ImportError:
        return False


def _has(rename):
    """Return whether this release has the word at all: tenterhook knows the names of several."""
    return rename.package != "torch" or rename.word in _words_of_torch()


@functools.cache
def _words_of_torch():
    import torch

    sources = [path.read_text(encoding="utf-8") for path in Path(torch.__file__).parent.rglob("*.py")]
    return set().union(*(re.findall(r"\w+", source) for source in sources))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(list(targets().values())))
