"""The MODEL argument: the forms it can have, and how each is loaded.

Only code that the user names runs: ``package.module:factory`` imports that module, ``file.py:name`` runs that file.
Weights are read as safetensors or with ``weights_only``, so that no weight file can run code.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from tenterhook.address.suggest import listed, nearest
from tenterhook.cli.errors import CommandError, Unreadable, missing_package, speaking
from tenterhook.cli.limits import check_archive, check_file

__all__ = ["FORMS", "load_model", "python_object", "settings", "tokenizer_of", "torch_file"]

FORMS = """MODEL is one of
  package.module:name     a model, or a class or function that makes one
  path/to/file.py:name    the same, in a file
  path/to/directory       a Hugging Face model on disk
  transformers:Name       a configuration (GPT2Config) or model class, with random weights
  timm:name               a timm architecture, with random weights"""

WORDS = ("tokenizer.*", "vocab*", "*.model", "*.vocab", "*.tiktoken", "tekken.json")
"""patterns of the vocabulary files of tokenizers"""


def load_model(text: str, given: Mapping[str, Any], weights: Path | None = None) -> nn.Module:
    """Load the model that ``text`` names, in evaluation mode."""
    head, _, name = text.partition(":")
    if head in ("timm", "transformers") and name:
        model = _timm(name, given) if head == "timm" else _transformers(name, given)
    elif Path(text).is_dir():
        model = _directory(Path(text), given)
    else:
        model = _python(text, given)
    if weights is not None:
        _fill(model, weights)
    return model.eval()


def settings(pairs: tuple[str, ...]) -> dict[str, Any]:
    """Parse ``--set n_layer=2``. A value that is not a Python literal is a string.

    >>> settings(("n_layer=2", "act=gelu", "shape=(1, 2)"))
    {'n_layer': 2, 'act': 'gelu', 'shape': (1, 2)}
    """
    made = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise CommandError(f"--set takes KEY=VALUE, for example --set n_layer=2; got {pair!r}")
        try:
            made[key] = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            made[key] = value
    return made


# -- Python -----------------------------------------------------------------------------------------------------------


def python_object(text: str, otherwise: Callable[[str], str]) -> Any:
    """Return the object that ``package.module:name`` or ``file.py:name`` names.

    ``otherwise`` returns the error message for a text that has neither form.
    """
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        raise CommandError(otherwise(text))
    module = _run_file(Path(where)) if where.endswith(".py") else _import(where)
    found: Any = module
    reached = where
    for number, part in enumerate(name.split(".")):
        if not hasattr(found, part):
            raise CommandError(_no_name(reached, part, found))
        found, reached = getattr(found, part), f"{reached}{'.' if number else ':'}{part}"
    return found


def _python(text: str, given: Mapping[str, Any]) -> nn.Module:
    found = python_object(text, _no_model)
    if isinstance(found, nn.Module):
        if given:
            raise CommandError(
                f"{text} is already a model, so --set has no effect. Name the class or function that makes it."
            )
        return found
    if not callable(found):
        raise CommandError(f"{text} is a {type(found).__name__}. Name a model, or a class or function that makes one.")
    return _made(text, found, given)


def _made(text: str, make: Callable[..., Any], given: Mapping[str, Any]) -> nn.Module:
    with speaking(f"{text} could not be created"):
        made = make(**given)
    if not isinstance(made, nn.Module):
        raise CommandError(f"{text} returned a {type(made).__name__}; a model is a torch.nn.Module.")
    return made


def _run_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise CommandError(f"there is no file {file}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise CommandError(f"{file} cannot be run as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # As an import does; dataclasses look up their module there.
    sys.path.insert(0, str(file.resolve().parent))  # As `python file.py` does.
    with speaking(f"{file} could not be run"):
        spec.loader.exec_module(module)
    return module


def _import(name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # As `python -m` does.
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise CommandError(f"there is no module {name!r} to import.\n{FORMS}")
    with speaking(f"{name} could not be imported"):
        return importlib.import_module(name)


def _no_model(text: str) -> str:
    path = Path(text)
    if path.suffix == ".py":
        return f"the name of the model in {text} is missing: {text}:name"
    if path.suffix in (".pt", ".pth", ".bin", ".safetensors"):
        return f"{text} contains only weights. Give the model, and --weights {text}"
    return f"{text!r} is not a model.\n{FORMS}"


def _no_name(where: str, part: str, owner: Any) -> str:
    names = [name for name in dir(owner) if not name.startswith("_") and name not in dir(nn.Module)]
    near = nearest(part, names)
    if near:
        return f"{where} has no {part!r}.\nDid you mean {listed(near)}?"
    if isinstance(owner, ModuleType):
        models = [name for name, found in vars(owner).items() if name in names and _could_be_a_model(found, owner)]
        return f"{where} has no {part!r}." + (f"\nIt has {listed(models)}." if models else "")
    inside = isinstance(owner, nn.Module) or (isinstance(owner, type) and issubclass(owner, nn.Module))
    fix = f"\nGive a part of a model as a separate selector: {where} {part}" if inside else ""
    return f"{where} has no {part!r}.{fix}"


def _could_be_a_model(found: Any, module: ModuleType) -> bool:
    if isinstance(found, nn.Module):
        return True
    own = getattr(found, "__module__", None) == module.__name__
    return own and (issubclass(found, nn.Module) if isinstance(found, type) else inspect.isfunction(found))


# -- libraries of models ----------------------------------------------------------------------------------------------


def _timm(name: str, given: Mapping[str, Any]) -> nn.Module:
    try:
        with speaking("timm could not be imported"):
            import timm
    except CommandError as trouble:
        if isinstance(trouble.__cause__, ModuleNotFoundError) and trouble.__cause__.name == "timm":
            raise CommandError("timm is not installed: pip install timm") from None
        raise
    known = timm.list_models()
    if name.partition(".")[0] not in known:
        raise CommandError(f"timm has no model {name!r}.\nDid you mean {listed(nearest(name, known) or known[:5])}?")
    return _made(f"timm:{name}", lambda **more: timm.create_model(name, pretrained=False, **more), given)


def _transformers(name: str, given: Mapping[str, Any]) -> nn.Module:
    found: Any = getattr(_hugging_face(), name, None)
    if found is None or not isinstance(found, type):
        names = [each for each in dir(_hugging_face()) if each.endswith("Config")]
        raise CommandError(f"transformers has no {name!r}.\nDid you mean {listed(nearest(name, names) or names[:5])}?")
    config = found if name.endswith("Config") else getattr(found, "config_class", None)
    if config is None:
        raise CommandError(f"transformers:{name} is neither a configuration nor a model class.")
    with speaking(f"{config.__name__} could not be created"):
        made = config(**given)
    if config is not found:
        return _made(f"transformers:{name}", lambda: found(made), {})
    return _made(f"transformers:{name}", lambda: _of_config(made), {})


def _of_config(config: Any) -> Any:
    """Return the model with the head most used with this configuration, or without a head if there is none."""
    library = _hugging_face()
    for kind in ("AutoModelForCausalLM", "AutoModelForImageClassification", "AutoModelForMaskedLM", "AutoModel"):
        auto = getattr(library, kind)
        if type(config) in auto._model_mapping:  # noqa: SLF001  # the only way to check without making the model
            return auto.from_config(config)
    return library.AutoModel.from_config(config)


def _directory(folder: Path, given: Mapping[str, Any]) -> nn.Module:
    if not (folder / "config.json").is_file():
        raise CommandError(f"{folder} has no config.json, so it is not a Hugging Face model.\n{FORMS}")
    library = _hugging_face()
    with speaking(f"{folder} could not be read"):
        config = library.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **given)
        names = [name for name in config.architectures or () if hasattr(library, name)]
        cls = getattr(library, names[0]) if names else library.AutoModel
        if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
            raise CommandError(
                f"{folder} has a config.json and no weights. For random weights: "
                f"transformers:{type(config).__name__}, with --set for what differs from its defaults."
            )
        model: nn.Module = cls.from_pretrained(folder, config=config, local_files_only=True, weights_only=True)
    return model


def tokenizer_of(folder: Path) -> Any:
    """Load the tokenizer in a directory."""
    with speaking(f"there is no tokenizer in {folder} that could be read"):
        made = _hugging_face().AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    # Without vocabulary files, transformers returns a tokenizer that has an empty vocabulary or only special tokens.
    if made.vocab_files_names and not any(found for kind in WORDS for found in folder.glob(kind)):
        raise CommandError(f"there is no tokenizer in {folder}; give --tokenizer DIR")
    return made


def _hugging_face() -> Any:
    try:
        import transformers
    except ImportError:
        raise missing_package("transformers", "hf") from None
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return transformers


# -- weights ----------------------------------------------------------------------------------------------------------


def torch_file(file: Path, what: str) -> Any:
    """Load a file that ``torch.save`` wrote, if it contains only tensors and plain values.

    Loading other objects would run code.
    """
    check_file(file, "Give a part of it.")
    check_archive(file)
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "Unsupported operand" in str(error):
            raise Unreadable(f"{file} {what}: torch.save did not write it, or it is damaged.") from error
        raise Unreadable(
            f"{file} {what}: it holds objects that would run code when they are loaded. Only tensors and plain values "
            "are loaded: save those, for example a state_dict()."
        ) from error


def _fill(model: nn.Module, file: Path) -> None:
    with speaking(f"{file} could not be read as weights", kind=Unreadable):
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Any = load_file(file)
        else:
            state = torch_file(file, "could not be read as weights")
    if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
        state = state["state_dict"]
    if not isinstance(state, Mapping):
        raise CommandError(f"{file} holds a {type(state).__name__}; weights are a dict of names to tensors.")
    with speaking(f"the weights in {file} do not fit the model", debug=False):
        model.load_state_dict(state)
