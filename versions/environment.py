"""The virtual environment of a pair: its Python, its torch, and everything else as `constraints.txt` pins it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from versions.pairs import Pair, VersionsError
from versions.process import ROOT, run

__all__ = ["RELEASED", "constraints", "find_python", "installed_torch", "make", "outside", "variables"]

RELEASED = ("setuptools", "torch", "triton")
"""Packages whose pin is removed: torch requires its own triton, and up to 2.12 it refuses newer setuptools."""

OURS = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTEST_ADDOPTS", "PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")
"""Variables of the shell or of `make` that would change the environment or the tests in it."""


def make(pair: Pair, python: str, folder: Path) -> Path:
    """Make the environment of a pair in a folder, and return its Python."""
    environment = folder / "environment"
    pinned = folder / "constraints.txt"
    pinned.write_text(constraints((ROOT / "constraints.txt").read_text(encoding="utf-8"), pair.torch), encoding="utf-8")
    inside = environment / "bin" / "python"
    plain = variables(environment)
    if run([python, "-m", "venv", environment], plain):
        raise VersionsError(f"{pair}: `{python} -m venv` failed; its message is above.")
    # As an environment variable, unlike -c, the constraints also apply to the packages that build tenterhook.
    pinning = plain | {"PIP_CONSTRAINT": str(pinned), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if run([inside, "-m", "pip", "install", "-qq", "-e", ".[dev-all,bench]"], pinning):
        raise VersionsError(
            f"{pair}: pip could not install the packages; its message is above. If it is a pin in constraints.txt that "
            f"this torch or Python refuses, add the package to RELEASED in {Path(__file__).relative_to(ROOT)}."
        )
    found = installed_torch(inside)
    if found.partition("+")[0] != pair.torch:
        raise VersionsError(f"{pair}: pip installed torch {found}. Is there a build of {pair.torch} for this Python?")
    return inside


def constraints(text: str, torch: str) -> str:
    """Return the constraints with another torch, and without the pins of packages that torch determines."""
    kept = [line for line in text.splitlines() if line.partition("==")[0].strip().lower() not in RELEASED]
    return "\n".join([*kept, f"torch=={torch}", ""])


def installed_torch(python: Path) -> str:
    """Return the version of torch in an environment, with its build: ``2.13.0+cpu``."""
    code = "import importlib.metadata; print(importlib.metadata.version('torch'))"
    return subprocess.run(
        [python, "-c", code], check=True, capture_output=True, text=True, env=variables(python.parents[1])
    ).stdout.strip()


def variables(environment: Path) -> dict[str, str]:
    """Return the variables for commands inside an environment, without references to another environment."""
    kept = {name: value for name, value in os.environ.items() if name not in OURS}
    entries = [entry for entry in kept.get("PATH", "").split(os.pathsep) if not _in_checkout(Path(entry))]
    return kept | {"PATH": os.pathsep.join([str(environment / "bin"), *entries]), "PYTHONNOUSERSITE": "1"}


def outside(base: Path | None) -> Path | None:
    """Return the folder for environments. It must not be inside the checkout, whose tools would read their files."""
    if _in_checkout(Path(tempfile.gettempdir()) if base is None else base):
        raise VersionsError(
            f"{base or tempfile.gettempdir()} is inside the checkout. Set VERSIONS_DIR to a folder outside {ROOT}."
        )
    return base


def _in_checkout(path: Path) -> bool:
    return path.resolve().is_relative_to(ROOT)


def find_python(wanted: str) -> str:
    """Return the path of a Python of this release: from a variable such as PYTHON_3_13, from PATH, or from pyenv."""
    variable = f"PYTHON_{wanted.replace('.', '_')}"
    named = os.environ.get(variable)
    candidates = [named] if named else [*_on_path(wanted), *_of_pyenv(wanted)]
    for candidate in candidates:
        if _is_python(candidate, wanted):
            return candidate
    tried = f" These are not usable: {', '.join(candidates)}." if candidates else ""
    raise VersionsError(
        f"Python {wanted} with venv and pip was not found.{tried} Install it (`pyenv install {wanted}`), or set "
        f"{variable} to its path."
    )


def _on_path(wanted: str) -> list[str]:
    found = shutil.which(f"python{wanted}")
    return [found] if found else []


def _of_pyenv(wanted: str) -> list[str]:
    """Return the Pythons of this release that pyenv installed, newest first."""
    folder = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = [path for path in folder.glob(f"{wanted}.*/bin/python") if re.fullmatch(r"[\d.]+", path.parts[-3])]
    return [str(path) for path in sorted(found, key=lambda path: int(path.parts[-3].split(".")[2]), reverse=True)]


def _is_python(candidate: str, wanted: str) -> bool:
    """Return whether this Python runs and has that release. A shim of pyenv may be on PATH and not run."""
    code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    try:
        found = subprocess.run([candidate, "-c", code], check=False, capture_output=True, text=True)
    except OSError:
        return False
    return found.returncode == 0 and found.stdout.strip() == wanted
