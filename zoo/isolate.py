"""Checks in separate processes, forked from one that has imported everything, and ended after a time limit."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch

from zoo.case import NotRunnable
from zoo.check import check
from zoo.models import Source

__all__ = ["run_apart"]

FORK = multiprocessing.get_context("fork")
QUIET = -1


def run_apart(source: Source, name: str, seconds: float) -> dict[str, Any]:
    """Build and check one model. ``status`` is passed, reordered, failed or excluded, the last with a reason."""
    mine, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_child, args=(source, name, theirs), daemon=True)
    began = time.monotonic()
    process.start()
    theirs.close()
    built = False
    result: dict[str, Any] | None = None
    while result is None and mine.poll(max(0.0, began + seconds - time.monotonic())):
        try:
            got = mine.recv()
        except EOFError:
            break
        built, result = True, got if isinstance(got, dict) else None
    over = time.monotonic() - began >= seconds
    process.kill()
    process.join()
    if result is None:
        text = f"takes longer than {seconds:.0f} s" if over else f"the process ended with code {process.exitcode}"
        # Only plain PyTorch runs before the first message.
        result = {"status": "failed", "problems": [text]} if built and not over else _excluded(text)
    return result | {"seconds": round(time.monotonic() - began, 2)}


def _excluded(reason: str) -> dict[str, Any]:
    return {"status": "excluded", "reason": reason[:200]}


def _child(source: Source, name: str, pipe: Connection) -> None:
    gc.freeze()  # Objects from before the fork need not be searched for tensors.
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # Output of a library must not disturb the display.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        pipe.send(_result(source, name, pipe))
    except BaseException as error:  # noqa: BLE001 - the process ends here whatever it is
        pipe.send({"status": "failed", "problems": [_described(error)]})
    os._exit(0)


def _result(source: Source, name: str, pipe: Connection) -> dict[str, Any]:
    try:
        case = source.build(name)
        pipe.send("built")
        found = check(case)
    except NotRunnable as error:
        return _excluded(str(error))
    status = "failed" if found["problems"] else "reordered" if "order" in found else "passed"
    return {"status": status, **found}


def _described(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = " < ".join(f"{os.path.basename(f.filename)}:{f.lineno} {f.name}" for f in reversed(frames[-4:]))  # noqa: PTH119
    return f"{type(error).__name__}: {str(error)[:300]} ({where})"
