"""One sabotage in a process of its own: rename, import tenterhook, run the scenarios, and print the outcomes."""

import importlib
import json
import sys
import traceback
import warnings

import sabotage_renames

__all__ = ["LOUD", "RIGHT", "WRONG", "outcomes"]

RIGHT, LOUD, WRONG = "right", "loud", "wrong"


def outcomes(request):
    """Return {scenario: (outcome, what was seen)}."""
    if request["rename"]:
        sabotage_renames.apply(sabotage_renames.Rename(*request["rename"]))
    warnings.simplefilter("ignore")
    if request["patch"]:
        from sabotage_patches import PATCHES

        PATCHES[request["patch"]]()
    if request["gone"] and _is_there(request["gone"]):
        raise RuntimeError(f"{request['gone']} was not renamed")
    built = {name: _built(build) for name, build in _wanted(**request).items()}
    import tenterhook as th

    return {name: _outcome(th, *made) for name, made in built.items()}


def _is_there(path):
    parent, _, word = path.rpartition(".")
    try:
        owner = importlib.import_module(parent)
    except ImportError:  # It is a class.
        module, _, name = parent.rpartition(".")
        owner = getattr(importlib.import_module(module), name)
    return hasattr(owner, word)


def _wanted(*, slow, only, **_):
    import sabotage_more_scenarios  # noqa: F401
    import sabotage_slow_scenarios  # noqa: F401
    from sabotage_scenarios import SCENARIOS

    wanted = {name: build for name, (build, is_slow) in SCENARIOS.items() if slow or not is_slow}
    return {name: build for name, build in wanted.items() if not only or name in only}


def _built(build):
    try:
        return build(), None
    except Exception as error:  # noqa: BLE001  The sabotage has broken PyTorch itself, and shows nothing.
        return None, error


def _outcome(th, scenario, failed):
    if failed is not None:
        return WRONG, f"PyTorch fails without tenterhook: {failed!r}"
    before = _state(scenario.models)
    try:
        found = scenario.run(th)
    except th.UnsupportedTorch as error:
        outcome = LOUD, str(error)
    except BaseException as error:  # noqa: BLE001  Whatever it is, it is not the one that users are promised.
        return WRONG, "".join(traceback.format_exception(error)[-6:])
    else:
        difference = _difference(found, scenario.truth)
        outcome = (WRONG, difference) if difference else (RIGHT, "")
    left = sorted(before ^ _state(scenario.models))
    return (WRONG, f"the model was left changed: {left}") if left else outcome


def _state(models):
    """What a session may leave behind: attributes, and entries in tables."""
    return {
        (path, name, str(sorted(map(str, value))) if isinstance(value, dict) else "")
        for model in models
        for path, module in model.named_modules()
        for name, value in vars(module).items()
    }


def _difference(found, truth):
    """Say how a result differs from the truth; nothing if it does not."""
    import torch

    if isinstance(truth, dict) and isinstance(found, dict) and list(found) == list(truth):
        found, truth = list(found.values()), list(truth.values())
    if isinstance(truth, list) and isinstance(found, list) and len(found) == len(truth):
        inside = {place: _difference(*pair) for place, pair in enumerate(zip(found, truth, strict=True))}
        return "; ".join(f"[{place}] {text}" for place, text in inside.items() if text)
    if isinstance(truth, torch.Tensor) and isinstance(found, torch.Tensor) and found.shape == truth.shape:
        same = torch.allclose(found.detach(), truth.detach(), rtol=1e-9, atol=1e-12)
        return "" if same else f"off by {float((found - truth).abs().max()):.3g} of {float(truth.abs().max()):.3g}"
    if isinstance(truth, float) and isinstance(found, float):
        same = abs(found - truth) <= 1e-4 * max(1e-3, abs(truth))
    else:
        same = type(found) is type(truth) and found == truth
    return "" if same else f"{found!r} in place of {truth!r}"


if __name__ == "__main__":
    sys.stdout.write(f"\n{json.dumps(outcomes(json.loads(sys.argv[1])))}\n")
