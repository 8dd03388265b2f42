"""``th.doctor``: its findings, its text, and the private data that it leaves out."""

import io
import json
import os
import platform
import stat
import subprocess
import sys
from dataclasses import replace
from importlib import metadata

import numpy as np
import pytest
import torch

import tenterhook as th
from tenterhook.doctor.environment import environment
from tenterhook.doctor.machine import torch_build
from tenterhook.doctor.packages import packages
from tenterhook.doctor.redact import HIDDEN, redact, redact_value
from tenterhook.pytorch.support import FEATURES, Status


@pytest.fixture(scope="module")
def found():
    return th.doctor()


FRESH = """
import json, sys, torch
torch.__version__ = "2.99.0"
import tenterhook as th
before = set(sys.modules)
diagnosis = th.doctor()
loaded = sorted({name.partition(".")[0] for name in set(sys.modules) - before})
print(json.dumps({"tested": diagnosis.tested, "text": str(diagnosis), "dict": diagnosis.to_dict(), "loaded": loaded}))
"""


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """The diagnosis of a new process with a future release of torch, run by a user named ada."""
    home = tmp_path_factory.mktemp("home") / "ada"
    home.mkdir()
    variables = {"HOME": str(home), "USER": "ada", "LOGNAME": "ada", "TORCH_HOME": str(home / "torch")}
    kept = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    return json.loads(subprocess.check_output([sys.executable, "-c", FRESH], text=True, env=kept | variables))


def section(text, title):
    """Return the lines below a title, up to the next empty line."""
    lines = text.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(title))
    return lines[start : lines.index("", start) if "" in lines[start:] else None]


# -- findings ----------------------------------------------------------------------------------------------------------


def test_the_versions_are_those_of_this_process(found):
    assert found.tenterhook == th.__version__
    assert found.python.version == platform.python_version()
    assert (found.torch.version, found.torch.cuda) == (torch.__version__, torch.version.cuda)


def test_every_feature_is_there_with_its_status(found):
    assert {each.name for each in found.features} == set(FEATURES)
    assert {each.status for each in found.features} <= set(Status)
    assert found.unavailable == ()


def test_an_untested_release_is_marked_as_one(fresh):
    assert fresh["tested"] is False
    line = next(line for line in fresh["text"].splitlines() if line.startswith("torch "))
    assert line.split(maxsplit=1)[1].startswith("2.99.0 (not tested with tenterhook: newer than torch 2.")


def test_a_feature_that_does_not_work_is_named_with_the_reason(monkeypatch):
    monkeypatch.setattr(FEATURES["gradients"], "status", Status.UNAVAILABLE)
    monkeypatch.setattr(FEATURES["gradients"], "why", "ProbeFailed: a gradient is missing")
    found = th.doctor()
    assert [each.name for each in found.unavailable] == ["gradients"]
    lines = section(str(found), "features: ")
    assert "1 unavailable" in lines[0]
    row = next(line for line in lines if line.startswith("gradients "))
    assert row.split(maxsplit=2)[1] == "unavailable"
    assert row.endswith("ProbeFailed: a gradient is missing")
    assert lines[-1] == "unavailable: a session that needs it raises UnsupportedTorch when it starts."


def test_a_fallback_is_no_failure(monkeypatch):
    monkeypatch.setattr(FEATURES["kernels over many tensors"], "status", Status.FALLBACK)
    monkeypatch.setattr(FEATURES["kernels over many tensors"], "why", "one by one: norms")
    found = th.doctor()
    assert found.unavailable == ()
    assert "fallback: a slower way is used, with the same results." in str(found)


def test_a_replaced_function_is_named_with_its_library(monkeypatch):
    def replacement(*args, **kwargs):
        """Replace the real function."""

    monkeypatch.setattr(torch.Tensor, "backward", replacement)
    lines = section(str(th.doctor()), "functions of PyTorch that were replaced")
    assert lines[2].split()[0] == "torch.Tensor.backward"
    assert lines[2].endswith(f"{__name__}.{replacement.__code__.co_qualname}")


# -- packages ----------------------------------------------------------------------------------------------------------

METADATA = """Metadata-Version: 2.4
Name: tenterhook
Version: 9.9
Requires-Dist: torch>=2.10
Requires-Dist: numpy
Requires-Dist: Absent_Needed>=1
Requires-Dist: transformers>=5; extra == 'hf'
Requires-Dist: absent.extra[data] (>=2,<3) ; extra == "far"
Requires-Dist: pytest>=9; extra == 'dev'
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Pretend that the installed tenterhook has other requirements."""
    (tmp_path / "tenterhook-9.9.dist-info").mkdir()
    (tmp_path / "tenterhook-9.9.dist-info" / "METADATA").write_text(METADATA)
    monkeypatch.syspath_prepend(tmp_path)
    return {each.name: each for each in packages()}


def test_packages_have_the_extra_and_the_versions_of_the_metadata(installed):
    assert (installed["transformers"].extra, installed["transformers"].needs) == ("hf", ">=5")
    assert (installed["absent-extra"].extra, installed["absent-extra"].needs) == ("far", ">=2,<3")
    assert installed["absent-extra"].version is None
    assert installed["numpy"].required
    assert installed["numpy"].version == np.__version__


def test_packages_for_developers_and_torch_itself_are_left_out(installed):
    assert not {"pytest", "torch"} & set(installed)


def test_a_missing_package_that_tenterhook_requires_is_shown_as_missing(installed):
    lines = section(str(th.doctor()), "packages")
    assert next(line for line in lines if line.startswith("absent-needed")).split() == [
        "absent-needed", "missing", "tenterhook", ">=1",
    ]  # fmt: skip
    assert "absent-extra (tenterhook[far])" in lines[-1]


