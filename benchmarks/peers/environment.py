"""The environment of a peer, with its library and no other packages that could affect it."""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path

from benchmarks.report import ROOT

__all__ = ["ENVIRONMENTS", "environment"]

ENVIRONMENTS = ROOT / ".venv-peers"


def environment(name: str, packages: tuple[str, ...]) -> Path:
    """Return the Python of an environment with these packages. Create it again if they have changed."""
    folder = ENVIRONMENTS / name
    python, ready, wanted = folder / "bin" / "python", folder / ".ready", "\n".join(packages)
    if not ready.exists() or ready.read_text(encoding="utf-8") != wanted:
        print(f"  making {folder.relative_to(ROOT)} (a minute or two)", flush=True)
        venv.create(folder, clear=True, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        pinned = ["-c", str(ROOT / "constraints.txt")]
        subprocess.run([*pip, *pinned, *packages], check=True, capture_output=True, text=True)
        ready.write_text(wanted, encoding="utf-8")
    return python
