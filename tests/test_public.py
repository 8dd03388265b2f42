import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tenterhook as th

SOURCE = Path(th.__file__).parent

# Each package may import from those in earlier lines, and from itself.
ROOMS = [
    {"errors", "pytorch", "_text", "_version", "_lazy"},
    {"_tree", "_tensor_bytes", "_free_memory", "_draw", "_fit", "_look", "_model_table", "_notebook_figure"},
    {"address"},
    {"sites"},
    {"engine"},
    {"compiled"},
    {"call_trace"},
    {"record", "edit", "statistics", "store"},
    {"replay", "batch", "splice", "watch", "harvest", "audit", "cost"},
    {"report", "recipes"},
    {"integrations", "cli", "__main__"},
]
# Modules outside this order, with the package that they come after. The doctor is limited further, see below.
BESIDE = {"hooks": "sites", "testing": "sites", "features": "replay", "doctor": "_draw"}

NAMES = """
    AddressError AmbiguousCall Audit BatchError BatchResult ClosedSession CostError Diagnosis Dictionary
    DifferentHarvest EditError EditFileError Features GradientError HarvestError HookError JsonLines Learned
    ModelChanged NeverReached NoBackward NoGradient NoSource NonFinite NotRecorded Point ReadonlyHook RecipeError
    ReplayError Selection SelectorError SessionError SpliceError Stopped StoreError Sweep SweepError
    SweepInterrupted Tape TapeError TapeFileError TensorBoard TenterhookError TenterhookWarning UnsupportedModel
    UnsupportedTorch ValueChanged __version__ add at audit batch blackbox case clamp cost departures doctor edit
    features grid harvest hooks learn load load_dictionary load_edits lowrank mask mean noise open page points
    project recipes record register_meaning replay rotate run_from save_edits scale set skip splice sweep watch zero
"""


def test_the_public_names_are_these():
    assert sorted(NAMES.split()) == sorted(th.__all__)
    assert len(th.__all__) == len(set(th.__all__))
    assert list(th.__all__) == sorted(th.__all__)


def test_every_public_name_is_there_and_nothing_else_is_imported_by_star():
    scope = {}
    exec("from tenterhook import *", scope)
    assert set(scope) - {"__builtins__"} == set(th.__all__)


PACKAGE = ast.parse((SOURCE / "__init__.py").read_text())


def test_the_package_itself_only_imports():
    *others, lazy = PACKAGE.body
    assert all(isinstance(node, ast.Import | ast.ImportFrom | ast.Expr | ast.Assign | ast.If) for node in others)
    assert lazy.value.func.id == "load_on_use"


def test_what_type_checkers_read_is_what_is_loaded():
    [checked] = [node for node in PACKAGE.body if isinstance(node, ast.If)]
    read = {
        alias.asname or alias.name: f"tenterhook.{alias.name}"
        if node.module == "tenterhook"
        else f"{node.module}:{alias.name}"
        for node in checked.body
        for alias in node.names
    }
    assert read == ast.literal_eval(PACKAGE.body[-1].value.args[1])


def in_a_new_process(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("first", ["tenterhook.hooks", "tenterhook.record.verb", "tenterhook.watch.verb", "tenterhook"])
def test_a_public_name_is_never_the_package_of_that_name(first):
    code = (
        f"import {first}; import tenterhook as th; from tenterhook import edit, watch; import tenterhook.harvest.verb; "
        "print(all(callable(getattr(th, name)) for name in 'record edit watch harvest audit replay features'.split()), "
        "callable(edit), callable(watch))"
    )
    assert in_a_new_process(code) == "True True True"


def test_a_public_name_can_be_replaced_and_deleted_before_it_is_used():
    code = (
        "import tenterhook as th; th.record = 3; import tenterhook.record.verb; print(th.record, 'edit' in dir(th)); "
        "del th.edit; print(hasattr(th, 'edit'))"
    )
    assert in_a_new_process(code).split() == ["3", "True", "False"]


def test_importing_loads_no_engine():
    code = "import sys, tenterhook; print([name for name in sys.modules if name.startswith('tenterhook.engine')])"
    assert in_a_new_process(code) == "[]"


def level(room):
    room = BESIDE.get(room, room)
    return next(place for place, rooms in enumerate(ROOMS) if room in rooms)


def imports(path):
    """Return the packages that a file imports from, with the line. Imports below TYPE_CHECKING do not count."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        names = []
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno} a relative import"
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "tenterhook" else [module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.split(".")[0] == "tenterhook" and "." in name:
                yield name.split(".")[1], node.lineno


FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_code_depends_one_way_only(path):
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    for room, line in imports(path):
        if room == own:
            continue
        assert level(room) <= level(own), f"{path.relative_to(SOURCE)}:{line}: {own} must not know {room}"
        # One function of _text makes names safe to print, and one class makes figures, in recipes too.
        public = own != "recipes" or room in {"_text", "_notebook_figure"}
        assert public, "recipes are built only through the public names"


@pytest.mark.parametrize("path", sorted((SOURCE / "doctor").glob("*.py")), ids=lambda path: path.name)
def test_the_doctor_works_where_the_rest_does_not(path):
    assert {room for room, _ in imports(path)} <= {"doctor", "pytorch", "_draw", "_version"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_rooms_of_one_level_form_no_circle(path):
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    beside = {room for room, _ in imports(path) if room != own and level(room) == level(own)}
    for room in beside:
        back = [each for each in FILES if each.relative_to(SOURCE).parts[0].removesuffix(".py") == room]
        assert not [each for each in back if own in {found for found, _ in imports(each)} and room != "_fit" != own]


@pytest.mark.parametrize(
    "path", [path for path in FILES if "(Session)" in path.read_text()], ids=lambda path: path.name
)
def test_every_kind_of_session_loads_the_support_for_compiled_models(path):
    assert "engine_api" in path.read_text() or "(Delivery, Session)" in path.read_text()


def test_every_room_has_a_place_in_the_line():
    rooms = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in FILES}
    known = set().union(*ROOMS) | set(BESIDE)
    assert rooms <= known


HEAVY = [
    "tenterhook.recipes.cam",
    "rich",
    "safetensors",
    "xxhash",
    "transformers",
    "sklearn",
    "pandas",
    "matplotlib",
    "click",
    "typer",
    "ray",
    "tensorboard",
]


def test_importing_loads_nothing_but_torch():
    code = (
        "import torch, sys; before = set(sys.modules); import tenterhook; "
        f"print([name for name in {HEAVY!r} if name in sys.modules and name not in before])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_package_is_typed():
    assert (SOURCE / "py.typed").exists()


def test_every_recipe_is_there_and_loaded_when_it_is_asked_for():
    code = (
        "import sys, tenterhook as th; "
        "print([name for name in sys.modules if name.startswith('tenterhook.recipes.')]); "
        "whole = ('circuit', 'patching'); "
        "print(all(callable(getattr(th.recipes, name)) or name in whole for name in th.recipes.__all__)); "
        "print(sorted(th.recipes.__all__) == list(th.recipes.__all__), set(th.recipes.__all__) <= set(dir(th.recipes)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split("\n")[:3] == ["[]", "True", "True True"]
    with pytest.raises(AttributeError, match="has no recipe 'gradcan'; it has "):
        th.recipes.gradcan  # noqa: B018
