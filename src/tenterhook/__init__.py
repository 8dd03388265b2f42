"""tenterhook: inspect, record, edit and stop values inside a PyTorch model.

>>> import torch, tenterhook as th
>>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
>>> with th.record(model, "*", grad=True) as tape:
...     model(torch.ones(4, 2)).sum().backward()
>>> tape["1"].shape, tape.grad["1"].shape
(torch.Size([4, 3]), torch.Size([4, 3]))
"""

from typing import TYPE_CHECKING

from tenterhook import pytorch as pytorch  # It raises if torch is too old.
from tenterhook._lazy import load_on_use
from tenterhook._version import __version__
from tenterhook.errors import (
    AddressError,
    AmbiguousCall,
    BatchError,
    ClosedSession,
    CostError,
    DifferentHarvest,
    EditError,
    EditFileError,
    GradientError,
    HarvestError,
    HookError,
    ModelChanged,
    NeverReached,
    NoBackward,
    NoGradient,
    NonFinite,
    NoSource,
    NotRecorded,
    ReadonlyHook,
    RecipeError,
    ReplayError,
    SelectorError,
    SessionError,
    SpliceError,
    Stopped,
    StoreError,
    SweepError,
    SweepInterrupted,
    TapeError,
    TapeFileError,
    TenterhookError,
    TenterhookWarning,
    UnsupportedModel,
    UnsupportedTorch,
    ValueChanged,
)

if TYPE_CHECKING:
    from tenterhook import hooks, recipes
    from tenterhook.address import Point, Selection
    from tenterhook.address.meanings import register_meaning
    from tenterhook.audit.verb import Audit, audit
    from tenterhook.batch.result import BatchResult
    from tenterhook.batch.verb import batch, case
    from tenterhook.cost.verb import cost
    from tenterhook.doctor.verb import Diagnosis, doctor
    from tenterhook.edit.learn import Learned, learn
    from tenterhook.edit.ready import Add as add
    from tenterhook.edit.ready import Clamp as clamp
    from tenterhook.edit.ready import Lowrank as lowrank
    from tenterhook.edit.ready import Mask as mask
    from tenterhook.edit.ready import Mean as mean
    from tenterhook.edit.ready import Noise as noise
    from tenterhook.edit.ready import Project as project
    from tenterhook.edit.ready import Rotate as rotate
    from tenterhook.edit.ready import Scale as scale
    from tenterhook.edit.ready import Set as set
    from tenterhook.edit.ready import Zero as zero
    from tenterhook.edit.ready import at
    from tenterhook.edit.saved import load_edits, save_edits
    from tenterhook.edit.skip import Skip as skip
    from tenterhook.edit.verb import edit
    from tenterhook.features import Features, features
    from tenterhook.harvest.verb import harvest, open
    from tenterhook.record.points import points
    from tenterhook.record.tape import Tape, load
    from tenterhook.record.verb import record
    from tenterhook.replay.cases import grid
    from tenterhook.replay.sweep_result import Sweep
    from tenterhook.replay.verb import replay, run_from, sweep
    from tenterhook.report.verb import page
    from tenterhook.splice.dictionary import Dictionary
    from tenterhook.splice.dictionary_files import load_dictionary
    from tenterhook.splice.verb import splice
    from tenterhook.watch.departures import departures
    from tenterhook.watch.json_lines import JsonLines
    from tenterhook.watch.tensorboard import TensorBoard
    from tenterhook.watch.verb import blackbox, watch

