# dtprobe: `make` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
# Which torch: a requirement with pip's own options (TORCH='torch==2.9.1 --index-url URL'), or `system` for the one $(PYTHON) has.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
NAME ?=
ARGS ?=

.PHONY: help setup scenario scenarios gpu-scenarios list doctor test lint nightly-tests bench wheel clean

help:  ## This list
	@echo 'usage: make TARGET [NAME=scenario[:variant]] [ARGS="options for dtprobe or pytest"] [PYTHON=python3.12] [TORCH=system|REQUIREMENT]'
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  %-14s %s\n", $$1, $$2}'

setup: $(STAMP)  ## Make .venv with torch and dtprobe in it

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"$(PYTHON) is Python {sys.version.split()[0]}, dtprobe needs 3.11 or later: make setup PYTHON=python3.11")'
ifeq ($(TORCH),system)
	@$(PYTHON) -c 'import importlib.util as u, sys; sys.exit(0 if u.find_spec("torch") else "$(PYTHON) has no torch: leave out TORCH=system, or name an interpreter that has one")'
	@test -x $(BIN)/python || $(PYTHON) -m venv --system-site-packages $(VENV)
	@# Where $(PYTHON) lives in a virtual environment itself, that flag reaches only the interpreter below it.
	@$(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/system.pth"
else
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'installing $(TORCH)'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
endif
	@echo 'installing dtprobe'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

scenario: $(STAMP)  ## Run a scenario: make scenario NAME=gloo-thread-leak
	@test -n '$(NAME)' || { echo 'make scenario needs NAME=…; these exist:' >&2; $(BIN)/dtprobe list >&2; exit 2; }
	@$(BIN)/dtprobe run '$(NAME)' $(ARGS)

scenarios: $(STAMP)  ## Run all scenarios that this machine can, with a summary page
	@$(BIN)/dtprobe nightly $(ARGS)

gpu-scenarios: $(STAMP)  ## Run those for two GPUs, against their baseline
	@$(BIN)/dtprobe nightly --tag gpu --against reports/baselines/h200-x2.json $(ARGS)

list: $(STAMP)  ## What scenarios there are, and which run here
	@$(BIN)/dtprobe list

doctor: $(STAMP)  ## What this machine can run, with reasons and remedies
	@$(BIN)/dtprobe doctor

test: $(STAMP)  ## The tests, in parallel
	@$(BIN)/python -m pytest -n auto $(ARGS)

nightly-tests: $(STAMP)  ## The long tests too
	@$(BIN)/python -m pytest -n auto --nightly $(ARGS)

lint: $(STAMP)  ## ruff, mypy, import-linter
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

bench: $(STAMP)  ## Every benchmark, one table each
	@for file in benchmarks/[a-z]*.py; do echo "== $$file"; $(BIN)/python $$file; done

wheel: $(STAMP)  ## Build dist/*.whl
	@$(BIN)/python -m build --no-isolation --wheel

clean:  ## Remove .venv, caches and built files; run folders stay
	@rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache
