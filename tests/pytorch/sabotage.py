"""Sabotage: with one private name of PyTorch renamed, what users do with tenterhook is right or an UnsupportedTorch.

python tests/pytorch/sabotage.py --all              every name, every scenario; prints the counts
python tests/pytorch/sabotage.py --list             the names
python tests/pytorch/sabotage.py NAME ...           these names only, with each outcome
"""

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from sabotage_process import LOUD, RIGHT, WRONG
from sabotage_renames import Rename
from sabotage_targets import Target

__all__ = ["run", "targets", "total", "wrong"]

LIMIT = 600  # seconds for one name
HERE = Path(__file__).parent


def targets():
    """List what is sabotaged, in a process of its own, because that loads the compiler."""
    listed = json.loads(_python("sabotage_targets.py").stdout)
    return {label: Target(label, _read(rename), *rest) for label, rename, *rest in listed}


def _read(rename):
    return rename and Rename(*(tuple(part) if isinstance(part, list) else part for part in rename))


def run(target, *, slow, only=()):
    """Run the scenarios under one sabotage, in a process of its own: {scenario: (outcome, what was seen)}."""
    request = json.dumps({**target._asdict(), "slow": slow and target.slow, "only": only})
    ran = _python("sabotage_process.py", request)
    last = ran.stdout.strip().rpartition("\n")[2]
    if ran.returncode or not last.startswith("{"):
        return {"the process": [WRONG, f"exit code {ran.returncode}: {ran.stderr[-3000:]}"]}
    return json.loads(last)


def _python(script, *arguments):
    path = os.pathsep.join(filter(None, [str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, HERE / script, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)


def total(results):
    """Count names, uses and outcomes."""
    outcomes = [outcome for found in results.values() for outcome, _ in found.values()]
    counts = {kind: outcomes.count(kind) for kind in (RIGHT, LOUD, WRONG)}
    return {"names": len(results), "uses": len(outcomes), **counts}


def wrong(found):
    """Return what went wrong in the scenarios of one name."""
    return {name: seen for name, (outcome, seen) in found.items() if outcome == WRONG}


def _main():
    given = _arguments()
    known = targets()
    if given.list:
        print("\n".join(known))
        return 0
    chosen = [known[label] for label in given.names] or list(known.values())
    results = {}
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        running = pool.map(lambda target: run(target, slow=not given.fast, only=given.only), chosen)
        for target, found in zip(chosen, running, strict=True):
            results[target.label] = found
            counts = total({target.label: found})
            print(*(f"{counts[kind]:3} {kind}" for kind in (RIGHT, LOUD, WRONG)), target.label, sep="  ", flush=True)
            for name, (outcome, seen) in found.items():
                if outcome == WRONG or given.names:
                    print(f"    {outcome}: {name}\n{seen}".rstrip(), flush=True)
    print(json.dumps(total(results)))
    return 1 if total(results)[WRONG] else 0


def _arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--all", action="store_true", help="every name, which is also what no name stands for")
    parser.add_argument("--list", action="store_true", help="print the names")
    parser.add_argument("--fast", action="store_true", help="without compiled models, torch.export and FSDP")
    parser.add_argument("--only", action="append", default=[], metavar="SCENARIO", help="this scenario only")
    parser.add_argument("--jobs", type=int, default=1, help="the number of processes at once")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(_main())
