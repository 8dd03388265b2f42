"""Private PyTorch is used in src/tenterhook/pytorch only, and all its names there are among the sabotaged ones."""

import ast
import builtins
import dis
import enum
import functools
import importlib
import itertools
import threading
import types
from pathlib import Path

import pytest
import torch
import torch.fx.experimental.proxy_tensor
import torch.nn.utils.parametrizations
import torch.nn.utils.prune
import torch.utils.checkpoint
from sabotage_targets import VARIABLES, import_room
from torch import nn

import tenterhook
from tenterhook.pytorch import names

SOURCE = Path(tenterhook.__file__).parent
ROOM = SOURCE / "pytorch"
INSIDE = sorted(ROOM.rglob("*.py"))
OUTSIDE = sorted(path for path in SOURCE.rglob("*.py") if ROOM not in path.parents)

FRAMES = {
    "__closure__", "_current_frames", "_getframe", "cell_contents", "co_cellvars", "co_consts", "co_freevars",
    "cr_frame", "currentframe", "f_back", "f_locals", "gi_frame", "gi_yieldfrom",
}  # fmt: skip
VERSION = "_version"  # A tensor's count of changes in place: read everywhere, checked by a probe, and sabotaged.
OTHERS = {"_fields", "_make", "_hf_hook", "_old_forward", "_fingerprint"}  # of named tuples, accelerate and datasets
EXCEPTIONS = {
    # Recipes know the public names only. Where the name is gone, the batch norm is refused as one in training is.
    ("recipes/_graph.py", "_saved_training"),
}


@pytest.fixture(scope="module", autouse=True)
def _room():
    import_room()


def words():
    """Every name that is looked up or read, and the private parts of the paths to it."""
    found = {path.rpartition(".")[2] for path in names.NAMES} | {name for _, name in names.ATTRIBUTES}
    return found | {step for path in names.NAMES for step in path.split(".") if is_private(step)}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def where(path, node):
    return f"{path.relative_to(SOURCE)}:{node.lineno}"


