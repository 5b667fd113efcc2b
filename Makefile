# dtrain: `make run` and `make test` set up whatever is missing. `make help` lists the rest.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Make cuts paths at blanks, and the shell cuts PATH at colons. (A home with blanks is no trouble: it is only ever named
# in quotes, and never a target.)
ifneq ($(words $(CURDIR)),1)
$(error the path of this repository has a blank, which make cannot deal with: move $(CURDIR) elsewhere)
endif
ifneq ($(findstring :,$(CURDIR)),)
$(error the path of this repository has a colon, which PATH cannot hold: move $(CURDIR) elsewhere)
endif
# Recipes take these from their environment, as "$$DTRAIN_HOME": what is pasted by make would be cut, or run, by the shell.
ifndef DTRAIN_HOME
DTRAIN_HOME := $(CURDIR)/.dtrain
endif
ifndef DAGSTER_HOME
DAGSTER_HOME := $(value DTRAIN_HOME)/dagster
endif
export DTRAIN_HOME DAGSTER_HOME
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Where pip should look for torch besides its usual index, for a CPU build on a machine without a GPU.
TORCH_INDEX ?=
export TORCH_INDEX
SELECT ?= not group:studies
export SELECT
PORT ?= 3000
# Dagster's console without its debug events.
QUIET := {"loggers": {"console": {"config": {"log_level": "INFO"}}}}

.PHONY: help setup browser run ui test test-all test-fast kube slurm ray test-engines test-streams test-torch bench lint format train dashboard mlflow docs clean lock sbom audit release

help:  ## list what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.ready  ## install what is missing (the others do this by themselves)
	@test -e "$$DTRAIN_HOME/.dtrain-home" -a -e "$$DAGSTER_HOME/dagster.yaml" || \
	  python -m dtrain_dagster setup

LOCKS := requirements.lock requirements-torch.lock requirements-cuda.lock
# Every package by its hash, none by what an index says it needs; check.py then tells whether one is missing.
LOCKED := ./tools/supply/install.sh $(BIN)/python
HAS_CUDA := 'import importlib.metadata as m; raise SystemExit(not any(r.startswith(("nvidia", "cuda")) for r in m.requires("torch")))'

$(VENV)/.ready: pyproject.toml $(LOCKS)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) and "Python 3.11 to 3.13 is needed; set PYTHON=python3.11")'
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing packages (once; a few minutes)"
	@$(LOCKED) requirements.lock
	@if test -z "$$TORCH_INDEX"; then $(LOCKED) requirements-torch.lock; \
	  else echo "torch comes from TORCH_INDEX: by its version, without a hash, since each index builds its own"; \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --extra-index-url "$$TORCH_INDEX" \
	    "$$(sed -n 's/^\(torch==[0-9.]*\).*/\1/p' requirements-torch.lock)"; fi
	@if $(BIN)/python -c $(HAS_CUDA); then $(LOCKED) requirements-cuda.lock; fi
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@$(BIN)/python tools/supply/check.py
	@touch $@

run: setup  ## materialize the whole graph: prices to registered model (SELECT=… for a part)
	@PYTHONWARNINGS=ignore python -m dtrain_dagster work --go-on-with "make run" dagster asset materialize -m dtrain_dagster.definitions --select "$$SELECT" --config-json '$(QUIET)'
	@test "$$SELECT" != "not group:studies" || dtrain status  # a part need not have trained
	@echo "look at it: make ui"

ui: setup  ## the pages of Dagster, the dashboard and MLflow: it prints three links (PORT=… for another of Dagster)
	@dtrain ui --all --workspace workspace.yaml --port $(PORT)

# Twice as many as two cores, since many tests wait: for a node to be missed, for a server to come up. About 1.2 GB each.
TEST_WORKERS ?= 4
# Folders or files of tests; all by default.
TESTS ?=
# Images of CI often forbid Python to write bytecode. Hundreds of processes of one run would each compile the same modules.
COMPILE := python -m compileall -q trainer dtrain_dagster harness

browser:
	@command -v chromium >/dev/null || ./tests/install_chromium.sh

