# dtrain: `make run` and `make test` set up whatever is missing. `make help` lists the rest.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export DTRAIN_HOME ?= $(CURDIR)/.dtrain
export DAGSTER_HOME ?= $(DTRAIN_HOME)/dagster
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Where pip should look for torch besides its usual index, for a CPU build on a machine without a GPU.
TORCH_INDEX ?=
SELECT ?= not group:studies
PORT ?= 3000
# Dagster's console without its debug events.
QUIET := {"loggers": {"console": {"config": {"log_level": "INFO"}}}}

.PHONY: help setup run ui test test-fast lint format train dashboard tensorboard mlflow clean

help:  ## list what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.ready $(DAGSTER_HOME)/dagster.yaml  ## install what is missing (the others do this by themselves)

$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=python3.11")'
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing packages (once; about 2 minutes)"
	@$(BIN)/pip install --quiet --disable-pip-version-check "torch==2.13.0" $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[azure,postgres,dev]"
	@touch $@

$(DAGSTER_HOME)/dagster.yaml: dagster.yaml
	@mkdir -p $(@D)
	@cp $< $@

run: setup  ## materialize the whole graph: prices to registered model (SELECT=… for a part)
	@PYTHONWARNINGS=ignore dagster asset materialize -m dtrain_dagster.definitions --select '$(SELECT)' --config-json '$(QUIET)'
	@dtrain summary
	@echo "look at it: make ui"

ui: setup  ## the Dagster UI on http://127.0.0.1:3000 (PORT=… for another)
	@dagster dev --workspace workspace.yaml --host 127.0.0.1 --port $(PORT)

test: setup  ## all tests (browser tests want Chromium: installed where that is possible)
	@command -v chromium >/dev/null || ./tests/install_chromium.sh
	@python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 -m "not browser" || \
	  { test $$? = 1 && echo "what failed beside other tests is repeated alone; it fails here as well where it is broken" && \
	    python -m pytest --last-failed --last-failed-no-failures none -m "not browser"; }
	@python -m pytest -m browser  # alone: a page that is rendered on a busy machine runs into the browser's own timeouts

test-fast: setup  ## tests that start no world of processes and no browser
	@python -m pytest -m "not slow and not browser"

lint: setup  ## ruff and mypy
	@ruff check . && ruff format --check . && mypy

format: setup  ## let ruff put the code into shape
	@ruff check --fix . && ruff format .

dashboard: setup  ## the live dashboard of all jobs on http://127.0.0.1:8060
	@dtrain dashboard

mlflow: setup  ## the MLflow UI on http://127.0.0.1:5000
	@mkdir -p $(DTRAIN_HOME)
	@mlflow ui --backend-store-uri sqlite:///$(DTRAIN_HOME)/mlflow.db --host 127.0.0.1 --workers 1

tensorboard: setup  ## TensorBoard of all jobs on http://127.0.0.1:6006
	@tensorboard --logdir $(DTRAIN_HOME)/storage/jobs --host 127.0.0.1

clean:  ## remove everything that was made here: runs, datasets, models (keeps the packages)
	@rm -rf $(DTRAIN_HOME)