def test_without_metadata_other_packages_are_still_found(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert {"numpy", "safetensors"} <= {each.name for each in packages() if each.version}


def test_no_package_is_imported(fresh):
    assert not {"transformers", "ray", "datasets", "matplotlib", "rich", "safetensors"} & set(fresh["loaded"])


# -- GPUs --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Put a program of this name first on PATH, beside a torch that was built for CUDA."""

    def make(script):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(program.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)

    return make


def test_gpus_are_named_by_nvidia_smi_and_cuda_stays_as_it_is(nvidia_smi):
    nvidia_smi("printf 'NVIDIA H200\\nNVIDIA H200\\n'")
    found = torch_build()
    assert [(each.name, each.count) for each in found.gpus] == [("NVIDIA H200", 2)]
    assert (found.accelerator, found.devices) == ("cuda", 2)


def test_gpus_that_torch_cannot_use_are_distinguished(nvidia_smi, found):
    nvidia_smi("printf 'NVIDIA H200\\nNVIDIA H200\\nNVIDIA L4\\n'")
    text = str(replace(found, torch=torch_build()))
    assert "2 usable by torch (cuda); on this machine: 2 × NVIDIA H200, 1 × NVIDIA L4" in text


def test_without_nvidia_smi_gpus_are_counted(nvidia_smi, found):
    nvidia_smi("exit 9")
    assert "2 usable by torch (cuda)" in str(replace(found, torch=torch_build()))


def test_a_driver_that_fails_does_not_stop_the_report(monkeypatch, found):
    def fails():
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", fails)
    assert "torch failed to count them" in str(replace(found, torch=torch_build()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_is_not_initialised():
    code = "import torch, tenterhook as th; d = th.doctor(); print(torch.cuda.is_initialized(), d.torch.devices)"
    found = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert found == ["False", str(torch.cuda.device_count())]


# -- privacy -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def ada(monkeypatch):
    """A user with her own home directory."""
    monkeypatch.setenv("HOME", "/data/people/ada")
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "ada")


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("/data/people/ada/cache", "~/cache"),
        ("/data/people/ada", "~"),
        ("/data/people/adam/cache", "/data/people/adam/cache"),
        ("/home/bob/x:/Users/eve/y", "~/x:~/y"),
        (r"C:\Users\bob\torch", r"~\torch"),
        ("/tmp/torchinductor_ada/x", "/tmp/torchinductor_<user>/x"),
        ("ada", "ada"),
        ("a\x1b[31m\nb", "a [31m b"),
    ],
)
def test_home_directories_and_user_names_are_replaced(ada, text, public):
    assert redact(text) == public


def test_a_home_at_the_root_of_the_file_system_replaces_nothing(ada, monkeypatch):
    monkeypatch.setenv("HOME", "/")
    assert redact("/tmp/x") == "/tmp/x"


def test_long_texts_are_shortened():
    assert len(redact("x " * 1000)) < 250


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCH_API_TOKEN", "short"),
        ("PYTORCH_SECRET", "1"),
        ("TORCH_HUB_KEY", "1"),
        ("TORCH_MIRROR", "https://ada:pw@mirror/torch"),
        ("TORCH_LOGIN", "ada@example.org"),
        ("TORCH_PAT", "ghp_16C7e42F292c6912E7710c838347Ae178B4a"),
    ],
)
def test_what_may_be_a_secret_is_not_shown(name, value):
    assert redact_value(name, value) == HIDDEN


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OMP_NUM_THREADS", "1"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:512"),
        ("TORCH_LOGS", "+dynamo,aot,graph_breaks"),
        ("CUDA_VISIBLE_DEVICES", "0,1,2,3"),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
    ],
)
def test_settings_are_shown_as_they_are(name, value):
    assert redact_value(name, value) == value


def test_only_variables_that_matter_are_shown(monkeypatch):
    for name in ("TORCH_LOGS", "PYTORCH_JIT", "CUDA_VISIBLE_DEVICES", "AWS_REGION", "CUDA_HOME"):
        monkeypatch.setenv(name, "x")
    assert {"TORCH_LOGS", "PYTORCH_JIT", "CUDA_VISIBLE_DEVICES"} <= set(environment())
    assert not {"AWS_REGION", "CUDA_HOME", "PATH", "HOME"} & set(environment())


def test_variables_that_the_compiler_sets_are_not_taken_for_the_users(fresh):
    assert "TORCHINDUCTOR_CACHE_DIR" not in fresh["dict"]["environment"]


def test_nothing_that_is_printed_names_a_home_directory_or_a_user(fresh):
    assert fresh["dict"]["environment"]["TORCH_HOME"] == "~/torch"
    assert "ada" not in fresh["text"] + json.dumps(fresh["dict"])


# -- text --------------------------------------------------------------------------------------------------------------


def test_the_text_is_plain_and_its_columns_are_aligned(found):
    text = str(found)
    assert "\x1b" not in text
    assert repr(found) == text
    lines = section(text, "features: ")
    start = lines[1].index("status")
    rows = [line for line in lines[2:] if line[start:].startswith(("fast", "fallback", "unavailable"))]
    assert len(rows) == len(found.features)


def test_the_dict_goes_through_json_unchanged(found):
    data = found.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert {"tenterhook", "python", "torch", "tested", "features", "packages", "environment"} <= set(data)
    assert all(set(each) == {"name", "status", "why", "used_by"} for each in data["features"])


def test_html_has_every_feature_and_fetches_nothing(found):
    html = found._repr_html_()
    assert all(each.name in html for each in found.features)
    assert "src=" not in html


def test_rich_shows_what_the_text_shows(found):
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=300).print(found)
    assert [line.split() for line in out.getvalue().splitlines()] == [line.split() for line in str(found).splitlines()]