test: setup browser  ## the tests (browser tests want Chromium: installed where that is possible); out/tests.json has their figures
	@$(COMPILE)
	@python docs/generate_reference.py
	@python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --repeat-alone \
	  --cpu-budget 2 --results=out/tests.json -m "not long and not lint" $(TESTS)

test-all: lint test test-engines test-streams  ## lint, the tests, those of frameworks and of other versions of torch, then the long ones: repetitions of proofs, loads of minutes, many examples of Hypothesis
	@for version in $(OTHER_TORCH); do $(MAKE) test-torch VERSION=$$version; done
	@python -m pytest -o faulthandler_timeout=3300 --hypothesis-profile thorough --results=out/tests-long.json -m "long or hypothesis"

test-fast: setup  ## the cheap ones of the tests, in less than a minute: no world of processes, no server, no browser
	@$(COMPILE)
	@python -m pytest -n logical --maxprocesses $(TEST_WORKERS) --dist loadfile --fast $(TESTS)

KUBE_CACHE := $${TEST_CACHE:-$$HOME/.cache/dtrain-tests}/kubernetes-1.20.2/bin

# The whole graph and the trainings on several hosts are in one file for all engines.
ON_ENGINES := --results=out/tests-engines.json tests/engines

kube: setup  ## tests on a real Kubernetes (Linux, root, Debian); its programs are built once, in about 25 minutes, if not given
	@test -x "$(KUBE_CACHE)/kubectl" -o -d "$${KUBERNETES_BINARIES:-../shared/kube}" || \
	  ./harness/engines/kubernetes_build.sh "$(KUBE_CACHE)"
	@python -m harness.engines.kubernetes_parts
	@python -m pytest -n0 $(ON_ENGINES) -k kubernetes

slurm: setup  ## tests on a real SLURM (Linux, Debian 12), whose packages are fetched and unpacked once
	@python -m harness.engines.slurm_cluster
	@python -m pytest -n0 $(ON_ENGINES) -k slurm

ray: setup  ## tests on a real Ray: a head and three raylets
	@python -m harness.engines.ray_cluster
	@python -m pytest -n0 $(ON_ENGINES) -k "ray and not array"

ENGINES := $(VENV)/engines
# Layered over the environment of all else: what both have is there once. torch's version is that of the base.
$(ENGINES)/.ready: pyproject.toml tools/frameworks/build_horovod.sh | setup
	@./tools/frameworks/make_environment.sh $(BIN)/python $(ENGINES)
	@touch $@

test-engines: $(ENGINES)/.ready  ## scripts under Horovod, DeepSpeed, Ray Train and TensorFlow (Linux; g++, cmake; builds Horovod once)
	@PATH="$(CURDIR)/$(ENGINES)/bin:$$PATH" $(ENGINES)/bin/python -m pytest -n0 --results=out/tests-frameworks.json tests/frameworks

STREAMS := datasets>=5,<6 grain>=0.2.18,<0.3 torchdata>=0.11,<0.12
test-streams: setup  ## streams of Hugging Face's datasets, Grain and torchdata, in an environment over this one
	@./tools/layered_environment.sh $(BIN)/python $(VENV)/streams
	@$(VENV)/streams/bin/python -m pip --disable-pip-version-check install --quiet $(foreach each,$(STREAMS),"$(each)")
	@$(VENV)/streams/bin/python -m pytest -n0 --results=out/tests-streams.json tests/frameworks/test_streams.py

# The ends of the range in pyproject.toml.
OTHER_TORCH := 2.11.0 2.14.1
test-torch: setup  ## the trainer's tests with another torch (VERSION=2.14.1), in an environment over this one
	@test -n "$(VERSION)" || { echo "which? make test-torch VERSION=2.14.1"; exit 2; }
	@./tools/layered_environment.sh $(BIN)/python $(VENV)/torch-$(VERSION)
	@$(VENV)/torch-$(VERSION)/bin/python -m pip --disable-pip-version-check install --quiet \
	  $(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)") "torch==$(VERSION)"
	@PATH="$(CURDIR)/$(VENV)/torch-$(VERSION)/bin:$$PATH" $(VENV)/torch-$(VERSION)/bin/python -m pytest -n 2 -m "not long" \
	  --results=out/tests-torch-$(VERSION).json tests/trainer

# Options with which a benchmark takes minutes at most. Without them it is as docs quote it.
BENCH_azure_faults := --runs 4
BENCH_chaos := --tapes 8
BENCH_control_plane := --nodes 8 32 --rounds 2
BENCH_diagnosis := --plants 12 --healthy 4 --laptop 1
BENCH_estimate := --trainings 4
BENCH_fit := --rounds 2 --ranks 2
BENCH_flaky_hosts := --engine ray --trainings 2
BENCH_fleet := --seeds 2
BENCH_large_model := --rounds 2
BENCH_links := --steps 20
BENCH_orchestration := --rounds 2 --loads 3 --long 144
BENCH_recovery := --engine local --kills 4
BENCH_scaling := --nodes 1 2
BENCH_search :=
BENCH_sensors := --sizes 10 1000
BENCH_throughput := --models tcn --batches 64 --peers --budget 120
# One or several of them. By default those that measure; azure_faults, chaos, diagnosis and flaky_hosts count what goes
# wrong in many trainings, which says little in a few minutes.
BENCH ?= control_plane estimate fleet large_model links orchestration recovery scaling search sensors throughput

bench: setup  ## benchmarks with options that make them short, one after the other (BENCH=chaos for one): a line of JSON each
	@code=0; $(foreach name,$(BENCH),echo "python -m benchmarks.$(name) $(BENCH_$(name))" >&2; \
	  python -m benchmarks.$(name) $(BENCH_$(name)) || code=1;) exit $$code

# The tests of this part that ask about files and not about behaviour: the site, the locks, Bicep, names of variables.
LINTED = $$(grep -rl --include='test_*.py' '^pytestmark = .*mark\.lint' tests)

lint: setup browser  ## ruff, mypy, the walls between rooms (.importlinter); the site, the locks, Bicep (tests marked `lint`)
	@ruff check . && ruff format --check . && mypy && lint-imports --no-logo
	@python -m pytest -n0 -m lint $(LINTED)

format: setup  ## let ruff put the code into shape
	@ruff check --fix . && ruff format .

docs: setup  ## the documentation as a site that needs no network: docs/_site/index.html
	@python -m sphinx -b html -W --keep-going -q docs docs/_site
	@echo "docs/_site/index.html"

dashboard: setup  ## the live dashboard of all jobs on http://127.0.0.1:8060
	@dtrain ui jobs

mlflow: setup  ## the MLflow UI on http://127.0.0.1:5000
	@dtrain ui mlflow

clean:  ## remove everything that was made here: runs, datasets, models (keeps the packages)
	@test -x $(BIN)/dtrain || { echo "nothing is set up here yet: \`make setup\` first" >&2; exit 2; }
	@python -m dtrain_dagster clean --yes

SUPPLY := $(VENV)/supply
$(SUPPLY)/.ready: tools/supply/requirements.lock
	@$(PYTHON) -m venv "$(SUPPLY)"
	@$(SUPPLY)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps --requirement $<
	@touch $@

lock: $(SUPPLY)/.ready  ## write the lock files anew from the ranges of pyproject.toml (needs PyPI)
	@$(SUPPLY)/bin/python tools/supply/lock.py

sbom: $(SUPPLY)/.ready  ## a bill of materials of the locked packages, out/sbom.json (CycloneDX; needs no network)
	@mkdir -p out
	@cat $(LOCKS) | PYTHONWARNINGS=ignore $(SUPPLY)/bin/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible \
	  --output-format JSON --output-file out/sbom.json -
	@echo "out/sbom.json"

audit: $(SUPPLY)/.ready  ## are vulnerabilities of the locked packages known? (needs a network)
	@PATH="$(CURDIR)/$(SUPPLY)/bin:$$PATH" $(SUPPLY)/bin/python tools/supply/audit.py $(LOCKS)

release: sbom setup  ## a release: VERSION=0.2.0, with DRY_RUN=1 only what it would be (version, changelog, packages, tag)
	@test -n "$${VERSION:-}" || { echo "which version? make release VERSION=0.2.0" >&2; exit 2; }
	@$(BIN)/python tools/supply/release.py "$$VERSION" --sbom out/sbom.json $(if $(DRY_RUN),--dry-run)