__all__ = [
    "AddressError",
    "AmbiguousCall",
    "Audit",
    "BatchError",
    "BatchResult",
    "ClosedSession",
    "CostError",
    "Diagnosis",
    "Dictionary",
    "DifferentHarvest",
    "EditError",
    "EditFileError",
    "Features",
    "GradientError",
    "HarvestError",
    "HookError",
    "JsonLines",
    "Learned",
    "ModelChanged",
    "NeverReached",
    "NoBackward",
    "NoGradient",
    "NoSource",
    "NonFinite",
    "NotRecorded",
    "Point",
    "ReadonlyHook",
    "RecipeError",
    "ReplayError",
    "Selection",
    "SelectorError",
    "SessionError",
    "SpliceError",
    "Stopped",
    "StoreError",
    "Sweep",
    "SweepError",
    "SweepInterrupted",
    "Tape",
    "TapeError",
    "TapeFileError",
    "TensorBoard",
    "TenterhookError",
    "TenterhookWarning",
    "UnsupportedModel",
    "UnsupportedTorch",
    "ValueChanged",
    "__version__",
    "add",
    "at",
    "audit",
    "batch",
    "blackbox",
    "case",
    "clamp",
    "cost",
    "departures",
    "doctor",
    "edit",
    "features",
    "grid",
    "harvest",
    "hooks",
    "learn",
    "load",
    "load_dictionary",
    "load_edits",
    "lowrank",
    "mask",
    "mean",
    "noise",
    "open",
    "page",
    "points",
    "project",
    "recipes",
    "record",
    "register_meaning",
    "replay",
    "rotate",
    "run_from",
    "save_edits",
    "scale",
    "set",
    "skip",
    "splice",
    "sweep",
    "watch",
    "zero",
]

load_on_use(
    __name__,
    {
        "Audit": "tenterhook.audit.verb:Audit",
        "BatchResult": "tenterhook.batch.result:BatchResult",
        "Diagnosis": "tenterhook.doctor.verb:Diagnosis",
        "Dictionary": "tenterhook.splice.dictionary:Dictionary",
        "Features": "tenterhook.features:Features",
        "JsonLines": "tenterhook.watch.json_lines:JsonLines",
        "Learned": "tenterhook.edit.learn:Learned",
        "Point": "tenterhook.address:Point",
        "Selection": "tenterhook.address:Selection",
        "Sweep": "tenterhook.replay.sweep_result:Sweep",
        "Tape": "tenterhook.record.tape:Tape",
        "TensorBoard": "tenterhook.watch.tensorboard:TensorBoard",
        "add": "tenterhook.edit.ready:Add",
        "at": "tenterhook.edit.ready:at",
        "audit": "tenterhook.audit.verb:audit",
        "blackbox": "tenterhook.watch.verb:blackbox",
        "batch": "tenterhook.batch.verb:batch",
        "case": "tenterhook.batch.verb:case",
        "clamp": "tenterhook.edit.ready:Clamp",
        "cost": "tenterhook.cost.verb:cost",
        "departures": "tenterhook.watch.departures:departures",
        "doctor": "tenterhook.doctor.verb:doctor",
        "edit": "tenterhook.edit.verb:edit",
        "features": "tenterhook.features:features",
        "grid": "tenterhook.replay.cases:grid",
        "harvest": "tenterhook.harvest.verb:harvest",
        "hooks": "tenterhook.hooks",
        "learn": "tenterhook.edit.learn:learn",
        "load": "tenterhook.record.tape:load",
        "load_dictionary": "tenterhook.splice.dictionary_files:load_dictionary",
        "load_edits": "tenterhook.edit.saved:load_edits",
        "lowrank": "tenterhook.edit.ready:Lowrank",
        "mask": "tenterhook.edit.ready:Mask",
        "mean": "tenterhook.edit.ready:Mean",
        "noise": "tenterhook.edit.ready:Noise",
        "open": "tenterhook.harvest.verb:open",
        "page": "tenterhook.report.verb:page",
        "points": "tenterhook.record.points:points",
        "project": "tenterhook.edit.ready:Project",
        "recipes": "tenterhook.recipes",
        "register_meaning": "tenterhook.address.meanings:register_meaning",
        "record": "tenterhook.record.verb:record",
        "replay": "tenterhook.replay.verb:replay",
        "rotate": "tenterhook.edit.ready:Rotate",
        "run_from": "tenterhook.replay.verb:run_from",
        "save_edits": "tenterhook.edit.saved:save_edits",
        "scale": "tenterhook.edit.ready:Scale",
        "set": "tenterhook.edit.ready:Set",
        "skip": "tenterhook.edit.skip:Skip",
        "splice": "tenterhook.splice.verb:splice",
        "sweep": "tenterhook.replay.verb:sweep",
        "watch": "tenterhook.watch.verb:watch",
        "zero": "tenterhook.edit.ready:Zero",
    },
)
