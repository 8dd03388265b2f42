"""Training of a dictionary on a store of harvested rows."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook._text import counted
from tenterhook.recipes._dictionary_loss import aux_loss, measure
from tenterhook.recipes._figures import Pictured, new_figure
from tenterhook.recipes._inputs import arguments, restful

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["TrainedDictionary", "dictionary"]

Kind = Literal["topk", "batchtopk", "jumprelu", "relu"]
KINDS = ("topk", "batchtopk", "jumprelu", "relu")
LOOK = 50  # Steps between two looks at the device: the history, and which latents are dead.
STATE, WEIGHTS = "training.json", "training.safetensors"
PARTS = {"options": dict, "step": int, "loader": dict, "history": list, "dead": int}
DAMAGED = "{folder} holds a damaged training: {why}. Remove the folder to begin again."
NOT_FINITE = (
    "row {row:,} of {point!r} has NaN or infinity, from which a dictionary cannot learn. Harvest again without it: "
    "th.watch(model) finds the place in the model where it begins."
)
ALL_ZERO = "the rows of {point!r} in the first batch are all zero, so they have no scale"
DIVERGED = "the loss became NaN or infinite before step {step:,}, with finite rows: try a smaller lr= than {lr:.3g}"
OTHER_ROWS = "{folder} holds a training on other rows than those of this store: give another folder to to="
OTHER = "{folder} holds the training of another dictionary, and only the same call can continue it: {what}"


@dataclass(frozen=True)
class TrainedDictionary(Pictured):
    """The result of :func:`dictionary`.

    ``dictionary``: the :class:`tenterhook.Dictionary`. ``history``: for every 50th step, the step, the loss, the
    explained variance, the number of active latents in each row (``l0``), and the share of dead latents.
    """

    dictionary: th.Dictionary
    point: str
    history: tuple[Mapping[str, float], ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def explained(self) -> float:
        """The share of the variance of the last batches that the dictionary explains."""
        return self.history[-1]["explained"]

    @property
    def l0(self) -> float:
        """The mean number of active latents in each row of the last batches."""
        return self.history[-1]["l0"]

    @property
    def dead(self) -> float:
        """The share of latents that were not active for a while."""
        return self.history[-1]["dead"]

    def recovered(self, model: nn.Module, inputs: Any, loss: Any) -> float:
        """Return the share of the loss that the dictionary recovers: 1 is that of the model, 0 that without the value.

        The value is that of the point, or of ``target=`` for a transcoder.

        Args:
            model: the model from which the rows come.
            inputs: an input: a tensor, a tuple of arguments or a dict of keyword arguments.
            loss: a function from the model's output to one number.

        Raises:
            RecipeError: the loss is the same without the value, or the model is in training mode with dropout.
        """
        restful(model)
        args, kwargs = arguments(inputs)
        target = self.options.get("target") or self.point
        with torch.no_grad():
            plain = float(loss(model(*args, **kwargs)))
            with th.splice(model, {(self.point, target): self.dictionary}):
                spliced = float(loss(model(*args, **kwargs)))
            with th.edit(model, {target: th.zero()}):
                without = float(loss(model(*args, **kwargs)))
        if without == plain:
            raise th.RecipeError(f"the loss is {plain:.6g} with and without {target!r}, so there is none to recover")
        return (without - spliced) / (without - plain)

    def show(self, *, title: str = "") -> Figure:
        """Return a matplotlib figure of the history."""
        figure = new_figure(7.0, 2.4)
        axes: Any = figure.subplots(1, 3)
        steps = [entry["step"] for entry in self.history]
        for place, name in zip(axes, ("explained", "l0", "dead"), strict=True):
            place.plot(steps, [entry[name] for entry in self.history])
            place.set_title(name, fontsize=9)
            place.tick_params(labelsize=7)
        figure.suptitle(title or repr(self.dictionary), fontsize=9)
        return figure

    def __repr__(self) -> str:
        done = counted(int(self.history[-1]["step"]), "step")
        found = f"explained variance {self.explained:.3f}, L0 {self.l0:.1f}, dead {self.dead:.1%}"
        return f"{self.dictionary!r} at {self.point!r}, {done}: {found}"


def dictionary(  # noqa: PLR0913
    store: Any,
    point: str,
    *,
    width: int,
    kind: Kind = "topk",
    k: int = 32,
    steps: int | None = None,
    batch_size: int = 4096,
    lr: float | None = None,
    sparsity: float = 0.02,
    target: str | None = None,
    to: str | os.PathLike[str] | None = None,
    save_every: int = 1000,
    device: torch.device | str | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> TrainedDictionary:
    """Train a dictionary on the rows of a store: a sparse autoencoder, or a transcoder with ``target=``.

    >>> import tempfile, torch, tenterhook as th
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()).eval()
    >>> folder = tempfile.mkdtemp()
    >>> _ = th.harvest(model, torch.randn(2000, 4), "1", to=folder, batch_size=500, progress=False)
    >>> found = th.recipes.dictionary(th.open(folder), "1", width=32, k=4, steps=300, batch_size=256, progress=False)
    >>> found.dictionary, found.explained > 0.7
    (Dictionary(8, 32, kind='topk', k=4), True)

    Rows are shuffled and scaled; the scale is part of the weights afterwards. Directions have length 1. Latents that
    are not active for a while also learn what the others leave over.

    Args:
        store: a store, from :func:`tenterhook.open`.
        point: the address whose rows are encoded.
        width: the number of latents.
        kind: ``"topk"``, ``"batchtopk"``, ``"jumprelu"`` or ``"relu"``; see :class:`tenterhook.Dictionary`.
        k: the number of active latents in each row. For ``"jumprelu"`` it is what the mean is drawn to; ``"relu"`` does
            not use it.
        steps: the number of batches. By default one pass over the store.
        batch_size: the number of rows in a batch.
        lr: the learning rate of Adam, which falls to zero in the last fifth. The default depends on the width.
        sparsity: for ``"relu"``, the weight of the latents' size in the loss.
        target: the address whose rows are reconstructed, for a transcoder.
        to: a folder for the state of the training, every ``save_every`` steps and at the end. The same call continues
            from it, with the same result as without the stop. It also gets the dictionary, in the layout of SAELens.
        save_every: the number of steps between two states in ``to``.
        device: the device to train on. The default is a GPU, if there is one.
        seed: the seed of the start and of the order of the rows.
        progress: whether to print a line now and then. By default, if standard error is a terminal.

    Returns:
        A :class:`TrainedDictionary`.

    Raises:
        RecipeError: an argument is wrong, or ``to`` holds another training.
        NotRecorded: the point is not in the store.
    """
    options: dict[str, Any] = {
        "point": point, "width": width, "kind": kind, "k": k, "steps": steps, "batch_size": batch_size, "lr": lr,
        "sparsity": sparsity, "target": target, "seed": seed, "rows": len(store),
    }  # fmt: skip
    _check(store, options, save_every)
    training = _Training(store, options, torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")))
    folder = None if to is None else Path(to)
    if folder is not None:
        _make(folder)
        training.load(folder)
    for _ in training.run(progress=progress):
        if folder is not None and training.step % save_every == 0:
            training.save(folder)
    made = training.finished()
    if folder is not None:
        training.save(folder)
        made.save(folder, notes={"hook_name": point, "hook_name_out": target or point})
    return TrainedDictionary(made, point, tuple(training.history), options)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise th.RecipeError(f"to={os.fspath(folder)!r} is no folder: {error}") from error


def _check(store: Any, options: Mapping[str, Any], save_every: int) -> None:
    if not hasattr(store, "loader"):
        raise th.RecipeError(f"the store is what th.open(folder) returns; got a {type(store).__name__}")
    if options["kind"] not in KINDS:
        raise th.RecipeError(f"kind= is one of {', '.join(map(repr, KINDS))}; got {options['kind']!r:.40}")
    counts = {**options, "save_every": save_every}
    for name in ("width", "batch_size", "k", "steps", "save_every"):
        if (name, counts[name]) != ("steps", None) and (type(counts[name]) is not int or counts[name] < 1):
            raise th.RecipeError(f"{name}= is a positive int; got {counts[name]!r:.40}")
    if type(options["seed"]) is not int or not 0 <= options["seed"] < 2**63:
        raise th.RecipeError(f"seed= is an int from 0; got {options['seed']!r:.40}")
    for name in ("lr", "sparsity"):
        if (name, options[name]) != ("lr", None) and not _is_number(options[name]):
            raise th.RecipeError(f"{name}= is a finite number from 0; got {options[name]!r:.40}")
    if options["kind"] != "relu" and options["k"] > options["width"]:
        raise th.RecipeError(f"k={options['k']} is more than the width, {options['width']}")
    _check_rows(store, [options["point"], options["target"]])


def _check_rows(store: Any, points: list[str | None]) -> None:
    if not len(store):
        raise th.RecipeError("the store has no rows yet")
    for point in filter(None, points):
        shape = list(store[point].shape)
        if len(shape) != 2 or not store[point].dtype.is_floating_point:  # noqa: PLR2004
            text = f"the rows of {point!r} are {shape[1:]} of {store[point].dtype}; floating-point vectors are needed"
            raise th.RecipeError(text)


def _first_not_finite(column: Any) -> int | None:
    """Return the first row of a column of a store that has NaN or infinity, or None."""
    for start in range(0, len(column), 4096):
        bad = ~column[start : start + 4096].isfinite().all(1)
        if bad.any():
            return start + int(bad.nonzero()[0, 0])
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the state in a folder and its tensors. Raise ``RecipeError`` if the files are damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        weights = load_file(folder / state["weights"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError, SafetensorError) as error:
        raise th.RecipeError(DAMAGED.format(folder=folder, why=f"{type(error).__name__}: {error}")) from error
    wrong = [name for name, kind in PARTS.items() if not isinstance(state.get(name), kind)]
    if wrong:
        raise th.RecipeError(DAMAGED.format(folder=folder, why=f"{STATE} has no valid {wrong[0]!r}"))
    return state, weights


class _Training:
    """The state of a training: weights, optimizer, the position in the data, and the history."""

    def __init__(self, store: Any, options: dict[str, Any], device: torch.device) -> None:
        self._store, self.options, self.device = store, options, device
        points = [options["point"], *([options["target"]] if options["target"] else [])]
        size = min(options["batch_size"], len(store))
        self.loader = store.loader(*points, batch_size=size, seed=options["seed"], drop_last=True)
        self.steps: int = options["steps"] or len(self.loader)
        self.step = 0
        self.history: list[dict[str, float]] = []
        self._window = max(LOOK, self.steps // 20)
        self._start(next(self._batches()))
        self.loader = store.loader(*points, batch_size=size, seed=options["seed"], drop_last=True)

    def _start(self, first: tuple[Tensor, Tensor]) -> None:
        """Make the dictionary and the optimizer. The scale and the center are those of the first batch."""
        value, target = first
        options, kind = self.options, self.options["kind"]
        # In double precision, because squares overflow; on the CPU, because some devices have none.
        scales = [each.cpu().double().square().mean().rsqrt() for each in first]
        self.scales = torch.stack(scales).to(self.device, torch.float32)
        self._wrong = ~self.scales.isfinite().all()  # Whether something was NaN or infinite so far.
        self._stop_if_not_finite()
        crosses = options["target"] is not None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options["seed"])
            made = th.Dictionary(
                value.shape[1], options["width"], kind=kind, k=None if kind in ("relu", "jumprelu") else options["k"],
                out=target.shape[1], center=not crosses,
            )  # fmt: skip
        made = made.to(self.device).train()
        with torch.no_grad():
            made.b_dec.copy_(self._scaled(target, 1).mean(0))
            if kind == "jumprelu":
                made.k = options["k"]
                made.threshold.fill_(0.1)
        self.made = made
        rate = options["lr"] if options["lr"] is not None else 2e-3 / math.sqrt(max(options["width"], 2**8) / 2**8)
        self.optimizer = torch.optim.Adam(made.parameters(), lr=rate, betas=(0.9, 0.999))
        self._rate = rate
        self._since = torch.zeros(options["width"], dtype=torch.long, device=self.device)
        self._dead = 0  # The number of dead latents at the last look.

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            for batch in self.loader:
                parts = list(batch.values()) if isinstance(batch, Mapping) else [batch, batch]
                moved = [self._moved(part) for part in (parts[:1] if parts[0] is parts[1] else parts)]
                yield moved[0], moved[-1]

    def _moved(self, rows: Tensor) -> Tensor:
        if self.device.type != "cuda" or rows.is_cuda:
            return rows.to(self.device, torch.float32)
        # The copy does not wait for the work before it, and the next batch is read meanwhile.
        return rows.pin_memory().to(self.device, non_blocking=True).float()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def run(self, *, progress: bool | None) -> Iterator[None]:
        """Train to the end. Yield after each step."""
        if self.step >= self.steps:
            return
        shown = sys.stderr.isatty() if progress is None else progress
        for value, target in self._batches():
            self._one(self._scaled(value, 0), self._scaled(target, 1))
            self.step += 1
            if shown and (self.step % LOOK == 0 or self.step == self.steps):
                self._tell()
            yield
            if self.step >= self.steps:
                break

        self._stop_if_not_finite()

    def _scaled(self, rows: Tensor, which: int) -> Tensor:
        return rows * self.scales[which]

    def _stop_if_not_finite(self) -> None:
        """Raise ``RecipeError`` if a loss was NaN or infinite, or if the first batch has no scale."""
        if not bool(self._wrong):
            return
        points = [each for each in (self.options["point"], self.options["target"]) if each is not None]
        for point in points:
            row = _first_not_finite(self._store[point])
            if row is not None:
                raise th.RecipeError(NOT_FINITE.format(row=row, point=point))
        if self.step:
            raise th.RecipeError(DIVERGED.format(step=self.step, lr=self._rate))
        raise th.RecipeError(ALL_ZERO.format(point=points[int(self.scales[0].isfinite()) and -1]))

    def _tell(self) -> None:
        now = self.history[-1]
        text = f"step {self.step:,} of {self.steps:,}: explained {now['explained']:.3f}, L0 {now['l0']:.1f}"
        print(f"{text}, dead {now['dead']:.1%}", file=sys.stderr)  # noqa: T201

    def _one(self, value: Tensor, target: Tensor) -> None:
        made, done = self.made, self.step / self.steps
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate * min(1.0, (self.step + 1) / 20, 5 * (1 - done))
        found = measure(made, value, target, self.options["sparsity"], min(1.0, 5 * done))
        loss = found.loss
        self._wrong = self._wrong | ~loss.isfinite()
        if self._dead:
            loss = loss + aux_loss(made, value, found.error, self._since > self._window, self._dead)
        self.optimizer.zero_grad()
        loss.backward()
        with torch.no_grad():
            self._along_the_sphere()
            self.optimizer.step()
            made.W_dec.div_(made.W_dec.norm(dim=1, keepdim=True).clamp_min(1e-8))
            if made.kind == "jumprelu":
                made.threshold.clamp_(min=0)
            active = found.latents > 0
            self._since.add_(1).masked_fill_(active.any(0), 0)
            if made.kind == "batchtopk":
                least = torch.where(active, found.latents, torch.inf).amin().nan_to_num(posinf=0.0)
                made.threshold.lerp_(least.to(made.threshold.dtype), 0.05 if self.step else 1.0)
            if (self.step + 1) % LOOK == 0 or self.step + 1 == self.steps:
                self._look(found.loss, found.error, target, active)

    def _along_the_sphere(self) -> None:
        """Remove the part of the gradient that would change the length of a direction."""
        rows, gradient = self.made.W_dec, self.made.W_dec.grad
        if gradient is not None:
            gradient.sub_((gradient * rows).sum(1, keepdim=True) * rows)

    def _look(self, loss: Tensor, error: Tensor, target: Tensor, active: Tensor) -> None:
        """Add an entry to the history. Only here a step waits for the device."""
        spread = (target - target.mean(0)).square().sum()
        dead = self._since > self._window
        self._stop_if_not_finite()
        numbers = [loss, 1 - error.square().sum() / spread, active.sum(1).float().mean(), dead.float().mean()]
        names = ("loss", "explained", "l0", "dead")
        self.history.append(
            {"step": self.step + 1} | dict(zip(names, torch.stack(numbers).tolist(), strict=True))
        )  # fmt: skip
        self._dead = round(self.history[-1]["dead"] * len(dead))

    def finished(self) -> th.Dictionary:
        """Return the dictionary for rows as they are, without the scale."""
        made, (before, after) = self.made, self.scales
        weights = {name: tensor.detach().clone() for name, tensor in made.state_dict().items()}
        weights["W_enc"] *= before
        weights["W_dec"] /= after
        weights["b_dec"] /= after
        norms = weights["W_dec"].norm(dim=1)  # Directions have length 1, and the latents the size of the values.
        weights["W_dec"] /= norms[:, None]
        weights["W_enc"] *= norms
        weights["b_enc"] *= norms
        if "threshold" in weights:
            weights["threshold"] *= norms if made.kind == "jumprelu" else norms.mean()
        k = None if made.kind in ("relu", "jumprelu") else made.k
        with torch.device("meta"):  # Random numbers for weights that are replaced would be drawn from the generator.
            final = th.Dictionary(made.size, made.width, kind=made.kind, k=k, out=made.out, center=made.center)
        final.load_state_dict(weights, assign=True)
        return final.requires_grad_(requires_grad=False).eval()

    # -- files ---------------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write the state. The JSON file is written last: it names the step of the weights."""
        from safetensors.torch import save_file

        self._stop_if_not_finite()
        name = f"{self.step}-{WEIGHTS}"
        part = folder / f".{name}.part"
        save_file({key: tensor.detach().cpu().contiguous() for key, tensor in self._tensors().items()}, part)
        part.replace(folder / name)
        state = {
            "options": self.options, "step": self.step, "weights": name, "loader": self.loader.state_dict(),
            "history": self.history, "dead": self._dead,
        }  # fmt: skip
        part = folder / f".{STATE}.part"
        part.write_text(json.dumps(state), encoding="utf-8")
        part.replace(folder / STATE)
        for old in folder.glob(f"*-{WEIGHTS}"):
            if old.name != name:
                old.unlink()

    def load(self, folder: Path) -> None:
        """Continue from the state in a folder, if there is one. Raise ``RecipeError`` if it is of another training."""
        if not (folder / STATE).exists():
            return
        state, weights = _read(folder)
        theirs = state["options"]
        other = [f"{name}={theirs.get(name)!r}" for name, own in self.options.items() if theirs.get(name) != own]
        if other:
            raise th.RecipeError(OTHER.format(folder=folder, what=f"it has {', '.join(other)}"))
        fits = {name: each.shape for name, each in weights.items()} == self._shapes()
        if not fits or not 0 < state["step"] <= self.steps:
            raise th.RecipeError(DAMAGED.format(folder=folder, why="its parts do not fit each other"))
        if not torch.allclose(weights["scales"], self.scales.cpu(), rtol=1e-6, atol=0):
            raise th.RecipeError(OTHER_ROWS.format(folder=folder))
        self._fill(weights)
        self.step, self.history, self._dead = state["step"], state["history"], state["dead"]
        if self.step < self.steps:
            self.loader.load_state_dict(state["loader"])

    def _shapes(self) -> dict[str, torch.Size]:
        """Return the names and shapes of the tensors of a state after the first step."""
        found = {name: tensor.shape for name, tensor in self._tensors().items()}
        for place, tensor in enumerate(self.made.parameters()):
            shapes = {"step": torch.Size(), "exp_avg": tensor.shape, "exp_avg_sq": tensor.shape}
            found |= {f"adam.{place}.{name}": shape for name, shape in shapes.items()}
        return found

    def _tensors(self) -> dict[str, Tensor]:
        found = {f"made.{name}": tensor for name, tensor in self.made.state_dict().items()}
        found |= {"since": self._since, "scales": self.scales}
        for place, kept in self.optimizer.state_dict()["state"].items():
            found |= {f"adam.{place}.{name}": tensor for name, tensor in kept.items()}
        return found

    def _fill(self, tensors: dict[str, Tensor]) -> None:
        made = {name.removeprefix("made."): each for name, each in tensors.items() if name.startswith("made.")}
        self.made.load_state_dict(made)
        self._since, self.scales = tensors["since"].to(self.device), tensors["scales"].to(self.device)
        kept: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("adam."):
                _, place, key = name.split(".")
                kept.setdefault(int(place), {})[key] = tensor
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": kept, "param_groups": groups})