def strings(tree):
    """The string constants of a file that are no docstrings."""
    parents = ast.Module | ast.ClassDef | ast.FunctionDef
    statements = [each for node in ast.walk(tree) if isinstance(node, parents) for each in node.body]
    docstrings = {id(each.value) for each in statements if isinstance(each, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node


def defined(tree):
    """The names that a file itself gives to attributes: in its classes, by ``self`` and in ``__slots__``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (each.name for each in node.body if isinstance(each, ast.FunctionDef))
            for each in node.body:
                if isinstance(each, ast.AnnAssign | ast.Assign):
                    target = each.target if isinstance(each, ast.AnnAssign) else each.targets[0]
                    yield ast.unparse(target)
                    yield from ast.literal_eval(each.value) if ast.unparse(target) == "__slots__" else ()
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own = ast.unparse(node.value) == "self" or not is_private(node.attr)
            yield from [node.attr] if own else []


def calls(tree, *functions):
    """The calls of these functions whose second argument is a string."""
    for node in ast.walk(tree):
        second = node.args[1] if isinstance(node, ast.Call) and len(node.args) > 1 else None
        if isinstance(second, ast.Constant) and ast.unparse(node.func) in functions:
            yield second


# -- in the room -------------------------------------------------------------------------------------------------------

PUBLIC = (
    torch, torch.Tensor, torch.UntypedStorage, torch.autograd, torch.autograd.function, torch.autograd.graph,
    torch.autograd.graph.Node, torch.compiler, torch.func, torch.fx, torch.fx.experimental.proxy_tensor, torch.jit,
    torch.linalg, torch.nn.modules.module, torch.utils, torch.utils.checkpoint,
    torch.utils.checkpoint.CheckpointFunction, nn, nn.functional, nn.Module(), nn.RNN(1, 1), nn.utils.parametrizations,
    nn.utils.parametrize, nn.utils.prune, nn.utils.prune.BasePruningMethod, Path, builtins, dict, enum.Enum, frozenset,
    itertools.chain, list, property, set, str, threading.Thread(), tuple, type, types.CodeType, types.FrameType,
    types.FunctionType, types.GeneratorType, types.MethodType, dis.Instruction,
)  # fmt: skip
# Of FSDP2, of Hugging Face models, of parametrized modules, of torch.autograd.graph in later releases, and an option.
ALSO_PUBLIC = {
    "FSDPModule",
    "gradient_checkpointing",
    "original",
    "parametrizations",
    "queue_callback",
    "triton.cudagraphs",
}


def imported():
    """The modules of the standard library that the room imports."""
    found = [node for path in INSIDE for node in ast.walk(parsed(path)) if isinstance(node, ast.Import)]
    roots = {alias.name.partition(".")[0] for node in found for alias in node.names}
    return [importlib.import_module(root) for root in roots - {"torch", "tenterhook"}]


def known_in_the_room():
    public = {name for owner in (*PUBLIC, *imported()) for name in dir(owner) if not is_private(name)}
    return public | ALSO_PUBLIC | FRAMES | words() | {name for path in INSIDE for name in defined(parsed(path))}


def test_every_attribute_that_the_room_reads_is_public_or_declared():
    known, undeclared = known_in_the_room(), []
    for path in INSIDE:
        read = [(node, node.attr) for node in ast.walk(parsed(path)) if isinstance(node, ast.Attribute)]
        asked = [(node, node.value) for node in calls(parsed(path), "getattr", "hasattr", "setattr")]
        undeclared += [f"{where(path, node)}: {name}" for node, name in read + asked if name not in known]
    assert undeclared == []  # Declare them with names.attribute.


def test_every_private_name_in_a_string_of_the_room_is_declared():
    known = known_in_the_room()
    paths = {parent for name in names.NAMES for parent in itertools.accumulate(name.split("."), "{}.{}".format)}
    for path in INSIDE:
        for node in strings(parsed(path)):
            steps = node.value.split(".")
            if not all(map(str.isidentifier, steps)) or not any(map(is_private, steps)):
                continue
            found = node.value in known if len(steps) == 1 else {node.value, f"torch.{node.value}"} & paths
            assert found, f"{where(path, node)}: look {node.value!r} up with names.find"


def test_every_variable_that_the_room_reads_in_a_frame_is_sabotaged():
    known = {name for each in VARIABLES.values() for name in each} | words() | {"forward", "weight_ih_l0"} | ALSO_PUBLIC
    for path in INSIDE:
        for node in ast.walk(parsed(path)):
            key = node.slice if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) else None
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "FEATURES":
                continue  # Names of our own.
            if isinstance(key, ast.Constant) and isinstance(key.value, str) and not key.value.isupper():
                assert key.value in known, f"{where(path, node)}: add {key.value!r} to VARIABLES"


# -- outside the room --------------------------------------------------------------------------------------------------


def of_torch(node):
    """The modules and names of PyTorch that an import statement takes."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
        return {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    if isinstance(node, ast.Import):
        found = [alias for alias in node.names if alias.name.partition(".")[0] == "torch"]
        return {(alias.asname or alias.name).partition(".")[0]: alias.name for alias in found}
    return {}


def test_nothing_outside_the_room_imports_a_private_part_of_pytorch():
    for path in OUTSIDE:
        for node in ast.walk(parsed(path)):
            for name in of_torch(node).values():
                assert not any(map(is_private, name.split("."))), f"{where(path, node)}: {name}"


def test_nothing_outside_the_room_reads_a_private_attribute_of_pytorch():
    known = words()
    for path in OUTSIDE:
        tree = parsed(path)
        taken = {"torch"} | {name for node in ast.walk(tree) for name in of_torch(node)}
        own = set(defined(tree))
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not is_private(node.attr) or node.attr == VERSION:
                continue
            owner = ast.unparse(node.value)
            place = f"{where(path, node)}: {owner}.{node.attr}"
            assert not (owner.partition(".")[0] in taken and owner.replace(".", "").isidentifier()), place
            assert node.attr not in known or (owner in ("self", "cls") and node.attr in own), place


def test_nothing_outside_the_room_looks_into_frames_and_closures():
    for path in OUTSIDE:
        for node in ast.walk(parsed(path)):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            assert name not in FRAMES, f"{where(path, node)}: {name}"
            imported = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else ()
            assert not FRAMES.intersection(imported), where(path, node)


def test_nothing_outside_the_room_has_a_private_name_of_pytorch_in_a_string():
    node = (torch.ones(1, requires_grad=True) * 2).grad_fn
    owners = (nn.Module(), torch.Tensor, node)
    known = words() | {name for owner in owners for name in dir(owner) if is_private(name)}
    for path in OUTSIDE:
        own = set(defined(parsed(path))) | OTHERS
        for node in strings(parsed(path)):
            if not is_private(node.value) or node.value in own:
                continue
            if (str(path.relative_to(SOURCE)), node.value) not in EXCEPTIONS:
                found = node.value in known or node.value.startswith(("_saved_", "_raw_saved_"))
                assert not found, f"{where(path, node)}: {node.value}"


def test_nothing_outside_the_room_overrides_a_private_method_of_pytorch():
    known = {name for owner in (nn.Module, torch.Tensor, torch.autograd.Function) for name in dir(owner)}
    for path in OUTSIDE:
        for node in ast.walk(parsed(path)):
            bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
            if any(base.endswith(("Module", "Tensor", "Function")) for base in bases):
                methods = {
                    each.name for each in node.body if isinstance(each, ast.FunctionDef) and is_private(each.name)
                }
                assert not methods & known, where(path, node)
